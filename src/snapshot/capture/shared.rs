//! State shared by the copying thread and its callers: the queue, the captures' work, and their progress.

use super::queue::{Action, Done, Queue};
use super::work::Work;
use crate::error::{Error, Result};
use crate::snapshot::Arena;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Reason of a capture's cancellation.
pub(super) const BY_CALLER: &str = "by its caller";
const SHUT_DOWN: &str = "the engine was shut down";

/// Progress of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// Nothing is copied yet.
    Waiting,
    /// Part of it may be in place.
    Copying,
    /// All bytes are in place and the version is published.
    Complete,
    /// It will never be complete, and its sources are no longer read.
    Cancelled,
}

#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub(super) state: CaptureState,
    /// Offset in the buffer up to which the units' bytes are in place; the buffer's size once the version is complete.
    pub(super) done_bytes: usize,
    /// Time that copying took.
    pub(super) busy: Duration,
    /// Reason of the cancellation.
    pub(super) why: String,
}

/// Progress of one capture, written by the thread and read by its handle.
pub(super) struct Record {
    pub(super) version: u64,
    pub(super) index: usize,
    pub(super) payload_bytes: usize,
    progress: Mutex<Progress>,
}

impl Record {
    pub(super) fn new(version: u64, index: usize, payload_bytes: usize) -> Self {
        let (state, done_bytes, busy) = (CaptureState::Waiting, 0, Duration::ZERO);
        let progress = Mutex::new(Progress { state, done_bytes, busy, why: String::new() });
        Self { version, index, payload_bytes, progress }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self) -> Progress {
        self.lock().clone()
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.lock().state, CaptureState::Complete | CaptureState::Cancelled)
    }

    fn copied(&self, position: Option<usize>, busy: Duration) {
        let mut progress = self.lock();
        progress.state = CaptureState::Copying;
        progress.busy += busy;
        progress.done_bytes = position.unwrap_or(progress.done_bytes);
    }

    /// Ends the capture; the first outcome counts.
    pub(super) fn end(&self, outcome: std::result::Result<(), String>) {
        let mut progress = self.lock();
        if matches!(progress.state, CaptureState::Complete | CaptureState::Cancelled) {
            return;
        }
        match outcome {
            Ok(()) => (progress.state, progress.done_bytes) = (CaptureState::Complete, self.payload_bytes),
            Err(why) => (progress.state, progress.why) = (CaptureState::Cancelled, why),
        }
    }
}

/// A capture that is not over.
pub(super) struct Entry {
    pub(super) arena: Arc<Arena>,
    pub(super) record: Arc<Record>,
    /// None while a thread works on it or ends it.
    pub(super) work: Option<Work>,
}

pub(super) struct State {
    pub(super) queue: Queue,
    /// The captures that are not over.
    pub(super) entries: BTreeMap<u64, Entry>,
}

pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the copying thread: it may have work.
    pub(super) wake: Condvar,
    /// Wakes the callers: a capture has progressed or is over.
    pub(super) changed: Condvar,
}

impl Shared {
    pub(super) fn new(chunk_bytes: usize) -> Self {
        let state = State { queue: Queue::new(chunk_bytes), entries: BTreeMap::new() };
        Self { state: Mutex::new(state), wake: Condvar::new(), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue and wakes the thread.
    pub(super) fn change(&self, change: impl FnOnce(&mut Queue)) {
        change(&mut self.lock().queue);
        self.wake.notify_one();
    }

    /// Ends a capture whose work has been dropped: from its end on, callers may write its sources.
    pub(super) fn end(&self, capture: u64, record: &Record, outcome: std::result::Result<(), String>) {
        let mut state = self.lock();
        state.entries.remove(&capture);
        record.end(outcome);
        self.changed.notify_all();
    }

    /// The copying thread: copies chunk by chunk until the queue stops; then no capture is left waiting.
    pub(super) fn run(&self) {
        let _ended = CancelAll(self);
        let mut state = self.lock();
        loop {
            match state.queue.next() {
                Action::Stop => return,
                Action::Wait => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Action::Copy { capture, bytes } => {
                    let entry = state.entries.get_mut(&capture).expect("a queued capture has an entry");
                    let work =
                        entry.work.take().expect("only this thread takes the work of a queued capture");
                    let (arena, record) = (entry.arena.clone(), entry.record.clone());
                    drop(state);
                    self.copy(capture, bytes, work, &arena, &record);
                    state = self.lock();
                }
            }
        }
    }

    fn copy(&self, capture: u64, bytes: usize, mut work: Work, arena: &Arena, record: &Record) {
        let reserved = arena.reserve_all();
        let start = Instant::now(); // reserving happens once, so it must not count as time of later versions
        let advanced = reserved.and_then(|()| {
            // SAFETY: by the promise of the capture's caller, which writes the sources only once it is over.
            unsafe { work.advance(bytes) }
        });
        let busy = start.elapsed();
        let mut state = self.lock();
        if advanced.is_err() {
            state.queue.cancel(capture);
        }
        record.copied(work.position().filter(|_| advanced.is_ok()), busy);
        let done = state.queue.done();
        if done == Done::Part {
            let entry = state.entries.get_mut(&capture);
            entry.expect("a queued capture has an entry").work = Some(work);
            self.changed.notify_all();
            return;
        }
        let stopped = state.queue.is_stopped();
        // No other thread can end it now: it is no longer queued, and this thread has its work.
        drop(state);
        let outcome = match done {
            _ if advanced.is_err() => advanced.map_err(|error| error.to_string()),
            Done::Last => arena.commit_with(record.index, work.digests()).map_err(|error| error.to_string()),
            _ if stopped => Err(SHUT_DOWN.into()),
            _ => Err(BY_CALLER.into()),
        };
        drop(work);
        self.end(capture, record, outcome);
    }
}

/// Ensures that no caller waits after the thread ends, for whatever reason.
struct CancelAll<'a>(&'a Shared);

impl Drop for CancelAll<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.queue.stop();
        let entries = std::mem::take(&mut state.entries);
        drop(state);
        for entry in entries.into_values() {
            drop(entry.work);
            entry.record.end(Err(SHUT_DOWN.into()));
        }
        // A caller that has just checked is waiting by now.
        drop(self.0.lock());
        self.0.changed.notify_all();
    }
}

/// The result of a wait for `bytes`, or for all, once the capture is over or far enough; none to keep waiting.
pub(super) fn answer(progress: &Progress, version: u64, bytes: Option<usize>) -> Option<Result<usize>> {
    match progress.state {
        CaptureState::Complete => Some(Ok(progress.done_bytes)),
        CaptureState::Cancelled => {
            let why = &progress.why;
            Some(Err(Error::cancelled(format!("the capture of version {version}"), why)))
        }
        _ => bytes.filter(|&bytes| progress.done_bytes >= bytes).map(|_| Ok(progress.done_bytes)),
    }
}
