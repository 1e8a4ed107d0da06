//! AdamW with a single arithmetic: the same bits on every CPU, every GPU and every replica.
//!
//! A step of one element, all in float32, each operation rounded once to nearest even, subnormals kept:
//!
//! ```text
//! g = (g / loss_scale) · factor                          factor = ±clip, negative to maximize
//! p = p · decay                                          decay  = 1 − lr·weight_decay
//! m = fma(one_minus_beta1, g − m, m)                     one_minus_beta1 < 0.5
//!     fma(−(1 − one_minus_beta1), g − m, g)              otherwise
//! v = fma(one_minus_beta2 · g, g, v · beta2)
//! p = p − (step_size · m) / (√v / bias_correction2_sqrt + eps)
//!                                                        step_size = lr / (1 − β1^t)
//!                                                        bias_correction2_sqrt = √(1 − β2^t)
//! ```
//!
//! This equals `torch.optim.AdamW(fused=True)` on an x86 CPU bit for bit, unless torch uses its scalar loop for the
//! last elements (`numel % 8 != 0`). NaNs are the exception: which NaN results is up to the processor.
//!
//! The other [`Arithmetic`]s repeat the steps of torch's own optimizers; they differ from the above in
//!
//! ```text
//! TorchCpuFused      v = fma(v, beta2, (one_minus_beta2 · g) · g)    in the last numel % 8 elements
//! TorchCudaFused     p = fma(p, decay, p)                            decay = −(lr · weight_decay)
//!                    m = fma(m, β1, fma(g, −β1, g))                  one_minus_beta1 holds β1
//!                    v = fma(v, beta2, fma(g², −beta2, g²))          powers of β computed in float32 on the GPU
//! TorchCudaForeach   v = fma(g², one_minus_beta2, v · beta2)
//!                    p = fma(m / (√v / bias_correction2_sqrt + eps), −step_size, p)
//! ```
//!
//! Torch's other CPU variants take √ from a library that does not round it correctly, so they cannot be repeated.

use super::parallel::Parallel;
use super::steps::{
    Arithmetic, Gradient, Numbers, Rounded, Scaling, Step, apply_steps, check_option, for_each,
};
use crate::ensure;
use crate::error::{Error, Result};

/// Options set by the user.
#[derive(Debug, Clone, Copy)]
pub struct AdamWOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first and the second moment.
    pub betas: [f64; 2],
    /// Epsilon, which keeps the denominator from zero.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Ascend rather than descend.
    pub maximize: bool,
}

/// The numbers of one step, rounded to float32: all that a replica needs in addition to the gradient.
///
/// The trainer computes them once and sends them with the gradient. A replica never recomputes them, because `pow`
/// differs between libraries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Arithmetic of the step; under [`Arithmetic::TorchCudaFused`] the numbers below have other meanings (see the
    /// module).
    pub arithmetic: Arithmetic,
    /// Loss scale; the gradient is first divided by it.
    pub loss_scale: f32,
    /// Clipping coefficient, by which the gradient is then multiplied; negative to maximize.
    pub factor: f32,
    /// `1 − lr·weight_decay`
    pub decay: f32,
    /// `1 − β1`; under [`Arithmetic::TorchCudaFused`] `β1`.
    pub one_minus_beta1: f32,
    /// `1 − β2`
    pub one_minus_beta2: f32,
    /// `β2`
    pub beta2: f32,
    /// `lr / (1 − β1^t)`
    pub step_size: f32,
    /// `√(1 − β2^t)`
    pub bias_correction2_sqrt: f32,
    /// Epsilon, as given.
    pub eps: f32,
}

impl AdamWStep {
    /// Count of a step's numbers.
    pub const LEN: usize = 10;

    /// Computes the numbers of step `t` (from 1), for gradients of a loss that was multiplied by `loss_scale`. The
    /// gradients are to be multiplied by `clip`.
    ///
    /// ```
    /// use evermoe::cpu::{AdamWOptions, AdamWStep};
    /// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.5, maximize: true };
    /// let step = AdamWStep::new(&options, 1, 8.0, 0.5)?;
    /// assert_eq!(step.to_array(), [0.0, 8.0, -0.5, 0.75, 0.5, 0.25, 0.75, 1.0, 0.5, 0.25]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if a number is out of its range, naming it.
    pub fn new(options: &AdamWOptions, t: i64, loss_scale: f64, clip: f64) -> Result<Self> {
        Self::with_arithmetic(Arithmetic::Evermoe, options, t, None, loss_scale, clip)
    }

    /// Computes the numbers of [`AdamWStep::new`] for another arithmetic. [`Arithmetic::TorchCudaFused`] needs
    /// `powers`: β1^t and β2^t as computed by the trainer's GPU in float32, because no two libraries agree on them. The
    /// others take none.
    ///
    /// ```
    /// use evermoe::cpu::{AdamWOptions, AdamWStep, Arithmetic};
    /// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.5, maximize: false };
    /// let step = AdamWStep::with_arithmetic(Arithmetic::TorchCudaFused, &options, 1, Some([0.5, 0.75]), 1.0, 1.0)?;
    /// assert_eq!(step.to_array(), [2.0, 1.0, 1.0, -0.25, 0.5, 0.25, 0.75, 1.0, 0.5, 0.25]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`AdamWStep::new`]; also if `powers` are missing, superfluous or invalid.
    pub fn with_arithmetic(
        arithmetic: Arithmetic,
        options: &AdamWOptions,
        t: i64,
        powers: Option<[f32; 2]>,
        loss_scale: f64,
        clip: f64,
    ) -> Result<Self> {
        let AdamWOptions { lr, betas: [beta1, beta2], eps, weight_decay, maximize } = *options;
        for (name, value) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay)] {
            check_option(name, value)?;
        }
        for beta in [beta1, beta2] {
            ensure!((0.0..1.0).contains(&beta), "betas: expected numbers of 0 to below 1, got {beta}");
        }
        ensure!(t >= 1, "t: expected a step of 1 or more (steps count from 1), got {t}");
        let Scaling { loss_scale, factor, .. } = Scaling::checked(arithmetic, loss_scale, clip, maximize)?;
        let step = Self {
            arithmetic,
            loss_scale,
            factor,
            // A single rounding in double, because torch's compiler fuses the operations.
            decay: (-lr).mul_add(weight_decay, 1.0) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            beta2: beta2 as f32,
            step_size: (lr / (1.0 - beta1.powf(t as f64))) as f32,
            bias_correction2_sqrt: (1.0 - beta2.powf(t as f64)).sqrt() as f32,
            eps: eps as f32,
        };
        match (arithmetic, powers) {
            (Arithmetic::TorchCudaFused, Some(powers)) => step.with_powers(options, powers),
            (Arithmetic::TorchCudaFused, None) => Err(Error::invalid(
                "powers: expected beta1**t and beta2**t in float32 from the trainer's GPU, got None",
            )),
            (_, Some(_)) => Err(Error::invalid(format!(
                "powers: expected None, as arithmetic {} computes them in double",
                arithmetic.name()
            ))),
            // Python computes both numbers: it does not fuse the one, and uses a power of one half for the other.
            (Arithmetic::TorchCudaForeach, None) => Ok(Self {
                decay: (1.0 - lr * weight_decay) as f32,
                bias_correction2_sqrt: (1.0 - beta2.powf(t as f64)).powf(0.5) as f32,
                ..step
            }),
            _ => Ok(step),
        }
    }

    /// Computes the numbers like torch's CUDA kernel: in float32 from the start.
    fn with_powers(self, options: &AdamWOptions, powers: [f32; 2]) -> Result<Self> {
        let (lr, weight_decay) = (options.lr as f32, options.weight_decay as f32);
        let beta1 = options.betas[0] as f32;
        for (power, beta) in powers.into_iter().zip(options.betas) {
            ensure!(
                (0.0..1.0).contains(&power) && power <= beta as f32 * (1.0 + 1e-5),
                "powers: expected beta**t, 0 to {beta}, got {power}"
            );
        }
        // A decay of +0 means no decay. A decay of −0 comes from a learning rate of 0, and still turns −0 into +0.
        let decay = if weight_decay == 0.0 { 0.0 } else { -(lr * weight_decay) };
        let (step_size, bias_correction2_sqrt) = (lr / (1.0 - powers[0]), (1.0 - powers[1]).sqrt());
        Ok(Self { decay, one_minus_beta1: beta1, step_size, bias_correction2_sqrt, ..self })
    }

    /// Returns the numbers in the order of the fields, with the arithmetic as its number.
    pub fn to_array(&self) -> [f32; Self::LEN] {
        [
            self.arithmetic.number(),
            self.loss_scale,
            self.factor,
            self.decay,
            self.one_minus_beta1,
            self.one_minus_beta2,
            self.beta2,
            self.step_size,
            self.bias_correction2_sqrt,
            self.eps,
        ]
    }

    /// Creates a step from its numbers, in the order of the fields.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the first one is not the number of an arithmetic.
    pub fn from_array(numbers: [f32; Self::LEN]) -> Result<Self> {
        let [
            arithmetic,
            loss_scale,
            factor,
            decay,
            one_minus_beta1,
            one_minus_beta2,
            beta2,
            step_size,
            bias_correction2_sqrt,
            eps,
        ] = numbers;
        let arithmetic = Arithmetic::numbered(arithmetic, &Arithmetic::ALL)?;
        Ok(Self {
            arithmetic,
            loss_scale,
            factor,
            decay,
            one_minus_beta1,
            one_minus_beta2,
            beta2,
            step_size,
            bias_correction2_sqrt,
            eps,
        })
    }
}

/// Applies the steps in order, in one pass over the memory; the bits equal those of one call per step.
///
/// `p` are the parameters, `m` and `v` the first and second moment. If `p` is the master of weights of 16 bits, the same
/// pass writes them, `rounded`. Steps that the trainer skipped, because a gradient
/// was infinite, must be left out. Under [`Arithmetic::TorchCpuFused`] the arrays must be an entire parameter, because
/// its last elements are updated differently.
///
/// ```
/// use evermoe::cpu::{AdamWOptions, AdamWStep, Gradient, Serial, adamw};
/// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.0, weight_decay: 0.5, maximize: false };
/// let step = AdamWStep::new(&options, 1, 1.0, 1.0)?;
/// let (mut p, mut m, mut v) = ([4.0], [0.0], [0.0]);
/// adamw(&mut p, &mut m, &mut v, None, &[(step, Gradient::F32(&[2.0]))], &Serial);
/// assert_eq!((p, m, v), ([4.0 * 0.75 - 1.0 * 1.0 / (1.0 / 0.5)], [1.0], [1.0]));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Panics
/// If the lengths do not match each other.
pub fn adamw(
    p: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    rounded: Option<Rounded<'_>>,
    steps: &[(AdamWStep, Gradient<'_>)],
    pool: &impl Parallel,
) {
    apply_steps([p, m, v], rounded, steps, pool);
}

impl Numbers for AdamWStep {
    fn scaling(&self) -> Scaling {
        Scaling::of(self.arithmetic, self.loss_scale, self.factor)
    }
}

impl Step<3> for AdamWStep {
    #[inline(always)]
    fn update<G: Copy>(
        &self,
        state: [&mut [f32]; 3],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        in_tail: bool,
    ) {
        let Self {
            decay,
            one_minus_beta1,
            one_minus_beta2,
            beta2,
            step_size,
            bias_correction2_sqrt,
            eps,
            ..
        } = *self;
        let near = one_minus_beta1 < 0.5;
        let slope = if near { one_minus_beta1 } else { -(1.0 - one_minus_beta1) };
        // From the nearer end: m, or g.
        let first_moment = |m: f32, g: f32| slope.mul_add(g - m, if near { m } else { g });
        let denominator = |v: f32| v.sqrt() / bias_correction2_sqrt + eps;
        match self.arithmetic {
            Arithmetic::TorchCpuFused if in_tail => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), v.mul_add(beta2, one_minus_beta2 * g * g));
                [p * decay - step_size * m / denominator(v), m, v]
            }),
            Arithmetic::Evermoe | Arithmetic::TorchCpuFused => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), (one_minus_beta2 * g).mul_add(g, v * beta2));
                [p * decay - step_size * m / denominator(v), m, v]
            }),
            Arithmetic::TorchCudaFused => for_each(state, gradient, |[p, m, v], g| {
                let (g, beta1) = (widen(g), one_minus_beta1);
                let p = if decay.to_bits() == 0 { p } else { p.mul_add(decay, p) };
                let m = m.mul_add(beta1, g.mul_add(-beta1, g));
                let v = v.mul_add(beta2, (g * g).mul_add(-beta2, g * g));
                [p - step_size * m / denominator(v), m, v]
            }),
            Arithmetic::TorchCudaForeach => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), (g * g).mul_add(one_minus_beta2, v * beta2));
                [(m / denominator(v)).mul_add(-step_size, p * decay), m, v]
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::steps::{Update, update_for_this_processor, update_portable};
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

    fn run(arithmetic: Arithmetic, update: Update<3, AdamWStep>) -> [Vec<u32>; 3] {
        let options =
            AdamWOptions { lr: 0.3, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, maximize: false };
        let gradient = any_bits(9);
        let powers = (arithmetic == Arithmetic::TorchCudaFused).then_some([0.5, 0.75]);
        let step = |t, scale, clip| {
            AdamWStep::with_arithmetic(arithmetic, &options, t, powers, scale, clip).unwrap()
        };
        let steps =
            [(step(1, 1.0, 1.0), Gradient::F32(&gradient)), (step(2, 3.0, 0.7), Gradient::F32(&gradient))];
        let (mut p, mut m) = (any_bits(1), any_bits(2));
        let mut v: Vec<f32> = any_bits(3).iter().map(|value| value.abs()).collect();
        // SAFETY: this variant is supported by this processor.
        unsafe { update([&mut p, &mut m, &mut v], None, 0..LEN, LEN - LEN % 8, &steps) };
        [bits(&p), bits(&m), bits(&v)]
    }

    #[test]
    fn variants_give_the_same_bits() {
        for arithmetic in Arithmetic::ALL {
            assert_eq!(
                run(arithmetic, update_for_this_processor()),
                run(arithmetic, update_portable),
                "{arithmetic:?}"
            );
        }
    }
}
