//! Numbers as their bytes.

use half::bf16;

/// Returns the bytes of numbers; every supported machine is little-endian.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little")) };
    // SAFETY: `T` has no padding, any byte is a valid `u8`, and the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Numbers without padding for which every bit pattern is valid.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for bf16 {}
