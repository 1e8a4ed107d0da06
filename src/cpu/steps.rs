//! Shared parts of the optimizers: gradients, arithmetics, and steps that are applied block by block.

use super::float::Float;
use super::float_mode::KeepSubnormals;
use super::parallel::{Disjoint, Parallel};
#[cfg(target_arch = "x86_64")]
use super::vector::has_avx512;
use crate::ensure;
use crate::error::{Error, Result};
use half::{bf16, f16};
use std::array;
use std::ops::Range;

/// Number of elements that take all steps before the next ones do: they stay in the L1 cache.
const BLOCK: usize = 2048;
/// Minimum number of blocks per thread.
const GRAIN_BLOCKS: usize = 32;
/// Number of elements that torch's vectorised CPU loops take at once; the remaining ones go through a scalar loop.
pub const TORCH_LANES: usize = 8;
static ZEROS: [f32; BLOCK] = [0.0; BLOCK];

/// Arithmetic that a step follows bit for bit, named after its optimizer.
///
/// The same formula, evaluated in another order or with other roundings, produces other bits. So a step is repeated
/// exactly only under the arithmetic of the optimizer that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// This library's: one formula for every element.
    Evermoe,
    /// `fused=True` on an x86 CPU: the library's, except for the last `numel % 8` elements of a parameter.
    TorchCpuFused,
    /// `fused=True` on CUDA, from torch 2.11 on.
    TorchCudaFused,
    /// `foreach=True` on CUDA, the default on CUDA.
    TorchCudaForeach,
}

impl Arithmetic {
    /// All arithmetics; an arithmetic's number is its index.
    pub const ALL: [Self; 4] =
        [Self::Evermoe, Self::TorchCpuFused, Self::TorchCudaFused, Self::TorchCudaForeach];

    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Evermoe => "evermoe",
            Self::TorchCpuFused => "torch_cpu_fused",
            Self::TorchCudaFused => "torch_cuda_fused",
            Self::TorchCudaForeach => "torch_cuda_foreach",
        }
    }

    /// Returns the arithmetic with this name, one of `among`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if none of them has the name.
    pub fn named(name: &str, among: &[Self]) -> Result<Self> {
        among.iter().copied().find(|arithmetic| arithmetic.name() == name).ok_or_else(|| {
            let names: Vec<_> = among.iter().map(|arithmetic| arithmetic.name()).collect();
            Error::invalid(format!("arithmetic: expected one of {}, got {name:?}", names.join(", ")))
        })
    }

    /// The number that represents it among the numbers of a step.
    pub fn number(self) -> f32 {
        self as u8 as f32
    }

    /// Returns the arithmetic with this number, one of `among`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if none of them has the number.
    pub fn numbered(number: f32, among: &[Self]) -> Result<Self> {
        among.iter().copied().find(|arithmetic| arithmetic.number() == number).ok_or_else(|| {
            Error::invalid(format!(
                "steps: expected rows that begin with the number of an arithmetic of this optimizer, got {number}; \
                 rows come from the function of the optimizer's steps"
            ))
        })
    }
}

/// The gradient of one step.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// All zeros, which takes no bytes: the state still decays and the parameters still move.
    Zero,
    /// float32
    F32(&'a [f32]),
    /// bfloat16
    Bf16(&'a [bf16]),
}

impl Gradient<'_> {
    fn covers(&self, len: usize) -> bool {
        match self {
            Self::Zero => true,
            Self::F32(values) => values.len() == len,
            Self::Bf16(values) => values.len() == len,
        }
    }
}

/// Weights of 16 bits whose float32 master is stepped; the step writes the rounded master to them.
#[derive(Debug)]
pub enum Rounded<'a> {
    /// bfloat16
    Bf16(&'a mut [bf16]),
    /// float16
    F16(&'a mut [f16]),
}

impl Rounded<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }

    /// Writes values rounded to nearest, ties to even.
    #[inline(always)]
    fn round(self, values: &[f32]) {
        match self {
            Self::Bf16(out) => round_into(values, out),
            Self::F16(out) => round_into(values, out),
        }
    }
}

#[inline(always)]
fn round_into<T: Float>(values: &[f32], out: &mut [T]) {
    let ((blocks, rest), (out, rest_out)) = (values.as_chunks::<64>(), out.as_chunks_mut::<64>());
    for (out, block) in out.iter_mut().zip(blocks) {
        *out = T::narrow(block);
    }
    for (out, &value) in rest_out.iter_mut().zip(rest) {
        [*out] = T::narrow(&[value]);
    }
}

/// [`Rounded`] for the threads of a loop.
enum DisjointRounded<'a> {
    Bf16(Disjoint<'a, bf16>),
    F16(Disjoint<'a, f16>),
}

impl<'a> DisjointRounded<'a> {
    fn new(rounded: Rounded<'a>) -> Self {
        match rounded {
            Rounded::Bf16(values) => Self::Bf16(Disjoint::new(values)),
            Rounded::F16(values) => Self::F16(Disjoint::new(values)),
        }
    }

    /// Returns the elements of `range` for writing.
    ///
    /// # Safety
    /// As [`Disjoint::part`].
    unsafe fn part(&self, range: Range<usize>) -> Rounded<'_> {
        // SAFETY: by the caller's promise.
        unsafe {
            match self {
                Self::Bf16(values) => Rounded::Bf16(values.part(range)),
                Self::F16(values) => Rounded::F16(values.part(range)),
            }
        }
    }
}

/// The arithmetic of a step, and the scaling of its gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaling {
    pub(super) arithmetic: Arithmetic,
    pub(super) loss_scale: f32,
    pub(super) factor: f32,
}

impl Scaling {
    pub(super) fn of(arithmetic: Arithmetic, loss_scale: f32, factor: f32) -> Self {
        Self { arithmetic, loss_scale, factor }
    }

    /// Returns the two numbers rounded to float32, or the error.
    pub(super) fn checked(
        arithmetic: Arithmetic,
        loss_scale: f64,
        clip: f64,
        maximize: bool,
    ) -> Result<Self> {
        check_option("clip", clip)?;
        ensure!(
            (loss_scale as f32) > 0.0 && (loss_scale as f32).is_finite(),
            "loss_scale: expected a positive finite number, got {loss_scale}"
        );
        let factor = if maximize { -clip } else { clip } as f32;
        Ok(Self { arithmetic, loss_scale: loss_scale as f32, factor })
    }
}

/// Refuses values that no option of an optimizer can have.
pub(super) fn check_option(name: &str, value: f64) -> Result<()> {
    ensure!(
        value >= 0.0 && (value as f32).is_finite(),
        "{name}: expected a finite number of 0 or more, got {value}"
    );
    Ok(())
}

/// The numbers of a step, of any optimizer.
pub(super) trait Numbers: Copy + Sync {
    fn scaling(&self) -> Scaling;
}

/// A step of an optimizer with `N` arrays: the parameters, and its state.
pub(super) trait Step<const N: usize>: Numbers {
    /// Updates elements with [`for_each`]; `in_tail` are those that torch's CPU loops leave to the end.
    fn update<G: Copy>(
        &self,
        state: [&mut [f32]; N],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        in_tail: bool,
    );
}

/// Applies the steps in order, in one pass over the memory, which also writes the rounded parameters.
pub(super) fn apply_steps<const N: usize, S: Step<N>>(
    state: [&mut [f32]; N],
    rounded: Option<Rounded<'_>>,
    steps: &[(S, Gradient<'_>)],
    pool: &impl Parallel,
) {
    let len = state[0].len();
    assert!(
        state.iter().all(|values| values.len() == len)
            && rounded.as_ref().is_none_or(|rounded| rounded.len() == len)
            && steps.iter().all(|(_, gradient)| gradient.covers(len)),
        "arrays of one length"
    );
    let update = update_for_this_processor::<N, S>();
    let state = state.map(Disjoint::new);
    let rounded = rounded.map(DisjointRounded::new);
    pool.run(len.div_ceil(BLOCK), GRAIN_BLOCKS, &|blocks| {
        let _subnormals = KeepSubnormals::new();
        for block in blocks {
            let range = block * BLOCK..len.min((block + 1) * BLOCK);
            let body = (len - len % TORCH_LANES).saturating_sub(range.start).min(range.len());
            // SAFETY: each range of blocks is given to one thread.
            let state = array::from_fn(|index| unsafe { state[index].part(range.clone()) });
            // SAFETY: as above.
            let rounded = rounded.as_ref().map(|rounded| unsafe { rounded.part(range.clone()) });
            // SAFETY: chosen for this processor.
            unsafe { update(state, rounded, range, body, steps) };
        }
    });
}

/// Applies all steps to a block of the state, whose elements are the range of the gradients'; the given number of first
/// ones are before torch's tail.
pub(super) type Update<const N: usize, S> =
    unsafe fn([&mut [f32]; N], Option<Rounded<'_>>, Range<usize>, usize, &[(S, Gradient<'_>)]);

/// Every variant produces the same bits: `mul_add` is rounded once, with or without the instruction.
pub(super) fn update_for_this_processor<const N: usize, S: Step<N>>() -> Update<N, S> {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        return update_avx512;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return update_avx2;
    }
    update_portable
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn update_avx512<const N: usize, S: Step<N>>(
    state: [&mut [f32]; N],
    rounded: Option<Rounded<'_>>,
    range: Range<usize>,
    body: usize,
    steps: &[(S, Gradient<'_>)],
) {
    update_block(state, rounded, range, body, steps);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn update_avx2<const N: usize, S: Step<N>>(
    state: [&mut [f32]; N],
    rounded: Option<Rounded<'_>>,
    range: Range<usize>,
    body: usize,
    steps: &[(S, Gradient<'_>)],
) {
    update_block(state, rounded, range, body, steps);
}

pub(super) fn update_portable<const N: usize, S: Step<N>>(
    state: [&mut [f32]; N],
    rounded: Option<Rounded<'_>>,
    range: Range<usize>,
    body: usize,
    steps: &[(S, Gradient<'_>)],
) {
    update_block(state, rounded, range, body, steps);
}

#[inline(always)]
fn update_block<const N: usize, S: Step<N>>(
    mut state: [&mut [f32]; N],
    rounded: Option<Rounded<'_>>,
    range: Range<usize>,
    body: usize,
    steps: &[(S, Gradient<'_>)],
) {
    for (step, gradient) in steps {
        let state = state.each_mut().map(|values| &mut **values);
        match gradient {
            Gradient::Zero => update_both(step, state, &ZEROS[..range.len()], body, |g| g),
            Gradient::F32(values) => update_both(step, state, &values[range.clone()], body, |g| g),
            Gradient::Bf16(values) => update_both(step, state, &values[range.clone()], body, |g: bf16| {
                f32::from_bits(u32::from(g.to_bits()) << 16)
            }),
        }
    }
    if let Some(rounded) = rounded {
        rounded.round(state[0]); // from the L1 cache
    }
}

/// A division by 1 changes no bit, and is skipped to save its time.
#[inline(always)]
fn update_both<const N: usize, S: Step<N>, G: Copy>(
    step: &S,
    state: [&mut [f32]; N],
    gradient: &[G],
    body: usize,
    widen: impl Fn(G) -> f32,
) {
    let Scaling { loss_scale, factor, .. } = step.scaling();
    if loss_scale == 1.0 {
        update_body_and_tail(step, state, gradient, body, |g| widen(g) * factor);
    } else {
        update_body_and_tail(step, state, gradient, body, |g| widen(g) / loss_scale * factor);
    }
}

#[inline(always)]
fn update_body_and_tail<const N: usize, S: Step<N>, G: Copy>(
    step: &S,
    mut state: [&mut [f32]; N],
    gradient: &[G],
    body: usize,
    widen: impl Fn(G) -> f32,
) {
    if step.scaling().arithmetic != Arithmetic::TorchCpuFused || body == gradient.len() {
        return step.update(state, gradient, widen, false);
    }
    step.update(state.each_mut().map(|values| &mut values[..body]), &gradient[..body], &widen, false);
    step.update(state.map(|values| &mut values[body..]), &gradient[body..], widen, true);
}

/// Replaces the `N` values of each element by the result of `next` for them and the gradient.
#[inline(always)]
pub(super) fn for_each<const N: usize, G: Copy>(
    state: [&mut [f32]; N],
    gradient: &[G],
    next: impl Fn([f32; N], G) -> [f32; N],
) {
    let len = gradient.len();
    let mut state = state.map(|values| &mut values[..len]);
    for index in 0..len {
        // Loads come before stores: the arrays often have the same offset in their pages, which the processor takes for
        // an overlap.
        let after = next(array::from_fn(|array| state[array][index]), gradient[index]);
        for (values, after) in state.iter_mut().zip(after) {
            values[index] = after;
        }
    }
}
