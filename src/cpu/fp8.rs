//! Rows in 8 bits: e4m3 numbers, and a float32 scale per 128 columns (DeepSeek-V3, section 3.3.2).
//!
//! A row is its numbers, padded with zeros to 16 bytes, then its scales, padded with zeros to 16 bytes. So rows can be
//! permuted, sent and regrouped without changes.

use super::float::Float;
use super::parallel::{Disjoint, Parallel};
use super::vector::vectorised;

/// Columns that share a scale.
pub const FP8_COLUMNS: usize = 128;
/// Alignment in bytes of the numbers and of the scales.
const ALIGNMENT: usize = 16;
/// The largest e4m3 number.
const MOST: f32 = 448.0;
/// Minimum number of elements per thread.
const GRAIN_ELEMENTS: usize = 1 << 16;
const NOT_A_NUMBER: u8 = 0x7f;
/// Bit pattern of infinity: finite numbers without their sign are below it.
const INFINITY: u32 = 0x7f80_0000;

/// Returns the bytes of a row of `width` columns.
///
/// Example: 200 columns take 208 bytes, and two scales 16.
pub fn fp8_row_bytes(width: usize) -> usize {
    width.next_multiple_of(ALIGNMENT) + (4 * width.div_ceil(FP8_COLUMNS)).next_multiple_of(ALIGNMENT)
}

/// Quantizes rows `[N, width]` to `[N, fp8_row_bytes(width)]`.
///
/// The scale of 128 columns is their largest magnitude / 448, at least 2^-126. Each is multiplied by 1 / scale and
/// rounded to the nearest e4m3 number, ties to even. Columns with an infinity or a NaN all become NaN.
///
/// Example: `[896, 1, -3]` have the scale 2 and become `[448, 0.5, -1.5]`.
///
/// # Panics
/// If the lengths do not match each other.
pub fn quantize_rows<F: Float>(rows: &[F], width: usize, out: &mut [u8], pool: &impl Parallel) {
    let row_bytes = fp8_row_bytes(width);
    let num_rows = rows.len().checked_div(width).unwrap_or(0);
    assert!(rows.len() == num_rows * width && out.len() == num_rows * row_bytes);
    let out = Disjoint::new(out);
    pool.run(num_rows, (GRAIN_ELEMENTS / width.max(1)).max(1), &|range| {
        // SAFETY: each range of rows is given to one thread.
        let out = unsafe { out.part(range.start * row_bytes..range.end * row_bytes) };
        let rows = &rows[range.start * width..range.end * width];
        vectorised(
            #[inline(always)]
            || {
                for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact_mut(row_bytes)) {
                    quantize_row(row, out);
                }
            },
        );
    });
}

#[inline(always)]
fn quantize_row<F: Float>(row: &[F], out: &mut [u8]) {
    let (numbers, scales) = out.split_at_mut(row.len().next_multiple_of(ALIGNMENT));
    numbers[row.len()..].fill(0);
    scales[4 * row.len().div_ceil(FP8_COLUMNS)..].fill(0);
    let parts = row.chunks(FP8_COLUMNS).zip(numbers.chunks_mut(FP8_COLUMNS)).zip(scales.chunks_exact_mut(4));
    for ((columns, numbers), scale) in parts {
        let mut block = [F::ZERO; FP8_COLUMNS];
        block[..columns.len()].copy_from_slice(columns);
        let block = F::wide(&block);
        let most = block.iter().fold(0, |most, value| most.max(value.to_bits() & !(1 << 31)));
        let (found, of_all) = encode_block(&block, most);
        scale.copy_from_slice(&found.to_le_bytes());
        numbers[..columns.len()].copy_from_slice(&of_all[..columns.len()]);
    }
}

/// Returns the scale of a block and its numbers; `most` is the bit pattern of its largest magnitude.
#[inline(always)]
fn encode_block(block: &[f32; FP8_COLUMNS], most: u32) -> (f32, [u8; FP8_COLUMNS]) {
    if most >= INFINITY {
        return (f32::from_bits(0x7fc0_0000), [NOT_A_NUMBER; FP8_COLUMNS]);
    }
    let scale = (f32::from_bits(most) / MOST).max(f32::MIN_POSITIVE);
    let inverse = 1.0 / scale;
    let mut numbers = [0; FP8_COLUMNS];
    for (number, value) in numbers.iter_mut().zip(block) {
        *number = encode(value * inverse);
    }
    (scale, numbers)
}

/// Returns the nearest e4m3 number of a finite one; 448 for all larger ones.
#[inline(always)]
fn encode(value: f32) -> u8 {
    const MIN_NORMAL: u32 = (127 - 6) << 23;
    const REBIAS: u32 = (127 - 7) << 3;
    const SUBNORMALS: f32 = 512.0; // per unit
    const ROUNDS_TO_ONES: f32 = 8_388_608.0;
    let (sign, bits) = (value.to_bits() >> 24 & 0x80, value.to_bits() & !(1 << 31));
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    let normal = rounded.wrapping_sub(REBIAS).min(0x7e);
    let subnormal = (f32::from_bits(bits) * SUBNORMALS + ROUNDS_TO_ONES).to_bits() & 0xf;
    (sign | if bits < MIN_NORMAL { subnormal } else { normal }) as u8
}

/// Dequantizes rows `[N, fp8_row_bytes(width)]` to `[N, width]`: number times scale, rounded once.
///
/// # Panics
/// If the lengths do not match each other.
pub fn dequantize_rows<F: Float>(rows: &[u8], width: usize, out: &mut [F], pool: &impl Parallel) {
    let row_bytes = fp8_row_bytes(width);
    let num_rows = out.len().checked_div(width).unwrap_or(0);
    assert!(out.len() == num_rows * width && rows.len() == num_rows * row_bytes);
    let out = Disjoint::new(out);
    pool.run(num_rows, (GRAIN_ELEMENTS / width.max(1)).max(1), &|range| {
        // SAFETY: each range of rows is given to one thread.
        let out = unsafe { out.part(range.start * width..range.end * width) };
        let rows = &rows[range.start * row_bytes..range.end * row_bytes];
        vectorised(
            #[inline(always)]
            || {
                for (row, out) in rows.chunks_exact(row_bytes).zip(out.chunks_exact_mut(width)) {
                    dequantize_row(row, out);
                }
            },
        );
    });
}

#[inline(always)]
fn dequantize_row<F: Float>(row: &[u8], out: &mut [F]) {
    let (numbers, scales) = row.split_at(out.len().next_multiple_of(ALIGNMENT));
    let parts = out.chunks_mut(FP8_COLUMNS).zip(numbers.chunks(FP8_COLUMNS)).zip(scales.chunks_exact(4));
    for ((out, numbers), scale) in parts {
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        let mut values = [0.0; FP8_COLUMNS];
        for (value, &number) in values.iter_mut().zip(numbers) {
            *value = decode(number) * scale;
        }
        out.copy_from_slice(&F::narrow(&values)[..out.len()]);
    }
}

#[inline(always)]
fn decode(number: u8) -> f32 {
    const REBIAS: u32 = (127 - 7) << 23;
    const SUBNORMAL: f32 = 1.0 / 512.0;
    let magnitude = u32::from(number & 0x7f);
    let normal = f32::from_bits((magnitude << 20) + REBIAS);
    let subnormal = magnitude as f32 * SUBNORMAL;
    let value = if magnitude < 8 { subnormal } else { normal };
    let value = if magnitude == u32::from(NOT_A_NUMBER) { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | u32::from(number & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Serial;
    use proptest::prelude::*;

    /// All finite numbers, ascending.
    fn numbers() -> Vec<f32> {
        (0..0x7f).map(decode).collect()
    }

    #[test]
    fn the_numbers_are_those_of_e4m3() {
        let found = numbers();
        assert_eq!(
            found[..10].iter().map(|value| value * 512.0).collect::<Vec<_>>(),
            (0..10).map(|i| i as f32).collect::<Vec<_>>()
        );
        assert_eq!((found[0x38], found[0x39], found[0x7e]), (1.0, 1.125, 448.0));
        assert!(found.is_sorted() && decode(0x7f).is_nan());
        assert_eq!((decode(0xb8), decode(0x80).to_bits()), (-1.0, 1 << 31));
    }

    proptest! {
        #[test]
        fn a_number_is_rounded_to_the_nearest(value in prop_oneof![-500.0_f32..500.0, -0.1_f32..0.1, -1e-3_f32..1e-3]) {
            let found = decode(encode(value));
            prop_assert_eq!(found.is_sign_negative(), value.is_sign_negative());
            let distance = |number: &f32| (f64::from(*number) - f64::from(value.abs())).abs();
            let least = numbers().iter().map(distance).fold(f64::INFINITY, f64::min);
            prop_assert_eq!(distance(&found.abs()), least);
        }

        #[test]
        fn rows_come_back_but_for_a_rounding(width in 1_usize..300, rows in 0_usize..4, seed: u32) {
            let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) as i32) as f32 * 1e-7;
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let mut packed = vec![0xaa; rows * fp8_row_bytes(width)];
            quantize_rows(&x, width, &mut packed, &Serial);
            let mut back = vec![0.0_f32; x.len()];
            dequantize_rows(&packed, width, &mut back, &Serial);
            for (row, back) in x.chunks(width).zip(back.chunks(width)) {
                for (columns, back) in row.chunks(FP8_COLUMNS).zip(back.chunks(FP8_COLUMNS)) {
                    let most = columns.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                    for (value, back) in columns.iter().zip(back) {
                        prop_assert!((value - back).abs() <= (value.abs() / 16.0).max(most / 448.0 / 1024.0) * 1.001);
                    }
                }
            }
        }
    }

    #[test]
    fn a_tie_goes_to_the_even_number() {
        let found = numbers();
        for (number, pair) in found.windows(2).enumerate() {
            let even = number + number % 2;
            assert_eq!(usize::from(encode((pair[0] + pair[1]) / 2.0)), even, "{pair:?}");
        }
        assert_eq!((encode(1e9), encode(-1e9)), (0x7e, 0xfe));
    }

    #[test]
    fn what_is_not_finite_takes_its_block_along() {
        let mut x = vec![1.0_f32; 256];
        x[200] = f32::INFINITY;
        let mut packed = vec![0; fp8_row_bytes(256)];
        quantize_rows(&x, 256, &mut packed, &Serial);
        let mut back = vec![0.0_f32; 256];
        dequantize_rows(&packed, 256, &mut back, &Serial);
        assert!(
            back[..128].iter().all(|&value| value == 1.0) && back[128..].iter().all(|value| value.is_nan())
        );
    }
}
