//! Loops over ranges that the caller may distribute over threads.

use std::marker::PhantomData;
use std::ops::Range;

/// Runs a body over `0..len`, divided and ordered arbitrarily, possibly on several threads at once.
pub trait Parallel {
    /// Number of threads of a loop.
    fn threads(&self) -> usize {
        1
    }

    /// Calls `body` on ranges that together cover `0..len` once; a range has at least about `grain` items.
    fn run(&self, len: usize, grain: usize, body: &(dyn Fn(Range<usize>) + Sync));
}

/// A plain loop without threads.
#[derive(Debug, Clone, Copy)]
pub struct Serial;

impl Parallel for Serial {
    fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        if len > 0 {
            body(0..len);
        }
    }
}

/// A slice that the threads of a loop write, each thread its own elements.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable slice whose methods are unsafe: callers promise that no element is used twice.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Returns the elements of `range` for writing.
    ///
    /// # Safety
    /// No other code may use an element of `range` while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice (just checked), and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Stores one element.
    ///
    /// # Safety
    /// `index` must be below the length, and no other code may use the element during the call.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, index: usize, value: T) {
        debug_assert!(index < self.len);
        // SAFETY: inside the slice and unshared, by the caller's promise.
        unsafe { self.start.add(index).write(value) }
    }
}
