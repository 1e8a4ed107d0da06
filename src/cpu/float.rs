//! Conversion of blocks of floats to float32 and back, with one rounding.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A row's element type. Arithmetic is in float32; storing rounds once, to nearest even.
pub trait Float: Copy + Send + Sync + 'static {
    /// Zero.
    const ZERO: Self;

    /// The elements as float32.
    fn wide<const N: usize>(block: &[Self; N]) -> [f32; N];

    /// Float32 values, rounded.
    fn narrow<const N: usize>(values: &[f32; N]) -> [Self; N];
}

impl Float for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn wide<const N: usize>(block: &[Self; N]) -> [f32; N] {
        *block
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: &[f32; N]) -> [Self; N] {
        *values
    }
}

impl Float for bf16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn wide<const N: usize>(block: &[Self; N]) -> [f32; N] {
        let mut wide = [0.0; N];
        for (wide, half) in wide.iter_mut().zip(block) {
            *wide = f32::from_bits(u32::from(half.to_bits()) << 16);
        }
        wide
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: &[f32; N]) -> [Self; N] {
        let mut block = [Self::ZERO; N];
        for (half, &value) in block.iter_mut().zip(values) {
            // Branchless, so that it is vectorised; the result equals that of `bf16::from_f32`.
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet_nan = bits >> 16 | 0x40;
            *half = Self::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16);
        }
        block
    }
}

impl Float for f16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn wide<const N: usize>(block: &[Self; N]) -> [f32; N] {
        let mut wide = [0.0; N];
        block.convert_to_f32_slice(&mut wide);
        wide
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: &[f32; N]) -> [Self; N] {
        let mut block = [Self::ZERO; N];
        block.convert_from_f32_slice(values);
        block
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
            prop_assert_eq!(bf16::narrow(&[value])[0].to_bits(), bf16::from_f32(value).to_bits());
        }
    }
}
