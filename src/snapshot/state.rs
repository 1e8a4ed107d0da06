//! The life of a buffer, in two words of shared memory.
//!
//! A killed process leaves what it had stored, in the order in which it stored it; the fences keep that order.

use std::sync::atomic::{AtomicU64, Ordering, fence};

const WRITING: u64 = 1;
/// Far from `WRITING`, so that no single flipped bit completes a buffer.
const COMPLETE: u64 = u64::from_le_bytes(*b"COMPLETE");

/// The state of one buffer, in a cache line of its own. All zero is empty.
#[repr(C, align(64))]
pub(super) struct State {
    version: AtomicU64,
    word: AtomicU64,
}

impl State {
    /// The version, if all of it is there.
    pub(super) fn complete(&self) -> Option<u64> {
        (self.word.load(Ordering::Acquire) == COMPLETE).then(|| self.version.load(Ordering::Relaxed))
    }

    pub(super) fn is_writing(&self) -> bool {
        self.word.load(Ordering::Acquire) == WRITING
    }

    /// Hides the buffer; nothing that is written to it later is stored before.
    pub(super) fn begin(&self, version: u64) {
        self.word.store(WRITING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.version.store(version, Ordering::Relaxed);
    }

    /// Shows the buffer; all that was written to it before is stored before.
    pub(super) fn publish(&self) {
        fence(Ordering::SeqCst);
        self.word.store(COMPLETE, Ordering::Release);
    }
}

/// The buffer to overwrite: the first without a complete version, else the one with the older version.
pub(super) fn oldest(versions: [Option<u64>; 2]) -> usize {
    match versions {
        [None, _] => 0,
        [_, None] => 1,
        [Some(first), Some(second)] => usize::from(second < first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_version_is_never_overwritten() {
        assert_eq!(oldest([None, None]), 0);
        assert_eq!(oldest([Some(0), None]), 1);
        assert_eq!(oldest([None, Some(9)]), 0);
        assert_eq!(oldest([Some(5), Some(4)]), 1);
        assert_eq!(oldest([Some(4), Some(5)]), 0);
    }
}
