//! Memory that a thread has at a time, counted where it is allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Far from 0: what another thread has allocated may be freed here.
    static NOW: Cell<usize> = const { Cell::new(1 << 40) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static CASES: Cell<usize> = const { Cell::new(0) };
}

struct Counted;

fn count(change: impl FnOnce(usize) -> usize) {
    // A thread that ends may have no counters any more.
    let _ = NOW.try_with(|now| {
        now.set(change(now.get()));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|now| now.wrapping_add(layout.size()));
        // SAFETY: the caller's promise is this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(|now| now.wrapping_add(layout.size()));
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(|now| now.wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

/// What `read` returns; it may have so many bytes at a time, beyond what there is already.
pub(super) fn within<T>(most: usize, read: impl FnOnce() -> T) -> T {
    let before = NOW.get();
    PEAK.set(before);
    let found = read();
    let taken = PEAK.get() - before;
    assert!(taken <= most, "{taken} bytes were allocated, expected at most {most}");
    CASES.set(CASES.get().max(taken));
    found
}

/// The most that a case of this thread took since this was asked last.
pub(super) fn peak_of_cases() -> usize {
    CASES.replace(0)
}
