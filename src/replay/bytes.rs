//! Numbers as their bytes.

use half::bf16;

/// The bytes of numbers, which are little-endian on every machine that this library runs on.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little")) };
    // SAFETY: `T` has no padding, any byte is a `u8`, and the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Numbers: every pattern of bits is one, and they have no padding.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for bf16 {}
