//! AdamW with one arithmetic everywhere: the same bits on every CPU, every GPU and every replica.
//!
//! A step of one element, all in float32, each operation rounded once to nearest even, subnormals kept:
//!
//! ```text
//! g = (g / loss_scale) · factor                      factor = ±clip, negative to maximize
//! p = p · decay                                      decay  = 1 − lr·weight_decay
//! m = fma(lerp, g − m, m)            lerp < 0.5      lerp   = 1 − β1
//!     fma(−(1 − lerp), g − m, g)     otherwise
//! v = fma(square · g, g, v · keep)                   square = 1 − β2, keep = β2
//! p = p − (rate · m) / (√v / spread + eps)           rate   = lr / (1 − β1^t), spread = √(1 − β2^t)
//! ```
//!
//! This is `torch.optim.AdamW(fused=True)` on an x86 CPU bit for bit, as long as torch does not come to its loop for
//! the last elements (`numel % 8 == 0`). NaNs are the exception: which NaN comes out is the processor's choice.

use super::parallel::{Disjoint, Parallel};
use crate::ensure;
use crate::error::Result;
use half::bf16;
use std::ops::Range;

/// Elements that take all steps before the next ones do: they stay in the first-level cache.
const BLOCK: usize = 2048;
/// Blocks that a thread should be given at least.
const GRAIN_BLOCKS: usize = 32;
static ZEROS: [f32; BLOCK] = [0.0; BLOCK];

/// What the user sets.
#[derive(Debug, Clone, Copy)]
pub struct AdamWOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first and the second moment.
    pub betas: [f64; 2],
    /// Keeps the denominator from zero.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Ascend rather than descend.
    pub maximize: bool,
}

/// The numbers of one step, rounded to float32: all that a replica needs beside the gradient.
///
/// The trainer computes them once and they travel with the gradient. A replica never computes them again, since `pow`
/// differs between libraries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// What the loss was multiplied by; the gradient is divided by it first.
    pub loss_scale: f32,
    /// Then multiplied by this: the coefficient of clipping, negative to maximize.
    pub factor: f32,
    /// `1 − lr·weight_decay`
    pub decay: f32,
    /// `1 − β1`
    pub lerp: f32,
    /// `1 − β2`
    pub square: f32,
    /// `β2`
    pub keep: f32,
    /// `lr / (1 − β1^t)`
    pub rate: f32,
    /// `√(1 − β2^t)`
    pub spread: f32,
    /// As given.
    pub eps: f32,
}

impl AdamWStep {
    /// How many numbers a step consists of.
    pub const LEN: usize = 9;

    /// The numbers of step `t`, which counts from 1, for gradients of a loss that was multiplied by `loss_scale`, to be
    /// multiplied by `clip`.
    ///
    /// ```
    /// use evermoe::cpu::{AdamWOptions, AdamWStep};
    /// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.5, maximize: true };
    /// let step = AdamWStep::new(&options, 1, 8.0, 0.5)?;
    /// assert_eq!(step.to_array(), [8.0, -0.5, 0.75, 0.5, 0.25, 0.75, 1.0, 0.5, 0.25]);
    /// # Ok::<(), evermoe::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::error::Error::Invalid`] when a number is out of its range; it names it.
    pub fn new(options: &AdamWOptions, t: i64, loss_scale: f64, clip: f64) -> Result<Self> {
        let AdamWOptions { lr, betas: [beta1, beta2], eps, weight_decay, maximize } = *options;
        for (name, value) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("clip", clip)] {
            ensure!(
                value >= 0.0 && (value as f32).is_finite(),
                "{name}: expected a finite number of 0 or more, got {value}"
            );
        }
        for beta in [beta1, beta2] {
            ensure!((0.0..1.0).contains(&beta), "betas: expected numbers of 0 to below 1, got {beta}");
        }
        ensure!(
            (loss_scale as f32) > 0.0 && (loss_scale as f32).is_finite(),
            "loss_scale: expected a positive finite number, got {loss_scale}"
        );
        ensure!(t >= 1, "t: expected a step of 1 or more (steps count from 1), got {t}");
        Ok(Self {
            loss_scale: loss_scale as f32,
            factor: if maximize { -clip } else { clip } as f32,
            // One rounding in double: a compiler fuses it in torch.
            decay: (-lr).mul_add(weight_decay, 1.0) as f32,
            lerp: (1.0 - beta1) as f32,
            square: (1.0 - beta2) as f32,
            keep: beta2 as f32,
            rate: (lr / (1.0 - beta1.powf(t as f64))) as f32,
            spread: (1.0 - beta2.powf(t as f64)).sqrt() as f32,
            eps: eps as f32,
        })
    }

    /// The numbers in the order of the fields.
    pub fn to_array(&self) -> [f32; Self::LEN] {
        let Self { loss_scale, factor, decay, lerp, square, keep, rate, spread, eps } = *self;
        [loss_scale, factor, decay, lerp, square, keep, rate, spread, eps]
    }

    /// The step of these numbers, in the order of the fields.
    pub fn from_array(numbers: [f32; Self::LEN]) -> Self {
        let [loss_scale, factor, decay, lerp, square, keep, rate, spread, eps] = numbers;
        Self { loss_scale, factor, decay, lerp, square, keep, rate, spread, eps }
    }
}

/// The gradient of one step.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// All zeros, for which no bytes are needed: the moments decay and the parameters move all the same.
    Zero,
    /// float32
    F32(&'a [f32]),
    /// bfloat16
    Bf16(&'a [bf16]),
}

impl<'a> Gradient<'a> {
    fn covers(&self, len: usize) -> bool {
        match self {
            Self::Zero => true,
            Self::F32(values) => values.len() == len,
            Self::Bf16(values) => values.len() == len,
        }
    }
}

/// Applies the steps in their order: the same bits as one call for each, in one pass over the memory.
///
/// `p` are the parameters, `m` and `v` the first and second moment. A step that the trainer skipped, since a gradient
/// was infinite, is no step: it is left out here.
///
/// ```
/// use evermoe::cpu::{AdamWOptions, AdamWStep, Gradient, Serial, adamw};
/// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.0, weight_decay: 0.5, maximize: false };
/// let step = AdamWStep::new(&options, 1, 1.0, 1.0)?;
/// let (mut p, mut m, mut v) = ([4.0], [0.0], [0.0]);
/// adamw(&mut p, &mut m, &mut v, &[(step, Gradient::F32(&[2.0]))], &Serial);
/// assert_eq!((p, m, v), ([4.0 * 0.75 - 1.0 * 1.0 / (1.0 / 0.5)], [1.0], [1.0]));
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Panics
/// When the lengths do not match each other.
pub fn adamw(
    p: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    steps: &[(AdamWStep, Gradient<'_>)],
    pool: &impl Parallel,
) {
    let len = p.len();
    assert!(m.len() == len && v.len() == len && steps.iter().all(|(_, gradient)| gradient.covers(len)));
    let update = update_for_this_processor();
    let (p, m, v) = (Disjoint::new(p), Disjoint::new(m), Disjoint::new(v));
    pool.run(len.div_ceil(BLOCK), GRAIN_BLOCKS, &|blocks| {
        let _subnormals = KeepSubnormals::new();
        for block in blocks {
            let range = block * BLOCK..len.min((block + 1) * BLOCK);
            // SAFETY: each range of blocks is given to one thread.
            let state = unsafe { [p.part(range.clone()), m.part(range.clone()), v.part(range.clone())] };
            // SAFETY: chosen for the processor that this runs on.
            unsafe { update(state, range, steps) };
        }
    });
}

// ---- one block --------------------------------------------------------------------------------

/// Applies all steps to a block of `[p, m, v]`, whose elements are `range` of the gradients'.
type Update = unsafe fn([&mut [f32]; 3], Range<usize>, &[(AdamWStep, Gradient<'_>)]);

/// Every variant gives the same bits: `mul_add` is rounded once, with the instruction or without.
fn update_for_this_processor() -> Update {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return update_avx2;
    }
    update_portable
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn update_avx2(state: [&mut [f32]; 3], range: Range<usize>, steps: &[(AdamWStep, Gradient<'_>)]) {
    update_block(state, range, steps);
}

fn update_portable(state: [&mut [f32]; 3], range: Range<usize>, steps: &[(AdamWStep, Gradient<'_>)]) {
    update_block(state, range, steps);
}

#[inline(always)]
fn update_block([p, m, v]: [&mut [f32]; 3], range: Range<usize>, steps: &[(AdamWStep, Gradient<'_>)]) {
    for (step, gradient) in steps {
        match gradient {
            Gradient::Zero => update_step(step, p, m, v, &ZEROS[..range.len()], |g| g),
            Gradient::F32(values) => update_step(step, p, m, v, &values[range.clone()], |g| g),
            Gradient::Bf16(values) => update_step(step, p, m, v, &values[range.clone()], |g: bf16| {
                f32::from_bits(u32::from(g.to_bits()) << 16)
            }),
        }
    }
}

/// Division and multiplication by 1 change no bit: they are left out.
#[inline(always)]
fn update_step<G: Copy>(
    step: &AdamWStep,
    p: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    gradient: &[G],
    widen: impl Fn(G) -> f32,
) {
    let plain = step.loss_scale == 1.0 && step.factor == 1.0;
    match (plain, step.lerp < 0.5) {
        (true, true) => update_elements(step, p, m, v, gradient, widen, move |m, _| m),
        (true, false) => update_elements(step, p, m, v, gradient, widen, move |_, g| g),
        (false, near) => {
            let scaled = |g: G| widen(g) / step.loss_scale * step.factor;
            update_elements(step, p, m, v, gradient, scaled, move |m, g| if near { m } else { g });
        }
    }
}

/// `anchor` is the end that the first moment's interpolation starts from: `m`, or `g` where that is nearer.
#[inline(always)]
fn update_elements<G: Copy>(
    step: &AdamWStep,
    p: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    gradient: &[G],
    widen: impl Fn(G) -> f32,
    anchor: impl Fn(f32, f32) -> f32,
) {
    let AdamWStep { decay, lerp, square, keep, rate, spread, eps, .. } = *step;
    let slope = if lerp < 0.5 { lerp } else { -(1.0 - lerp) };
    for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(gradient) {
        let g = widen(g);
        let first = slope.mul_add(g - *m, anchor(*m, g));
        let second = (square * g).mul_add(g, *v * keep);
        let moved = *p * decay - rate * first / (second.sqrt() / spread + eps);
        // Loads before stores: the arrays often lie at the same offset of their pages, which looks like an overlap.
        (*p, *m, *v) = (moved, first, second);
    }
}

// ---- the processor's mode ---------------------------------------------------------------------

/// Puts this thread's floats into the mode that Rust assumes and the recipe needs (to nearest, subnormals kept, nothing
/// trapped), until dropped: `torch.set_flush_denormal`, or a library built with fast math, may have changed it.
struct KeepSubnormals {
    #[cfg(target_arch = "x86_64")]
    before: u32,
}

#[cfg(target_arch = "x86_64")]
impl KeepSubnormals {
    const DEFAULT: u32 = 0x1f80;

    fn new() -> Self {
        let mut before = 0_u32;
        // SAFETY: stores the control register to a place of its size.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack, preserves_flags))
        };
        Self::set(Self::DEFAULT);
        Self { before }
    }

    fn set(mode: u32) {
        // SAFETY: loads the control register from a place of its size; no reserved bit is set.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags))
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for KeepSubnormals {
    fn drop(&mut self) {
        Self::set(self.before);
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl KeepSubnormals {
    fn new() -> Self {
        Self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 1003;

    /// Floats of every kind: subnormals, infinities and NaNs among them.
    fn any_bits(seed: u32) -> Vec<f32> {
        let spread = |i: u32| f32::from_bits((i + seed).wrapping_mul(2_654_435_761));
        (0..LEN as u32).map(spread).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }).collect()
    }

    fn run(update: Update) -> [Vec<u32>; 3] {
        let options =
            AdamWOptions { lr: 0.3, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, maximize: false };
        let gradient = any_bits(9);
        let steps = [
            (AdamWStep::new(&options, 1, 1.0, 1.0).unwrap(), Gradient::F32(&gradient)),
            (AdamWStep::new(&options, 2, 3.0, 0.7).unwrap(), Gradient::F32(&gradient)),
        ];
        let (mut p, mut m) = (any_bits(1), any_bits(2));
        let mut v: Vec<f32> = any_bits(3).iter().map(|value| value.abs()).collect();
        // SAFETY: a variant for this processor.
        unsafe { update([&mut p, &mut m, &mut v], 0..LEN, &steps) };
        [bits(&p), bits(&m), bits(&v)]
    }

    #[test]
    fn variants_give_the_same_bits() {
        assert_eq!(run(update_for_this_processor()), run(update_portable));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn subnormals_are_kept_and_the_mode_comes_back() {
        const FLUSH: u32 = KeepSubnormals::DEFAULT | 0x8040;
        let subnormal = f32::from_bits(0x0000_4001);
        let options =
            AdamWOptions { lr: 0.5, betas: [0.5, 0.5], eps: 1.0, weight_decay: 0.0, maximize: false };
        let step = AdamWStep::new(&options, 1, 1.0, 1.0).unwrap();
        let (mut p, mut m, mut v) = ([subnormal], [subnormal], [0.0]);
        KeepSubnormals::set(FLUSH);
        super::super::adamw(&mut p, &mut m, &mut v, &[(step, Gradient::Zero)], &super::super::Serial);
        let after = KeepSubnormals::new().before;
        KeepSubnormals::set(KeepSubnormals::DEFAULT);
        assert_eq!(after, FLUSH);
        // Half of an odd subnormal, to nearest even; then p loses that moment: rate is 1, the denominator too.
        assert_eq!((m[0].to_bits(), p[0].to_bits()), (0x0000_2000, 0x0000_2001));
    }
}
