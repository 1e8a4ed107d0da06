//! Copies of rows: prefetching, and stores around the cache for outputs that would not stay in it.

/// Outputs of at least this size are written around the cache, as `memcpy` does with large blocks: their lines need not
/// be read first, and other cached data stays.
pub(super) const STREAM_BYTES: usize = 16 << 20;
const LINE_BYTES: usize = 64;

/// Prefetches a row that will be read soon. Rows are scattered, so the processor cannot predict the next one.
#[inline(always)]
pub(super) fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in row.chunks(LINE_BYTES / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, LINE_BYTES);
}

/// Prefetches the first 128 columns of a row's rest.
#[inline(always)]
pub(super) fn prefetch_line<T: Copy>(rest: &[T]) {
    prefetch(&rest[..rest.len().min(128)]);
}

/// Copies one or more rows, around the cache if `stream` and they consist of full aligned vectors.
///
/// After streaming, [`finish_stream`] must be called before another thread may read.
#[inline(always)]
pub(crate) fn copy<T: Copy>(from: &[T], to: &mut [T], stream: bool) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if stream && size_of_val(to).is_multiple_of(LINE_BYTES) && to.as_ptr().addr().is_multiple_of(16) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let (mut source, mut target) = (from.as_ptr().cast::<__m128i>(), to.as_mut_ptr().cast::<__m128i>());
        for _ in 0..size_of_val(to) / LINE_BYTES {
            // SAFETY: both rows hold this number of full lines of four vectors, the target's are aligned (checked),
            // and SSE2 is part of x86-64.
            unsafe {
                let line = [0, 1, 2, 3].map(|vector| _mm_loadu_si128(source.add(vector)));
                for (vector, value) in line.into_iter().enumerate() {
                    _mm_stream_si128(target.add(vector), value);
                }
                (source, target) = (source.add(4), target.add(4));
            }
        }
        return;
    }
    let _ = stream;
    to.copy_from_slice(from);
}

/// Makes streamed stores visible before any later operation.
pub(crate) fn finish_stream() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
