//! The copying thread: captures scattered memory into arenas in the background, a chunk at a time, while a gate is
//! open.
//!
//! ```text
//! training  step ─ capture ─ open ──────── close_gate ─ … ─ open ─ hurry, wait ─ may write the sources again
//! thread            ·        chunk chunk chunk          ·   chunk  chunk ─► digests, published
//! ```
//!
//! [`queue`] decides, [`work`] copies and hashes, and [`shared`] runs the thread; this file is the public interface.

mod queue;
mod shared;
mod work;

use super::Arena;
use crate::background::lower_priority;
use crate::ensure;
use crate::error::{Error, Result};
use shared::{BY_CALLER, Entry, Record, Shared, answer};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::Work;

pub use shared::CaptureState;
pub use work::{Digests, Fetch, Run, copy_units};

/// A thread that captures memory into arenas, one capture after the other.
///
/// The gate is closed at first. The thread runs as `evermoe-copy`, on Linux as a batch job with a nice value 5 higher
/// than the caller's, so that training threads win if both compete for the same cores.
pub struct CopyEngine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl CopyEngine {
    /// Starts the thread, which copies at most `chunk_bytes` before it checks the gate again.
    ///
    /// # Errors
    /// [`Error::Invalid`] for chunks of 0 bytes, [`Error::Io`] if the system cannot start a thread.
    pub fn new(chunk_bytes: usize) -> Result<Self> {
        ensure!(chunk_bytes > 0, "chunk_bytes: expected at least 1, got 0");
        let shared = Arc::new(Shared::new(chunk_bytes));
        let thread = {
            let shared = shared.clone();
            let builder = std::thread::Builder::new().name("evermoe-copy".into());
            builder.spawn(move || {
                lower_priority();
                shared.run();
            })
        };
        let thread = thread.map_err(|error| Error::io("starting the copying thread", error))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// Begins `version` in the arena and lets the thread copy each unit from its runs in `sources`, in the order of the
    /// arena's units. `kept` is dropped when nothing is read any more, before any caller can observe the end of the
    /// capture.
    ///
    /// # Safety
    /// Until the capture is over, the runs must stay readable, which `kept` may ensure, and no other code may write
    /// them or begin another version in the arena.
    ///
    /// # Errors
    /// [`Error::Invalid`] for runs that do not add up to their units, while an earlier capture of this engine into the
    /// arena is not over, and after [`shutdown`](Self::shutdown). No version has then been begun.
    pub unsafe fn capture(
        &self,
        arena: &Arc<Arena>,
        version: u64,
        sources: &[Vec<Run>],
        kept: Box<dyn Any + Send>,
    ) -> Result<Capture> {
        self.start(arena, version, Work::new(arena.layout(), Some(sources), None, None, kept)?)
    }

    /// Begins `version` like [`capture`](Self::capture), from sources that `fetch` copies to their runs, such as a
    /// device's. Without runs it copies them to their places in the arena's buffer. With `digests` the device computes the
    /// digests of long units from its own bytes, and the host does not read what arrives.
    ///
    /// # Safety
    /// As [`capture`](Self::capture); a run must be readable and unchanged once its bytes are fetched. `fetch` must
    /// write only to the buffer, and no longer once it has been dropped.
    ///
    /// # Errors
    /// As [`capture`](Self::capture).
    pub unsafe fn capture_fetched(
        &self,
        arena: &Arc<Arena>,
        version: u64,
        sources: Option<&[Vec<Run>]>,
        fetch: Fetch,
        digests: Option<Digests>,
        kept: Box<dyn Any + Send>,
    ) -> Result<Capture> {
        self.start(arena, version, Work::new(arena.layout(), sources, Some(fetch), digests, kept)?)
    }

    fn start(&self, arena: &Arc<Arena>, version: u64, mut work: Work) -> Result<Capture> {
        let mut state = self.shared.lock();
        let taken = state.entries.values().find(|entry| Arc::ptr_eq(&entry.arena, arena));
        ensure!(
            taken.is_none(),
            "arena: version {} is still being captured into it; wait for it or cancel it first",
            taken.map_or(0, |entry| entry.record.version)
        );
        let Some(id) = state.queue.push(work.total_bytes()) else {
            return Err(Error::invalid("the engine was shut down; make another"));
        };
        let index = arena.begin(version);
        work.begin(arena.buffer(index)?);
        let record = Arc::new(Record::new(version, index, arena.layout().payload_bytes()));
        state.entries.insert(id, Entry { arena: arena.clone(), record: record.clone(), work: Some(work) });
        drop(state);
        self.shared.wake.notify_one();
        Ok(Capture { shared: self.shared.clone(), id, record })
    }

    /// Opens the gate for `bytes` more bytes, or until it is closed. Replaces the previous allowance.
    pub fn open(&self, bytes: Option<usize>) {
        self.shared.change(|queue| queue.open(bytes));
    }

    /// Closes the gate; the chunk in progress is completed.
    pub fn close_gate(&self) {
        self.open(Some(0));
    }

    /// Cancels all captures and ends the thread. When it returns, nothing is read any more. Further calls do nothing.
    pub fn shutdown(&self) {
        // A forked child does not have the thread, and its copy of the lock may never be released.
        if std::process::id() != self.process {
            return;
        }
        self.shared.change(queue::Queue::stop);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let own = std::thread::current().id();
        // Objects that a capture has kept may own the engine, which then ends on its own thread.
        if let Some(thread) = thread.take().filter(|thread| thread.thread().id() != own) {
            // A panicked thread has printed its message, and has cancelled everything.
            let _ = thread.join();
        }
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.shutdown();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(thread.take());
    }
}

impl fmt::Debug for CopyEngine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CopyEngine").finish_non_exhaustive()
    }
}

/// A version that is being captured into an arena. Dropping this handle changes nothing.
pub struct Capture {
    shared: Arc<Shared>,
    id: u64,
    record: Arc<Record>,
}

impl Capture {
    /// The buffer of the arena that is being written.
    pub fn index(&self) -> usize {
        self.record.index
    }

    /// The version of the buffer once it is complete.
    pub fn version(&self) -> u64 {
        self.record.version
    }

    /// Progress of the capture.
    pub fn state(&self) -> CaptureState {
        self.record.progress().state
    }

    /// Offset in the buffer up to which the units' bytes are in place. Version and digests, at the start of the buffer,
    /// are written last: only the full size means that the version is complete and published.
    pub fn done_bytes(&self) -> usize {
        self.record.progress().done_bytes
    }

    /// Time that the thread has spent on copying it.
    pub fn busy(&self) -> Duration {
        self.record.progress().busy
    }

    /// Waits until [`done_bytes`](Self::done_bytes) is at least `bytes`, or the version is complete, and returns it; it
    /// is smaller if `timeout` has expired.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more bytes than the buffer has, [`Error::Cancelled`] if the capture is or becomes
    /// cancelled.
    pub fn wait(&self, bytes: Option<usize>, timeout: Option<Duration>) -> Result<usize> {
        let all = self.record.payload_bytes;
        let target = bytes.unwrap_or(all);
        ensure!(target <= all, "nbytes: expected at most {all}, the bytes of a buffer, got {target}");
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.shared.lock();
        loop {
            let progress = self.record.progress();
            if let Some(answer) = answer(&progress, self.record.version, bytes) {
                return answer;
            }
            let changed = &self.shared.changed;
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Ok(progress.done_bytes),
                Some(left) => changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Lets the capture and all earlier ones pass the gate: a caller waits to write its sources.
    pub fn hurry(&self) {
        self.shared.change(|queue| queue.hurry(self.id));
    }

    /// Cancels the capture unless it is over. When this returns, its sources are no longer read, and its buffer has no
    /// version unless it was complete.
    pub fn cancel(&self) {
        let mut state = self.shared.lock();
        state.queue.cancel(self.id);
        if let Some(work) = state.entries.get_mut(&self.id).and_then(|entry| entry.work.take()) {
            drop(state);
            drop(work);
            self.shared.end(self.id, &self.record, Err(BY_CALLER.into()));
            // Later captures may proceed.
            self.shared.wake.notify_one();
            return;
        }
        while !self.record.is_over() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl fmt::Debug for Capture {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let progress = self.record.progress();
        let mut debug = formatter.debug_struct("Capture");
        debug.field("version", &self.record.version).field("index", &self.record.index);
        debug.field("state", &progress.state).field("done_bytes", &progress.done_bytes).finish()
    }
}
