//! SGD with momentum, with one arithmetic everywhere: the same bits on every CPU, every GPU and every replica.
//!
//! A step of one element, all in float32, each operation rounded once to nearest even, subnormals kept:
//!
//! ```text
//! g = (g / loss_scale) · factor           factor = ±clip, negative to maximize
//! g = fma(p, decay, g)                    decay = weight_decay, unless that is 0
//! with momentum:
//!   b = g                                 in the first step of a parameter
//!       fma(g, intake, b · momentum)      later; intake = 1 − dampening
//!   g = b, or fma(b, momentum, g) if nesterov
//! p = fma(g, −lr, p)
//! ```
//!
//! This is `torch.optim.SGD(fused=True)` on an x86 CPU bit for bit, as long as torch does not come to its loop for the
//! last elements (`numel % 8 == 0`), where [`Profile::TorchCpuFused`] has `b = fma(b, momentum, g · intake)`; and the
//! `foreach` and plain variants for every size. NaNs are the exception: which NaN comes out is the processor's choice.

use super::parallel::Parallel;
use super::steps::{Gradient, Profile, Scaling, Step, apply_steps, check_option, for_each};
use crate::ensure;
use crate::error::{Error, Result};

/// What the user sets.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// How much of the buffer is kept; 0 for no buffer.
    pub momentum: f64,
    /// How much of the gradient does not go into the buffer.
    pub dampening: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Look ahead by one more step of momentum.
    pub nesterov: bool,
    /// Ascend rather than descend.
    pub maximize: bool,
}

/// The numbers of one step, rounded to float32: all that a replica needs beside the gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// Whose step it is.
    pub profile: Profile,
    /// What the loss was multiplied by; the gradient is divided by it first.
    pub loss_scale: f32,
    /// Then multiplied by this: the coefficient of clipping, negative to maximize.
    pub factor: f32,
    /// Weight decay.
    pub decay: f32,
    /// 0 for no buffer.
    pub momentum: f32,
    /// `1 − dampening`
    pub intake: f32,
    /// Learning rate.
    pub lr: f32,
    /// Whether it is the parameter's first step, whose buffer is the gradient.
    pub is_first: bool,
    /// As given.
    pub nesterov: bool,
}

impl SgdStep {
    /// How many numbers a step consists of.
    pub const LEN: usize = 9;
    /// The profiles there are for this optimizer.
    pub const PROFILES: [Profile; 2] = [Profile::Evermoe, Profile::TorchCpuFused];

    /// The numbers of a step, the parameter's first or a later one, for gradients of a loss that was multiplied by
    /// `loss_scale`, to be multiplied by `clip`.
    ///
    /// ```
    /// use evermoe::cpu::{Profile, SgdOptions, SgdStep};
    /// let options =
    ///     SgdOptions { lr: 0.5, momentum: 0.75, dampening: 0.0, weight_decay: 0.25, nesterov: true, maximize: true };
    /// let step = SgdStep::new(Profile::Evermoe, &options, true, 8.0, 0.5)?;
    /// assert_eq!(step.to_array(), [0.0, 8.0, -0.5, 0.25, 0.75, 1.0, 0.5, 1.0, 1.0]);
    /// # Ok::<(), evermoe::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::error::Error::Invalid`] when a number is out of its range or the profile is another optimizer's.
    pub fn new(
        profile: Profile,
        options: &SgdOptions,
        is_first: bool,
        loss_scale: f64,
        clip: f64,
    ) -> Result<Self> {
        let SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize } = *options;
        Profile::named(profile.name(), &Self::PROFILES)?;
        for (name, value) in [("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)] {
            check_option(name, value)?;
        }
        ensure!((dampening as f32).is_finite(), "dampening: expected a finite number, got {dampening}");
        ensure!(
            !nesterov || (momentum > 0.0 && dampening == 0.0),
            "nesterov: expected a momentum above 0 and no dampening with it, got momentum {momentum}, dampening \
             {dampening}"
        );
        let [loss_scale, factor] = Scaling::checked(loss_scale, clip, maximize)?.numbers();
        Ok(Self {
            profile,
            loss_scale,
            factor,
            decay: weight_decay as f32,
            momentum: momentum as f32,
            intake: (1.0 - dampening) as f32,
            lr: lr as f32,
            is_first,
            nesterov,
        })
    }

    /// The numbers in the order of the fields; the profile is its number, a truth 1.
    pub fn to_array(&self) -> [f32; Self::LEN] {
        let Self { profile, loss_scale, factor, decay, momentum, intake, lr, is_first, nesterov } = *self;
        let flag = |is_set: bool| f32::from(u8::from(is_set));
        [profile.number(), loss_scale, factor, decay, momentum, intake, lr, flag(is_first), flag(nesterov)]
    }

    /// The step of these numbers, in the order of the fields.
    ///
    /// # Errors
    /// [`crate::error::Error::Invalid`] when the profile is none of this optimizer, or a truth neither 0 nor 1.
    pub fn from_array(numbers: [f32; Self::LEN]) -> Result<Self> {
        let [profile, loss_scale, factor, decay, momentum, intake, lr, is_first, nesterov] = numbers;
        let profile = Profile::numbered(profile, &Self::PROFILES)?;
        for flag in [is_first, nesterov] {
            ensure!(
                flag == 0.0 || flag == 1.0,
                "steps: expected 0 or 1 for is_first and nesterov, got {flag}; rows come from the function of the \
                 optimizer's steps"
            );
        }
        let (is_first, nesterov) = (is_first == 1.0, nesterov == 1.0);
        Ok(Self { profile, loss_scale, factor, decay, momentum, intake, lr, is_first, nesterov })
    }
}

/// Applies the steps in their order: the same bits as one call for each, in one pass over the memory.
///
/// `p` are the parameters, `buffer` the momentum's, without which no step has momentum.
///
/// ```
/// use evermoe::cpu::{Gradient, Profile, Serial, SgdOptions, SgdStep, sgd};
/// let options =
///     SgdOptions { lr: 0.5, momentum: 0.5, dampening: 0.0, weight_decay: 0.25, nesterov: false, maximize: false };
/// let step = SgdStep::new(Profile::Evermoe, &options, false, 1.0, 1.0)?;
/// let (mut p, mut buffer) = ([4.0], [6.0]);
/// sgd(&mut p, Some(&mut buffer), &[(step, Gradient::F32(&[2.0]))], &Serial)?;
/// assert_eq!((p, buffer), ([4.0 - 0.5 * 6.0], [2.0 + 0.25 * 4.0 + 0.5 * 6.0]));
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`crate::error::Error::Invalid`] when a step has momentum and there is no buffer; nothing is changed then.
///
/// # Panics
/// When the lengths do not match each other.
pub fn sgd(
    p: &mut [f32],
    buffer: Option<&mut [f32]>,
    steps: &[(SgdStep, Gradient<'_>)],
    pool: &impl Parallel,
) -> Result<()> {
    match buffer {
        Some(buffer) => apply_steps([p, buffer], steps, pool),
        None => {
            check_no_momentum(steps.iter().map(|(step, _)| step))?;
            apply_steps([p], steps, pool);
        }
    }
    Ok(())
}

/// Refuses steps that need a buffer where there is none.
pub(crate) fn check_no_momentum<'a>(steps: impl IntoIterator<Item = &'a SgdStep>) -> Result<()> {
    match steps.into_iter().find(|step| step.momentum != 0.0) {
        None => Ok(()),
        Some(step) => Err(Error::Invalid(format!(
            "buffer: expected one for a step with momentum {}, got None",
            step.momentum
        ))),
    }
}

impl SgdStep {
    #[inline(always)]
    fn decayed(&self, p: f32, g: f32) -> f32 {
        if self.decay == 0.0 { g } else { p.mul_add(self.decay, g) }
    }
}

/// With a buffer.
impl Step<2> for SgdStep {
    fn scaling(&self) -> Scaling {
        Scaling::of(self.loss_scale, self.factor)
    }

    fn profile(&self) -> Profile {
        self.profile
    }

    #[inline(always)]
    fn update<G: Copy>(
        &self,
        [p, buffer]: [&mut [f32]; 2],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        in_tail: bool,
    ) {
        let Self { momentum, intake, lr, is_first, nesterov, .. } = *self;
        if momentum == 0.0 {
            return Step::<1>::update(self, [p], gradient, widen, in_tail);
        }
        let ahead = |b: f32, g: f32| if nesterov { b.mul_add(momentum, g) } else { b };
        let state = [p, buffer];
        if is_first {
            for_each(state, gradient, |[p, _], g| {
                let b = self.decayed(p, widen(g));
                [ahead(b, b).mul_add(-lr, p), b]
            });
        } else if in_tail {
            for_each(state, gradient, |[p, b], g| {
                let g = self.decayed(p, widen(g));
                let b = b.mul_add(momentum, g * intake);
                [ahead(b, g).mul_add(-lr, p), b]
            });
        } else {
            for_each(state, gradient, |[p, b], g| {
                let g = self.decayed(p, widen(g));
                let b = g.mul_add(intake, b * momentum);
                [ahead(b, g).mul_add(-lr, p), b]
            });
        }
    }
}

/// Without.
impl Step<1> for SgdStep {
    fn scaling(&self) -> Scaling {
        Step::<2>::scaling(self)
    }

    fn profile(&self) -> Profile {
        self.profile
    }

    #[inline(always)]
    fn update<G: Copy>(
        &self,
        state: [&mut [f32]; 1],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        _in_tail: bool,
    ) {
        for_each(state, gradient, |[p], g| [self.decayed(p, widen(g)).mul_add(-self.lr, p)]);
    }
}
