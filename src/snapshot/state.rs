//! State of a buffer in three words of shared memory: version, state, seal.
//!
//! A killed process leaves its stores in the order in which it made them; the fences preserve that order. The seal is a
//! checksum of the version: a complete buffer whose seal does not match counts as empty. So does a buffer that records
//! another version itself, as the state is then not its own. Units have their own digests.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use xxhash_rust::xxh3::xxh3_64;

const WRITING: u64 = 1;
/// Many bits away from `WRITING`, so that no single flipped bit completes a buffer.
const COMPLETE: u64 = u64::from_le_bytes(*b"COMPLETE");

/// The state of one buffer, in its own cache line. All zero means empty.
#[repr(C, align(64))]
pub(super) struct State {
    version: AtomicU64,
    word: AtomicU64,
    seal: AtomicU64,
}

impl State {
    /// The version, if it is complete and is the one that was begun.
    pub(super) fn complete(&self) -> Option<u64> {
        if self.word.load(Ordering::Acquire) != COMPLETE {
            return None;
        }
        let version = self.version.load(Ordering::Relaxed);
        let is_sealed = self.seal.load(Ordering::Relaxed) == seal(version);
        fence(Ordering::Acquire); // a writer that has begun meanwhile hid the buffer before it stored its version
        (is_sealed && self.word.load(Ordering::Relaxed) == COMPLETE).then_some(version)
    }

    /// The version that is being written.
    pub(super) fn writing(&self) -> Option<u64> {
        (self.word.load(Ordering::Acquire) == WRITING).then(|| self.version.load(Ordering::Relaxed))
    }

    /// Hides the buffer; later writes to it are stored after that.
    pub(super) fn begin(&self, version: u64) {
        self.word.store(WRITING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.version.store(version, Ordering::Relaxed);
        self.seal.store(seal(version), Ordering::Relaxed);
    }

    /// Shows the buffer; earlier writes to it are stored before that.
    pub(super) fn publish(&self) {
        fence(Ordering::SeqCst);
        self.word.store(COMPLETE, Ordering::Release);
    }
}

/// Checksum of a version: versions that differ in few bits have checksums that differ in many.
fn seal(version: u64) -> u64 {
    xxh3_64(&version.to_le_bytes())
}

/// The buffer to overwrite: the first without a complete version, or else the one with the older version.
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
    fn a_version_is_complete_only_with_its_seal() {
        let state = State { version: AtomicU64::new(0), word: AtomicU64::new(0), seal: AtomicU64::new(0) };
        assert_eq!(state.complete(), None);
        state.begin(5);
        assert_eq!((state.complete(), state.writing()), (None, Some(5)));
        state.publish();
        assert_eq!((state.complete(), state.writing()), (Some(5), None));
        for bit in 0..64 {
            for word in [&state.version, &state.word, &state.seal] {
                word.fetch_xor(1 << bit, Ordering::Relaxed);
                assert_eq!(state.complete(), None, "bit {bit}");
                word.fetch_xor(1 << bit, Ordering::Relaxed);
            }
        }
        state.begin(6);
        assert_eq!(state.complete(), None);
    }

    #[test]
    fn the_newer_version_is_never_overwritten() {
        assert_eq!(oldest([None, None]), 0);
        assert_eq!(oldest([Some(0), None]), 1);
        assert_eq!(oldest([None, Some(9)]), 0);
        assert_eq!(oldest([Some(5), Some(4)]), 1);
        assert_eq!(oldest([Some(4), Some(5)]), 0);
    }
}
