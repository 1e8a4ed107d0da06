//! Copies rows into the order of a plan, and combines them back.

use super::float::{BLOCK, Float};
use super::memory::{STREAM_BYTES, copy, finish_stream, prefetch};
use super::parallel::{Disjoint, Parallel};
use super::plan::invert_positions;
use crate::ensure;
use crate::error::Result;
use std::ops::Range;

/// Partial sums of a dot product: column `c` is added to lane `c % DOT_LANES`, then the lanes are added as a
/// tree. A warp of the CUDA kernel adds in the same order, so both give the same bits.
pub const DOT_LANES: usize = 32;
/// Elements that a thread should be given at least.
const GRAIN_ELEMENTS: usize = 1 << 16;

/// What [`unpermute`] reads. `rows` is `[N, width]`, `positions` `[T, top_k]`, `weights` like `positions`.
#[derive(Debug, Clone, Copy)]
pub struct Combine<'a, F> {
    /// The rows, in the order of the plan.
    pub rows: &'a [F],
    /// The row of each slot; -1, or a row that the buffer does not hold: adds nothing.
    pub positions: &'a [i64],
    /// The factor of each slot; absent: 1.
    pub weights: Option<&'a [f32]>,
    /// Columns of a row.
    pub width: usize,
    /// Slots of a token.
    pub top_k: usize,
}

/// What [`unpermute_backward`] reads: `grad` is `[T, width]`, `rows` `[N, width]`, `positions` and `weights`
/// `[T, top_k]`.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a, F> {
    /// Gradient of the combined tokens.
    pub grad: &'a [F],
    /// The rows that were combined.
    pub rows: &'a [F],
    /// The row of each slot, as in [`Combine`]; no row twice.
    pub positions: &'a [i64],
    /// The factor of each slot.
    pub weights: &'a [f32],
    /// Columns of a row.
    pub width: usize,
    /// Slots of a token.
    pub top_k: usize,
}

fn grain(width: usize) -> usize {
    (GRAIN_ELEMENTS / width.max(1)).max(1)
}

/// Copies tokens to rows: `out[i] = x[row_ids[i] / top_k]`, zeros where `row_ids[i]` is -1.
///
/// Example: `x = [a, b]`, `top_k = 2`, `row_ids = [2, 0, 3, -1]`: `out = [b, a, b, 0]`.
///
/// # Errors
/// [`crate::error::Error::Invalid`] when a row id is neither -1 nor a slot; it names it.
///
/// # Panics
/// When the lengths do not match each other.
pub fn permute<F: Float>(
    x: &[F],
    row_ids: &[i64],
    top_k: usize,
    width: usize,
    out: &mut [F],
    pool: &impl Parallel,
) -> Result<()> {
    assert!(top_k > 0 && out.len() == row_ids.len() * width);
    if width == 0 {
        return Ok(());
    }
    check_indices("row_ids", row_ids, x.len() / width * top_k, "slots")?;
    let stream = size_of_val(out) >= STREAM_BYTES;
    let out = Disjoint::new(out);
    let token = |row: usize| {
        let slot = usize::try_from(*row_ids.get(row)?).ok()?;
        Some(&x[slot / top_k * width..][..width])
    };
    pool.run(row_ids.len(), grain(width), &|rows| {
        // SAFETY: each range of rows is given to one thread.
        let out = unsafe { out.part(rows.start * width..rows.end * width) };
        for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
            if let Some(next) = token(row + 1) {
                prefetch(next);
            }
            match token(row) {
                Some(token) => copy(token, out, stream),
                None => out.fill(F::ZERO),
            }
        }
        finish_stream();
    });
    Ok(())
}

/// Combines rows into tokens: `out[t] = sum over k of weights[t, k] * rows[positions[t, k]]`.
///
/// The sum is in float32, in the order of `k`, product and addition rounded separately, then rounded once to
/// the type of the rows. The first term starts the sum, so one row without a weight is copied bit by bit.
///
/// Example: `rows = [1, 10]`, `positions = [[1, 0], [-1, -1]]`, `weights = [[0.5, 2], [1, 1]]`, width 1:
/// `out = [0.5 * 10 + 2 * 1, 0] = [7, 0]`.
///
/// # Errors
/// [`crate::error::Error::Invalid`] when a position is below -1, or past both the rows and the slots.
///
/// # Panics
/// When the lengths do not match each other.
pub fn unpermute<F: Float>(combine: &Combine<'_, F>, out: &mut [F], pool: &impl Parallel) -> Result<()> {
    let Combine { rows, positions, weights, width, top_k } = *combine;
    if width == 0 || out.is_empty() {
        return Ok(());
    }
    if top_k == 0 {
        out.fill(F::ZERO);
        return Ok(());
    }
    assert!(out.len() / width * top_k == positions.len());
    assert!(weights.is_none_or(|weights| weights.len() == positions.len()));
    check_indices("positions", positions, (rows.len() / width).max(positions.len()), "rows")?;
    // Narrowing into a block and streaming that pays later than streaming a plain copy.
    let stream = size_of_val(out) >= 2 * STREAM_BYTES;
    let out = Disjoint::new(out);
    pool.run(positions.len() / top_k, grain(width * top_k), &|tokens| {
        // SAFETY: each range of tokens is given to one thread.
        let out = unsafe { out.part(tokens.start * width..tokens.end * width) };
        vectorised(
            #[inline(always)]
            || combine_tokens(combine, tokens.clone(), out, stream),
        );
        finish_stream();
    });
    Ok(())
}

#[inline(always)]
fn combine_tokens<F: Float>(combine: &Combine<'_, F>, tokens: Range<usize>, out: &mut [F], stream: bool) {
    let Combine { rows, positions, weights, width, top_k } = *combine;
    let num_rows = rows.len() / width;
    let (mut sum, mut narrowed) = ([0_f32; BLOCK], [F::ZERO; BLOCK]);
    for (token, out) in tokens.zip(out.chunks_exact_mut(width)) {
        let slots = token * top_k..(token + 1) * top_k;
        let terms = || {
            let weight = move |slot: usize| weights.map_or(1.0, |weights| weights[slot]);
            let held = move |slot: usize| usize::try_from(positions[slot]).ok().filter(|&row| row < num_rows);
            slots
                .clone()
                .filter_map(move |slot| held(slot).map(|row| (&rows[row * width..][..width], weight(slot))))
        };
        for &position in positions.iter().skip(slots.end).take(top_k) {
            if let Some(row) = usize::try_from(position).ok().filter(|&row| row < num_rows) {
                prefetch(&rows[row * width..][..width]);
            }
        }
        if weights.is_none() && terms().count() == 1 {
            out.copy_from_slice(terms().next().map_or(&[], |(row, _)| row));
            continue;
        }
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let columns = block * BLOCK..block * BLOCK + out.len();
            let sum = &mut sum[..out.len()];
            let mut started = false;
            for (row, weight) in terms() {
                let row = &row[columns.clone()];
                match started {
                    true => F::update(row, sum, |sum, value| *sum += weight * value),
                    false => F::update(row, sum, |sum, value| *sum = weight * value),
                }
                started = true;
            }
            match started {
                true if stream => {
                    let narrowed = &mut narrowed[..out.len()];
                    F::narrow(sum, narrowed);
                    copy(narrowed, out, true);
                }
                true => F::narrow(sum, out),
                false => out.fill(F::ZERO),
            }
        }
    }
}

/// The gradients of [`unpermute`]: for the slot `s` whose position is row `i`, `grad_rows[i] = weights[s] *
/// grad[s / top_k]` and `grad_weights[s] = grad[s / top_k] . rows[i]`; zero where there is none.
///
/// Example: `grad = [3]`, `rows = [1, 10]`, `positions = [[1, 0]]`, `weights = [[0.5, 2]]`, width 1:
/// `grad_rows = [2 * 3, 0.5 * 3] = [6, 1.5]`, `grad_weights = [[3 * 10, 3 * 1]] = [[30, 3]]`.
///
/// # Errors
/// [`crate::error::Error::Invalid`] when a position is out of range, or two slots name one row.
///
/// # Panics
/// When the lengths do not match each other.
pub fn unpermute_backward<F: Float>(
    backward: &Backward<'_, F>,
    grad_rows: &mut [F],
    grad_weights: &mut [f32],
    pool: &impl Parallel,
) -> Result<()> {
    let Backward { grad, rows, positions, weights, width, top_k } = *backward;
    assert!(grad_rows.len() == rows.len() && grad_weights.len() == weights.len());
    assert!(positions.len() == weights.len());
    grad_weights.fill(0.0);
    if width == 0 || top_k == 0 {
        grad_rows.fill(F::ZERO);
        return Ok(());
    }
    assert!(grad.len() / width * top_k == positions.len());
    let mut row_ids = vec![-1; rows.len() / width];
    check_indices("positions", positions, row_ids.len().max(positions.len()), "rows")?;
    invert_positions(positions, &mut row_ids)?;
    let (grad_rows, grad_weights) = (Disjoint::new(grad_rows), Disjoint::new(grad_weights));
    pool.run(row_ids.len(), grain(width), &|range| {
        // SAFETY: each range of rows is given to one thread.
        let grad_rows = unsafe { grad_rows.part(range.start * width..range.end * width) };
        vectorised(
            #[inline(always)]
            || backward_rows(backward, &row_ids, range.clone(), grad_rows, &grad_weights),
        );
    });
    Ok(())
}

#[inline(always)]
fn backward_rows<F: Float>(
    backward: &Backward<'_, F>,
    row_ids: &[i64],
    range: Range<usize>,
    grad_rows: &mut [F],
    grad_weights: &Disjoint<'_, f32>,
) {
    let Backward { grad, rows, weights, width, top_k, .. } = *backward;
    let mut scratch = [[0_f32; BLOCK]; 3];
    let [wide_grad, wide_row, scaled] = &mut scratch;
    for (index, out) in range.zip(grad_rows.chunks_exact_mut(width)) {
        let Ok(slot) = usize::try_from(row_ids[index]) else {
            out.fill(F::ZERO);
            continue;
        };
        if let Some(Ok(next)) = row_ids.get(index + 1).map(|&slot| usize::try_from(slot)) {
            prefetch(&grad[next / top_k * width..][..width]);
        }
        let (grad, row) = (&grad[slot / top_k * width..][..width], &rows[index * width..][..width]);
        let mut lanes = [0_f32; DOT_LANES];
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let columns = block * BLOCK..block * BLOCK + out.len();
            let grad = F::widen(&grad[columns.clone()], wide_grad);
            let row = F::widen(&row[columns], wide_row);
            add_products(&mut lanes, grad, row);
            let scaled = &mut scaled[..out.len()];
            scaled.iter_mut().zip(grad).for_each(|(scaled, grad)| *scaled = weights[slot] * grad);
            F::narrow(scaled, out);
        }
        // SAFETY: `invert_positions` gives each slot to one row at most, so this slot is written once.
        unsafe { grad_weights.store(slot, add_lanes(lanes)) };
    }
}

/// Adds the products of the columns to their lanes; a block starts at a multiple of the lanes.
#[inline(always)]
fn add_products(lanes: &mut [f32; DOT_LANES], left: &[f32], right: &[f32]) {
    let (lefts, rights) = (left.chunks_exact(DOT_LANES), right.chunks_exact(DOT_LANES));
    let rest = lefts.remainder().iter().zip(rights.remainder());
    for (left, right) in lefts.zip(rights) {
        for lane in 0..DOT_LANES {
            lanes[lane] += left[lane] * right[lane];
        }
    }
    for (lane, (left, right)) in lanes.iter_mut().zip(rest) {
        *lane += left * right;
    }
}

/// Adds the lanes as a warp does by exchanges: lane `l` with lane `l + 16`, then `l + 8`, 4, 2, 1.
fn add_lanes(mut lanes: [f32; DOT_LANES]) -> f32 {
    let mut half = DOT_LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Runs a body compiled for AVX2 where the processor has it. Nothing is fused, so the bits are the same.
#[inline(always)]
fn vectorised(body: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2(body: impl FnOnce()) {
            body();
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { with_avx2(body) };
        }
    }
    body();
}

/// Refuses an index that is neither -1 nor below `limit`.
fn check_indices(name: &str, indices: &[i64], limit: usize, what: &str) -> Result<()> {
    let wrong = |index: i64| index.wrapping_add(1) as u64 > limit as u64;
    if indices.iter().fold(false, |any, &index| any | wrong(index)) {
        let at = indices.iter().position(|&index| wrong(index)).unwrap_or(0);
        let value = indices[at];
        ensure!(
            false,
            "{name}[{at}] (flattened) = {value} is out of range: expected -1 or one of {limit} {what}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Serial;
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn permutes_the_documented_example() {
        let mut out = [9.0; 8];
        permute(&[1.0, 2.0, 3.0, 4.0_f32], &[2, 0, 3, -1], 2, 2, &mut out, &Serial).unwrap();
        assert_eq!(out, [3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
        let error = permute(&[1.0_f32], &[0, 2], 2, 1, &mut [0.0; 2], &Serial).unwrap_err().to_string();
        assert!(error.contains("row_ids[1] (flattened) = 2 is out of range"), "{error}");
    }

    #[test]
    fn combines_the_documented_example() {
        let weights = [0.5, 2.0, 1.0, 1.0];
        let combine = Combine {
            rows: &[1.0_f32, 10.0],
            positions: &[1, 0, -1, -1],
            weights: Some(&weights),
            width: 1,
            top_k: 2,
        };
        let mut out = [9.0; 2];
        unpermute(&combine, &mut out, &Serial).unwrap();
        assert_eq!(out, [7.0, 0.0]);
        for (bad, ok) in [(-2, false), (4, false), (3, true), (i64::MIN, false), (i64::MAX, false)] {
            let combine = Combine { positions: &[bad, 0, 1, -1], ..combine };
            assert_eq!(unpermute(&combine, &mut out, &Serial).is_ok(), ok, "position {bad}");
        }
    }

    #[test]
    fn gives_the_documented_gradients() {
        let backward = Backward {
            grad: &[3.0_f32],
            rows: &[1.0, 10.0],
            positions: &[1, 0],
            weights: &[0.5, 2.0],
            width: 1,
            top_k: 2,
        };
        let (mut grad_rows, mut grad_weights) = ([9.0; 2], [9.0; 2]);
        unpermute_backward(&backward, &mut grad_rows, &mut grad_weights, &Serial).unwrap();
        assert_eq!((grad_rows, grad_weights), ([6.0, 1.5], [30.0, 3.0]));
        let twice = Backward { positions: &[1, 1], ..backward };
        assert!(unpermute_backward(&twice, &mut grad_rows, &mut grad_weights, &Serial).is_err());
    }

    proptest! {
        #[test]
        fn one_row_without_a_weight_is_copied(bits in prop::collection::vec(any::<u16>(), 1..600)) {
            let row: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
            let combine = Combine { rows: &row, positions: &[0, -1], weights: None, width: row.len(), top_k: 2 };
            let mut out = vec![bf16::ZERO; row.len()];
            unpermute(&combine, &mut out, &Serial).unwrap();
            prop_assert!(out.iter().zip(&bits).all(|(out, &bits)| out.to_bits() == bits));
        }

        #[test]
        fn dot_products_are_near_the_exact_ones(values in prop::collection::vec(-1.0_f32..1.0, 1..700)) {
            let backward =
                Backward { grad: &values, rows: &values, positions: &[0], weights: &[1.0], width: values.len(), top_k: 1 };
            let (mut grad_rows, mut grad_weights) = (vec![0.0; values.len()], [0.0]);
            unpermute_backward(&backward, &mut grad_rows, &mut grad_weights, &Serial).unwrap();
            let exact: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
            prop_assert!((f64::from(grad_weights[0]) - exact).abs() <= 1e-5 * exact.max(1e-3));
            prop_assert_eq!(grad_rows, values);
        }
    }
}
