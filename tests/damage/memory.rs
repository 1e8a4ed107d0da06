//! Memory in use by a thread, counted at allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Far from 0, because memory allocated by another thread may be freed in this one.
    static NOW: Cell<usize> = const { Cell::new(1 << 40) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static CASES: Cell<usize> = const { Cell::new(0) };
}

struct Counted;

fn count(change: impl FnOnce(usize) -> usize) {
    // An ending thread may have no counters any more.
    let _ = NOW.try_with(|now| {
        now.set(change(now.get()));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|now| now.wrapping_add(layout.size()));
        // SAFETY: by the caller's promise.
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

/// Returns the result of `read`, which may use at most `most` bytes more at any time.
pub(super) fn within<T>(most: usize, read: impl FnOnce() -> T) -> T {
    let before = NOW.get();
    PEAK.set(before);
    let found = read();
    let taken = PEAK.get() - before;
    assert!(taken <= most, "{taken} bytes were allocated, expected at most {most}");
    CASES.set(CASES.get().max(taken));
    found
}

/// Returns the peak of this thread's cases since the previous call.
pub(super) fn peak_of_cases() -> usize {
    CASES.replace(0)
}
