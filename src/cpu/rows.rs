//! Copies rows into the order of a plan, and combines them back.

use super::float::Float;
use super::histogram::Id;
use super::memory::{STREAM_BYTES, copy, finish_stream, prefetch, prefetch_line};
use super::parallel::{Disjoint, Parallel};
use super::plan::invert_positions;
use super::vector::vectorised;
use crate::ensure;
use crate::error::Result;
use std::ops::Range;

/// Number of partial sums of a dot product: column `c` is added to partial `c % DOT_PARTIALS`, then `add_partials`
/// adds the partials. A warp of the CUDA kernel adds in the same order, so both produce the same bits.
pub const DOT_PARTIALS: usize = 256;
/// Partials of one lane of that warp.
const DOT_LANE: usize = 8;
/// Columns that are processed at once: few enough for their sums to stay in registers, and full cache lines.
const COLUMNS: usize = 128;
/// Minimum number of elements per thread.
const GRAIN_ELEMENTS: usize = 1 << 16;

/// Inputs of [`unpermute`]: `rows` is `[N, width]`, `positions` `[T, top_k]`, `weights` like `positions`.
#[derive(Debug, Clone, Copy)]
pub struct Combine<'a, F, I> {
    /// The rows, in the order of the plan.
    pub rows: &'a [F],
    /// The row of each slot; -1, or a row that is not in the buffer, adds nothing.
    pub positions: &'a [I],
    /// The factor of each slot; 1 if absent.
    pub weights: Option<&'a [f32]>,
    /// Columns of a row.
    pub width: usize,
    /// Slots of a token.
    pub top_k: usize,
}

/// Inputs of [`unpermute_backward`]: `grad` is `[T, width]`, `rows` `[N, width]`, `positions` and `weights`
/// `[T, top_k]`.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a, F, I> {
    /// Gradient of the combined tokens.
    pub grad: &'a [F],
    /// The rows that were combined.
    pub rows: &'a [F],
    /// The row of each slot, as in [`Combine`]; each row at most once.
    pub positions: &'a [I],
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
/// [`crate::Error::Invalid`] if a row id is neither -1 nor a slot, naming it.
///
/// # Panics
/// If the lengths do not match each other.
pub fn permute<F: Float, I: Id>(
    x: &[F],
    row_ids: &[I],
    top_k: usize,
    width: usize,
    out: &mut [F],
    pool: &impl Parallel,
) -> Result<()> {
    assert!(top_k > 0 && out.len() == row_ids.len() * width);
    if width == 0 {
        return Ok(());
    }
    check_indices("row_ids", row_ids, (x.len() / width).saturating_mul(top_k), "slots")?;
    let stream = size_of_val(out) >= STREAM_BYTES;
    let out = Disjoint::new(out);
    let token = |row: usize| {
        let slot = row_ids.get(row)?.get()?;
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
/// The sum is in float32, in the order of `k`; product and addition are rounded separately, and the result is rounded
/// once to the type of the rows. The first term starts the sum, so a single row without a weight is copied bit for bit.
///
/// Example: `rows = [1, 10]`, `positions = [[1, 0], [-1, -1]]`, `weights = [[0.5, 2], [1, 1]]`, width 1:
/// `out = [0.5 * 10 + 2 * 1, 0] = [7, 0]`.
///
/// # Errors
/// [`crate::Error::Invalid`] if a position is below -1, or past both the rows and the slots.
///
/// # Panics
/// If the lengths do not match each other.
pub fn unpermute<F: Float, I: Id>(
    combine: &Combine<'_, F, I>,
    out: &mut [F],
    pool: &impl Parallel,
) -> Result<()> {
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
    let stream = size_of_val(out) >= STREAM_BYTES;
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
fn combine_tokens<F: Float, I: Id>(
    combine: &Combine<'_, F, I>,
    tokens: Range<usize>,
    out: &mut [F],
    stream: bool,
) {
    let Combine { weights, width, top_k, .. } = *combine;
    let (mut terms, mut next) = (Vec::with_capacity(top_k), Vec::with_capacity(top_k));
    combine.gather(tokens.start, &mut next);
    for (token, out) in tokens.zip(out.chunks_exact_mut(width)) {
        std::mem::swap(&mut terms, &mut next);
        combine.gather(token + 1, &mut next);
        match terms[..] {
            [] => out.fill(F::ZERO),
            [(row, _)] if weights.is_none() => {
                next.iter().for_each(|(row, _)| prefetch(row));
                copy(row, out, stream);
            }
            [first] => add_terms(first, [], &next, out, stream),
            [first, second] => add_terms(first, [second], &next, out, stream),
            [first, ref rest @ ..] => add_terms(first, rest.iter().copied(), &next, out, stream),
        }
    }
}

/// A row and its weight.
type Term<'a, F> = (&'a [F], f32);

impl<'a, F: Float, I: Id> Combine<'a, F, I> {
    /// Collects the rows that a token sums, in the order of its slots, with their weights; none past the last token.
    #[inline(always)]
    fn gather(&self, token: usize, terms: &mut Vec<Term<'a, F>>) {
        let num_rows = self.rows.len() / self.width;
        let positions = self.positions.iter().enumerate().skip(token * self.top_k).take(self.top_k);
        terms.clear();
        terms.extend(positions.filter_map(|(slot, position)| {
            let row = position.get().filter(|&row| row < num_rows)?;
            let weight = self.weights.map_or(1.0, |weights| weights[slot]);
            Some((&self.rows[row * self.width..][..self.width], weight))
        }));
    }
}

/// Writes a sum of weighted rows, and prefetches the same columns of the next rows.
#[inline(always)]
fn add_terms<'a, F: Float>(
    first: Term<'a, F>,
    rest: impl IntoIterator<Item = Term<'a, F>> + Clone,
    next: &[Term<'a, F>],
    out: &mut [F],
    stream: bool,
) {
    for start in (0..out.len()).step_by(COLUMNS) {
        next.iter().for_each(|(row, _)| prefetch_line(&row[start..]));
        let mut sum = columns(first.0, start);
        sum.iter_mut().for_each(|sum| *sum *= first.1);
        for (row, weight) in rest.clone() {
            let values = columns(row, start);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        }
        store_columns(&sum, start, out, stream);
    }
}

/// Columns from `start` as float32; zeros past the end.
#[inline(always)]
fn columns<F: Float>(row: &[F], start: usize) -> [f32; COLUMNS] {
    match row[start..].first_chunk() {
        Some(block) => F::wide(block),
        None => {
            let mut part = [F::ZERO; COLUMNS];
            part[..row.len() - start].copy_from_slice(&row[start..]);
            F::wide(&part)
        }
    }
}

/// Rounds and stores the columns from `start` that exist in the row.
#[inline(always)]
fn store_columns<F: Float>(values: &[f32; COLUMNS], start: usize, row: &mut [F], stream: bool) {
    let narrow = F::narrow(values);
    match row[start..].first_chunk_mut::<COLUMNS>() {
        Some(block) => copy(&narrow, block, stream),
        None => row[start..].iter_mut().zip(narrow).for_each(|(to, value)| *to = value),
    }
}

/// Computes the gradients of [`unpermute`]: for the slot `s` whose position is row `i`, `grad_rows[i] = weights[s] *
/// grad[s / top_k]` and `grad_weights[s] = grad[s / top_k] . rows[i]`; zero for all others.
///
/// Example: `grad = [3]`, `rows = [1, 10]`, `positions = [[1, 0]]`, `weights = [[0.5, 2]]`, width 1:
/// `grad_rows = [2 * 3, 0.5 * 3] = [6, 1.5]`, `grad_weights = [[3 * 10, 3 * 1]] = [[30, 3]]`.
///
/// # Errors
/// [`crate::Error::Invalid`] if a position is out of range, or two slots name one row.
///
/// # Panics
/// If the lengths do not match each other.
pub fn unpermute_backward<F: Float, I: Id>(
    backward: &Backward<'_, F, I>,
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
    let mut row_ids = vec![I::NONE; rows.len() / width];
    check_indices("positions", positions, row_ids.len().max(positions.len()), "rows")?;
    invert_positions(positions, &mut row_ids)?;
    let stream = size_of_val(grad_rows) >= STREAM_BYTES;
    let (grad_rows, grad_weights) = (Disjoint::new(grad_rows), Disjoint::new(grad_weights));
    pool.run(row_ids.len(), grain(width), &|range| {
        // SAFETY: each range of rows is given to one thread.
        let grad_rows = unsafe { grad_rows.part(range.start * width..range.end * width) };
        vectorised(
            #[inline(always)]
            || backward_rows(backward, &row_ids, range.clone(), grad_rows, &grad_weights, stream),
        );
        finish_stream();
    });
    Ok(())
}

#[inline(always)]
fn backward_rows<F: Float, I: Id>(
    backward: &Backward<'_, F, I>,
    row_ids: &[I],
    range: Range<usize>,
    grad_rows: &mut [F],
    grad_weights: &Disjoint<'_, f32>,
    stream: bool,
) {
    let Backward { grad, rows, weights, width, top_k, .. } = *backward;
    let slot_of = |row: usize| row_ids.get(row).and_then(|slot| slot.get());
    let grad_of = |slot: usize| &grad[slot / top_k * width..][..width];
    for (index, out) in range.zip(grad_rows.chunks_exact_mut(width)) {
        let Some(slot) = slot_of(index) else {
            out.fill(F::ZERO);
            continue;
        };
        let (grad, row) = (grad_of(slot), &rows[index * width..][..width]);
        let next = slot_of(index + 1).map_or(row, grad_of);
        let mut partials = [0_f32; DOT_PARTIALS];
        for start in (0..width).step_by(COLUMNS) {
            prefetch_line(&next[start..]);
            let (mut grad, row) = (columns(grad, start), columns(row, start));
            let partials = &mut partials[start % DOT_PARTIALS..][..COLUMNS];
            for (partial, (grad, row)) in partials.iter_mut().zip(grad.iter().zip(row)) {
                *partial += grad * row;
            }
            grad.iter_mut().for_each(|grad| *grad *= weights[slot]);
            store_columns(&grad, start, out, stream);
        }
        // SAFETY: `invert_positions` gives each slot to at most one row, so this slot is written once.
        unsafe { grad_weights.store(slot, add_partials(partials)) };
    }
}

/// Adds the partials like a warp: lane `l` those from `8 * l` to `8 * l + 7` (`p` with `p + 4`, then `p + 2`, `p + 1`),
/// then lane `l` with lane `l + 16`, `l + 8`, 4, 2, 1.
fn add_partials(partials: [f32; DOT_PARTIALS]) -> f32 {
    let mut lanes = [0.0; DOT_PARTIALS / DOT_LANE];
    for (lane, own) in lanes.iter_mut().zip(partials.as_chunks::<DOT_LANE>().0) {
        *lane = add_tree(*own);
    }
    add_tree(lanes)
}

/// Adds the upper half to the lower one until one value is left. The length is a power of two.
#[inline(always)]
fn add_tree<const N: usize>(mut values: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for at in 0..half {
            values[at] += values[at + half];
        }
        half /= 2;
    }
    values[0]
}

/// Refuses an index that is neither -1 nor below `limit`.
fn check_indices<I: Id>(name: &str, indices: &[I], limit: usize, what: &str) -> Result<()> {
    let wrong = |index: I| index.bin() > limit;
    if indices.iter().fold(false, |any, &index| any | wrong(index)) {
        let at = indices.iter().position(|&index| wrong(index)).unwrap_or(0);
        let value = indices[at].number();
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

    /// Numbers from -8 to slightly above 8.
    fn floats(count: usize, seed: u64) -> Vec<bf16> {
        let mut state = seed | 1;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bf16::from_f32((state >> 40) as f32 / 1e6 - 8.0)
        };
        (0..count).map(|_| draw()).collect()
    }

    proptest! {
        #[test]
        fn sums_are_in_the_order_of_the_slots(width in 1_usize..300, top_k in 1_usize..5, seed: u64) {
            let rows = floats(width * top_k, seed);
            let weights: Vec<f32> = floats(top_k, !seed).into_iter().map(f32::from).collect();
            let positions: Vec<i32> = (0..top_k as i32).rev().collect();
            let combine = Combine { rows: &rows, positions: &positions, weights: Some(&weights), width, top_k };
            let mut out = vec![bf16::ZERO; width];
            unpermute(&combine, &mut out, &Serial).unwrap();
            for (column, out) in out.iter().enumerate() {
                let term = |slot: usize| weights[slot] * f32::from(rows[(top_k - 1 - slot) * width + column]);
                let sum = (1..top_k).fold(term(0), |sum, slot| sum + term(slot));
                prop_assert_eq!(out.to_bits(), bf16::from_f32(sum).to_bits());
            }
        }

        #[test]
        fn dot_products_are_in_the_documented_order(width in 1_usize..1100, seed: u64) {
            let (grad, rows) = (floats(width, seed), floats(width, !seed));
            let backward =
                Backward { grad: &grad, rows: &rows, positions: &[0_i32], weights: &[0.5], width, top_k: 1 };
            let (mut grad_rows, mut dot) = (vec![bf16::ZERO; width], [0.0]);
            unpermute_backward(&backward, &mut grad_rows, &mut dot, &Serial).unwrap();
            let mut partials = [0.0_f32; 256];
            for column in 0..width {
                partials[column % 256] += f32::from(grad[column]) * f32::from(rows[column]);
            }
            for half in [4, 2, 1] {
                for partial in (0..256).filter(|partial| partial % 8 < half) {
                    partials[partial] += partials[partial + half];
                }
            }
            for half in [16, 8, 4, 2, 1] {
                for lane in 0..half {
                    partials[8 * lane] += partials[8 * (lane + half)];
                }
            }
            prop_assert_eq!(dot[0].to_bits(), partials[0].to_bits());
        }

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
