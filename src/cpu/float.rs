//! Blocks of floats as float32 and back, with one rounding.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Columns that are widened at a time: the float32 copies stay in the first-level cache.
pub(super) const BLOCK: usize = 256;

/// A row's element type. Arithmetic is in float32; storing rounds once, to nearest even.
pub trait Float: Copy + Send + Sync + 'static {
    /// Zero.
    const ZERO: Self;

    /// The block as float32: itself, or widened into `scratch`. At most 256 elements.
    fn widen<'a>(block: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32];

    /// Calls `update` with each element of `sums` and the block's element as float32.
    #[inline(always)]
    fn update(block: &[Self], sums: &mut [f32], update: impl Fn(&mut f32, f32)) {
        let mut scratch = [0.0; BLOCK];
        let block = Self::widen(block, &mut scratch);
        sums.iter_mut().zip(block).for_each(|(sum, &value)| update(sum, value));
    }

    /// Stores float32 values, rounded.
    fn narrow(values: &[f32], block: &mut [Self]);
}

impl Float for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen<'a>(block: &'a [Self], _scratch: &'a mut [f32]) -> &'a [f32] {
        block
    }

    #[inline(always)]
    fn narrow(values: &[f32], block: &mut [Self]) {
        block.copy_from_slice(values);
    }
}

impl Float for bf16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn widen<'a>(block: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        let scratch = &mut scratch[..block.len()];
        for (value, half) in scratch.iter_mut().zip(block) {
            *value = f32::from_bits(u32::from(half.to_bits()) << 16);
        }
        scratch
    }

    /// Without a detour through memory, which would be half of the work.
    #[inline(always)]
    fn update(block: &[Self], sums: &mut [f32], update: impl Fn(&mut f32, f32)) {
        for (sum, half) in sums.iter_mut().zip(block) {
            update(sum, f32::from_bits(u32::from(half.to_bits()) << 16));
        }
    }

    #[inline(always)]
    fn narrow(values: &[f32], block: &mut [Self]) {
        for (half, &value) in block.iter_mut().zip(values) {
            // Without branches, so that it is vectorised; the same result as `bf16::from_f32`.
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet_nan = bits >> 16 | 0x40;
            *half = Self::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16);
        }
    }
}

impl Float for f16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn widen<'a>(block: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        let scratch = &mut scratch[..block.len()];
        block.convert_to_f32_slice(scratch);
        scratch
    }

    #[inline(always)]
    fn narrow(values: &[f32], block: &mut [Self]) {
        block.convert_from_f32_slice(values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bfloat16_rounds_as_half_does(bits: u32) {
            let value = f32::from_bits(bits);
            let mut block = [bf16::ZERO];
            bf16::narrow(&[value], &mut block);
            prop_assert_eq!(block[0].to_bits(), bf16::from_f32(value).to_bits());
        }
    }
}
