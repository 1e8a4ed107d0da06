//! Loops over ranges that the caller may spread over threads.

use std::marker::PhantomData;
use std::ops::Range;

/// Runs a body over `0..len`, in any cut and order, possibly on several threads at once.
pub trait Parallel {
    /// Number of threads that a loop is spread over.
    fn threads(&self) -> usize {
        1
    }

    /// Calls `body` on ranges that together cover `0..len` once; a range holds about `grain` items or more.
    fn run(&self, len: usize, grain: usize, body: &(dyn Fn(Range<usize>) + Sync));
}

/// The plain loop.
#[derive(Debug, Clone, Copy)]
pub struct Serial;

impl Parallel for Serial {
    fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        if len > 0 {
            body(0..len);
        }
    }
}

/// A slice that the threads of a loop write, each its own elements.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable slice whose methods are unsafe: callers promise that no element is met twice.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements `range`, to be written.
    ///
    /// # Safety
    /// No other code uses an element of `range` while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice (just checked), and the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Stores one element.
    ///
    /// # Safety
    /// `index` is below the length, and no other code uses the element during the call.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, index: usize, value: T) {
        debug_assert!(index < self.len);
        // SAFETY: inside the slice and unshared, by the caller's promise.
        unsafe { self.start.add(index).write(value) }
    }
}
