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
//!
//! The other [`Profile`]s repeat the steps of torch's own optimizers; they differ from the above in
//!
//! ```text
//! TorchCpuFused      v = fma(v, keep, (square · g) · g)        in the last numel % 8 elements
//! TorchCudaFused     p = fma(p, decay, p)                      decay = −(lr · weight_decay)
//!                    m = fma(m, lerp, fma(g, −lerp, g))        lerp  = β1
//!                    v = fma(v, keep, fma(g², −keep, g²))      rate, spread: of powers computed in float32 on the GPU
//! TorchCudaForeach   v = fma(g², square, v · keep)
//!                    p = fma(m / (√v / spread + eps), −rate, p)
//! ```
//!
//! Torch's other CPU variants take √ from a library that does not round it correctly: they cannot be repeated.

use super::parallel::Parallel;
use super::steps::{Gradient, Profile, Scaling, Step, apply_steps, check_option, for_each};
use crate::ensure;
use crate::error::{Error, Result};

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
    /// Whose step it is; the numbers below are other ones for [`Profile::TorchCudaFused`] (see the module).
    pub profile: Profile,
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
    pub const LEN: usize = 10;

    /// The numbers of step `t`, which counts from 1, for gradients of a loss that was multiplied by `loss_scale`, to be
    /// multiplied by `clip`.
    ///
    /// ```
    /// use evermoe::cpu::{AdamWOptions, AdamWStep};
    /// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.5, maximize: true };
    /// let step = AdamWStep::new(&options, 1, 8.0, 0.5)?;
    /// assert_eq!(step.to_array(), [0.0, 8.0, -0.5, 0.75, 0.5, 0.25, 0.75, 1.0, 0.5, 0.25]);
    /// # Ok::<(), evermoe::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::error::Error::Invalid`] when a number is out of its range; it names it.
    pub fn new(options: &AdamWOptions, t: i64, loss_scale: f64, clip: f64) -> Result<Self> {
        Self::with_profile(Profile::Evermoe, options, t, None, loss_scale, clip)
    }

    /// As [`AdamWStep::new`], for another profile. [`Profile::TorchCudaFused`] needs `powers`: β1^t and β2^t as
    /// the trainer's GPU computes them in float32, since no two libraries agree on them; the others take none.
    ///
    /// ```
    /// use evermoe::cpu::{AdamWOptions, AdamWStep, Profile};
    /// let options = AdamWOptions { lr: 0.5, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.5, maximize: false };
    /// let step = AdamWStep::with_profile(Profile::TorchCudaFused, &options, 1, Some([0.5, 0.75]), 1.0, 1.0)?;
    /// assert_eq!(step.to_array(), [2.0, 1.0, 1.0, -0.25, 0.5, 0.25, 0.75, 1.0, 0.5, 0.25]);
    /// # Ok::<(), evermoe::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`AdamWStep::new`]; also when `powers` are missing, not wanted, or no powers.
    pub fn with_profile(
        profile: Profile,
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
        let [loss_scale, factor] = Scaling::checked(loss_scale, clip, maximize)?.numbers();
        let step = Self {
            profile,
            loss_scale,
            factor,
            // One rounding in double: a compiler fuses it in torch.
            decay: (-lr).mul_add(weight_decay, 1.0) as f32,
            lerp: (1.0 - beta1) as f32,
            square: (1.0 - beta2) as f32,
            keep: beta2 as f32,
            rate: (lr / (1.0 - beta1.powf(t as f64))) as f32,
            spread: (1.0 - beta2.powf(t as f64)).sqrt() as f32,
            eps: eps as f32,
        };
        match (profile, powers) {
            (Profile::TorchCudaFused, Some(powers)) => step.with_powers(options, powers),
            (Profile::TorchCudaFused, None) => Err(Error::Invalid(
                "powers: expected beta1**t and beta2**t in float32 from the trainer's GPU, got None".into(),
            )),
            (_, Some(_)) => Err(Error::Invalid(format!(
                "powers: expected None, as profile {} computes them in double",
                profile.name()
            ))),
            // Python computes both, without fusing the one and with a power of one half for the other.
            (Profile::TorchCudaForeach, None) => Ok(Self {
                decay: (1.0 - lr * weight_decay) as f32,
                spread: (1.0 - beta2.powf(t as f64)).powf(0.5) as f32,
                ..step
            }),
            _ => Ok(step),
        }
    }

    /// The numbers as torch's CUDA kernel computes them: in float32 from the start.
    fn with_powers(self, options: &AdamWOptions, powers: [f32; 2]) -> Result<Self> {
        let (lr, weight_decay) = (options.lr as f32, options.weight_decay as f32);
        let beta1 = options.betas[0] as f32;
        for (power, beta) in powers.into_iter().zip(options.betas) {
            ensure!(
                (0.0..1.0).contains(&power) && power <= beta as f32 * (1.0 + 1e-5),
                "powers: expected beta**t, 0 to {beta}, got {power}"
            );
        }
        // A decay of +0 is none; of −0, one of a learning rate of 0, which still turns −0 into +0.
        let decay = if weight_decay == 0.0 { 0.0 } else { -(lr * weight_decay) };
        let (rate, spread) = (lr / (1.0 - powers[0]), (1.0 - powers[1]).sqrt());
        Ok(Self { decay, lerp: beta1, rate, spread, ..self })
    }

    /// The numbers in the order of the fields; the profile is its number.
    pub fn to_array(&self) -> [f32; Self::LEN] {
        let Self { profile, loss_scale, factor, decay, lerp, square, keep, rate, spread, eps } = *self;
        [profile.number(), loss_scale, factor, decay, lerp, square, keep, rate, spread, eps]
    }

    /// The step of these numbers, in the order of the fields.
    ///
    /// # Errors
    /// [`crate::error::Error::Invalid`] when the first one is no profile's.
    pub fn from_array(numbers: [f32; Self::LEN]) -> Result<Self> {
        let [profile, loss_scale, factor, decay, lerp, square, keep, rate, spread, eps] = numbers;
        let profile = Profile::numbered(profile, &Profile::ALL)?;
        Ok(Self { profile, loss_scale, factor, decay, lerp, square, keep, rate, spread, eps })
    }
}

/// Applies the steps in their order: the same bits as one call for each, in one pass over the memory.
///
/// `p` are the parameters, `m` and `v` the first and second moment. A step that the trainer skipped, since a gradient
/// was infinite, is no step: it is left out here. Under [`Profile::TorchCpuFused`] the arrays are a whole parameter, as
/// its last elements are stepped in another way.
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
    apply_steps([p, m, v], steps, pool);
}

impl Step<3> for AdamWStep {
    fn scaling(&self) -> Scaling {
        Scaling::of(self.loss_scale, self.factor)
    }

    fn profile(&self) -> Profile {
        self.profile
    }

    #[inline(always)]
    fn update<G: Copy>(
        &self,
        state: [&mut [f32]; 3],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        in_tail: bool,
    ) {
        let Self { decay, lerp, square, keep, rate, spread, eps, .. } = *self;
        let (near, slope) = (lerp < 0.5, if lerp < 0.5 { lerp } else { -(1.0 - lerp) });
        // From the end that is nearer: m, or g.
        let first_moment = |m: f32, g: f32| slope.mul_add(g - m, if near { m } else { g });
        let denominator = |v: f32| v.sqrt() / spread + eps;
        match self.profile {
            Profile::TorchCpuFused if in_tail => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), v.mul_add(keep, square * g * g));
                [p * decay - rate * m / denominator(v), m, v]
            }),
            Profile::Evermoe | Profile::TorchCpuFused => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), (square * g).mul_add(g, v * keep));
                [p * decay - rate * m / denominator(v), m, v]
            }),
            Profile::TorchCudaFused => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let p = if decay.to_bits() == 0 { p } else { p.mul_add(decay, p) };
                let m = m.mul_add(lerp, g.mul_add(-lerp, g));
                let v = v.mul_add(keep, (g * g).mul_add(-keep, g * g));
                [p - rate * m / denominator(v), m, v]
            }),
            Profile::TorchCudaForeach => for_each(state, gradient, |[p, m, v], g| {
                let g = widen(g);
                let (m, v) = (first_moment(m, g), (g * g).mul_add(square, v * keep));
                [(m / denominator(v)).mul_add(-rate, p * decay), m, v]
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

    fn run(profile: Profile, update: Update<3, AdamWStep>) -> [Vec<u32>; 3] {
        let options =
            AdamWOptions { lr: 0.3, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, maximize: false };
        let gradient = any_bits(9);
        let powers = (profile == Profile::TorchCudaFused).then_some([0.5, 0.75]);
        let step =
            |t, scale, clip| AdamWStep::with_profile(profile, &options, t, powers, scale, clip).unwrap();
        let steps =
            [(step(1, 1.0, 1.0), Gradient::F32(&gradient)), (step(2, 3.0, 0.7), Gradient::F32(&gradient))];
        let (mut p, mut m) = (any_bits(1), any_bits(2));
        let mut v: Vec<f32> = any_bits(3).iter().map(|value| value.abs()).collect();
        // SAFETY: a variant for this processor.
        unsafe { update([&mut p, &mut m, &mut v], 0..LEN, LEN - LEN % 8, &steps) };
        [bits(&p), bits(&m), bits(&v)]
    }

    #[test]
    fn variants_give_the_same_bits() {
        for profile in Profile::ALL {
            assert_eq!(
                run(profile, update_for_this_processor()),
                run(profile, update_portable),
                "{profile:?}"
            );
        }
    }
}
