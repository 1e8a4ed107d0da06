//! One end of a message: its memory and its progress.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One end of a message.
#[derive(Debug)]
pub(super) struct Item {
    /// Rank of the member at the other end.
    pub(super) peer: usize,
    address: *mut u8,
    nbytes: usize,
    progress: Mutex<Progress>,
    changed: Condvar,
}

// SAFETY: only the thread for which `begin` returned true touches the memory, until it calls `finish`.
unsafe impl Send for Item {}
// SAFETY: as above; everything else is behind a lock.
unsafe impl Sync for Item {}

#[derive(Clone, Debug)]
enum Progress {
    Waiting,
    Moving(Instant),
    /// The result, and for how long it was moving.
    Done(Result<usize, String>, Duration),
}

impl Item {
    pub(super) fn new(peer: usize, address: *mut u8, nbytes: usize) -> Arc<Self> {
        let progress = Mutex::new(Progress::Waiting);
        Arc::new(Self { peer, address, nbytes, progress, changed: Condvar::new() })
    }

    /// Size of the message, or of the room for it.
    pub(super) fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Whether the calling thread may touch the memory until it calls `finish`; false if the transfer was abandoned.
    pub(super) fn begin(&self) -> bool {
        let mut progress = self.lock();
        let is_wanted = matches!(*progress, Progress::Waiting);
        if is_wanted {
            *progress = Progress::Moving(Instant::now());
        }
        is_wanted
    }

    /// The first bytes of the message, to be sent.
    ///
    /// # Safety
    /// `begin` must have returned true to this thread, which has not called `finish`.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the memory exists until the transfer is over, as promised by the caller who began it.
        unsafe { std::slice::from_raw_parts(self.address, self.nbytes) }
    }

    /// Memory for the first `nbytes` of a message that arrives.
    ///
    /// # Safety
    /// As `bytes`; `nbytes` must not exceed the room.
    #[expect(clippy::mut_from_ref, reason = "one thread alone has the memory, see `begin`")]
    pub(super) unsafe fn room(&self, nbytes: usize) -> &mut [u8] {
        // SAFETY: as in `bytes`, and nothing else reads or writes the memory until then.
        unsafe { std::slice::from_raw_parts_mut(self.address, nbytes) }
    }

    /// Ends the access of the thread that moved the bytes.
    pub(super) fn finish(&self, result: Result<usize, String>) {
        let mut progress = self.lock();
        let took = if let Progress::Moving(since) = &*progress { since.elapsed() } else { Duration::ZERO };
        *progress = Progress::Done(result, took);
        self.changed.notify_all();
    }

    /// Fails the transfer, unless a thread has begun: that thread will finish it.
    pub(super) fn fail(&self, reason: &str) {
        let mut progress = self.lock();
        if matches!(*progress, Progress::Waiting) {
            *progress = Progress::Done(Err(reason.to_owned()), Duration::ZERO);
            self.changed.notify_all();
        }
    }

    /// Waits for the result; none if it does not arrive within the limit.
    pub(super) fn wait(&self, limit: Duration) -> Option<Result<usize, String>> {
        let deadline = Instant::now() + limit;
        let mut progress = self.lock();
        loop {
            if let Progress::Done(result, _) = &*progress {
                return Some(result.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            progress = self.changed.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Time in which its bytes were moving; none if they still are, or if it failed.
    pub(super) fn took(&self) -> Option<Duration> {
        if let Progress::Done(Ok(_), took) = &*self.lock() { Some(*took) } else { None }
    }

    /// Whether a thread has begun and not finished.
    pub(super) fn is_moving(&self) -> bool {
        matches!(*self.lock(), Progress::Moving(_))
    }

    /// Waits until no thread touches the memory.
    pub(super) fn wait_still(&self) {
        let progress = self.lock();
        let is_moving = |progress: &mut Progress| matches!(progress, Progress::Moving(_));
        drop(self.changed.wait_while(progress, is_moving).unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
