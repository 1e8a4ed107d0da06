//! One message at one end: its memory, and how far it is.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A message at one end.
#[derive(Debug)]
pub(super) struct Item {
    /// Rank of the member at the other end.
    pub(super) peer: usize,
    address: *mut u8,
    nbytes: usize,
    progress: Mutex<Progress>,
    changed: Condvar,
}

// SAFETY: the memory is touched by the one thread alone that has `begin` say yes, until it says `finish`.
unsafe impl Send for Item {}
// SAFETY: as above; all else is behind a lock.
unsafe impl Sync for Item {}

#[derive(Clone, Debug)]
enum Progress {
    Waiting,
    Moving,
    Done(Result<usize, String>),
}

impl Item {
    pub(super) fn new(peer: usize, address: *mut u8, nbytes: usize) -> Arc<Self> {
        let progress = Mutex::new(Progress::Waiting);
        Arc::new(Self { peer, address, nbytes, progress, changed: Condvar::new() })
    }

    /// Room for the message, or its length.
    pub(super) fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Whether the thread that asks may touch the memory, until it says `finish`: not if nobody waits any more.
    pub(super) fn begin(&self) -> bool {
        let mut progress = self.lock();
        let is_wanted = matches!(*progress, Progress::Waiting);
        if is_wanted {
            *progress = Progress::Moving;
        }
        is_wanted
    }

    /// The first bytes of the message, to be sent.
    ///
    /// # Safety
    /// `begin` has said yes to this thread, which has not said `finish`.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is there until the transfer is over, as who began it has promised.
        unsafe { std::slice::from_raw_parts(self.address, self.nbytes) }
    }

    /// Memory for the first `nbytes` of a message that comes.
    ///
    /// # Safety
    /// As `bytes`; `nbytes` is not more than there is room for.
    #[expect(clippy::mut_from_ref, reason = "one thread alone has the memory, see `begin`")]
    pub(super) unsafe fn room(&self, nbytes: usize) -> &mut [u8] {
        // SAFETY: as in `bytes`, and nothing else reads or writes it until then.
        unsafe { std::slice::from_raw_parts_mut(self.address, nbytes) }
    }

    /// The thread that moved the bytes no longer touches the memory.
    pub(super) fn finish(&self, result: Result<usize, String>) {
        *self.lock() = Progress::Done(result);
        self.changed.notify_all();
    }

    /// Fails unless a thread has begun: that one will.
    pub(super) fn fail(&self, reason: &str) {
        let mut progress = self.lock();
        if matches!(*progress, Progress::Waiting) {
            *progress = Progress::Done(Err(reason.to_owned()));
            self.changed.notify_all();
        }
    }

    /// The result once it is there; none if it is not within the limit.
    pub(super) fn wait(&self, limit: Duration) -> Option<Result<usize, String>> {
        let deadline = Instant::now() + limit;
        let mut progress = self.lock();
        loop {
            if let Progress::Done(result) = &*progress {
                return Some(result.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            progress = self.changed.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether a thread has begun and not finished.
    pub(super) fn is_moving(&self) -> bool {
        matches!(*self.lock(), Progress::Moving)
    }

    /// Waits until no thread touches the memory.
    pub(super) fn wait_still(&self) {
        let progress = self.lock();
        let is_moving = |progress: &mut Progress| matches!(progress, Progress::Moving);
        drop(self.changed.wait_while(progress, is_moving).unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
