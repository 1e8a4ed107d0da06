//! SGD with momentum, with a single arithmetic: the same bits on every CPU, every GPU and every replica.
//!
//! A step of one element, all in float32, each operation rounded once to nearest even, subnormals kept:
//!
//! ```text
//! g = (g / loss_scale) · factor                      factor = ±clip, negative to maximize
//! g = fma(p, decay, g)                               decay = weight_decay, unless that is 0
//! with momentum:
//!   b = g                                            in the first step of a parameter
//!       fma(g, one_minus_dampening, b · momentum)    later
//!   g = b, or fma(b, momentum, g) if nesterov
//! p = fma(g, −lr, p)
//! ```
//!
//! This equals `torch.optim.SGD(fused=True)` on an x86 CPU bit for bit, unless torch uses its scalar loop for the last
//! elements (`numel % 8 != 0`), where [`Arithmetic::TorchCpuFused`] has `b = fma(b, momentum, g ·
//! one_minus_dampening)`. It equals the `foreach` and plain variants for every size. NaNs are the exception: which NaN
//! results is up to the processor.

use super::parallel::Parallel;
use super::steps::{
    Arithmetic, Gradient, Numbers, Rounded, Scaling, Step, apply_steps, check_option, for_each,
};
use crate::ensure;
use crate::error::{Error, Result};

/// Options set by the user.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// Share of the buffer that is kept; 0 for no buffer.
    pub momentum: f64,
    /// Share of the gradient that does not go into the buffer.
    pub dampening: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Look ahead by one more step of momentum.
    pub nesterov: bool,
    /// Ascend rather than descend.
    pub maximize: bool,
}

/// The numbers of one step, rounded to float32: all that a replica needs in addition to the gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// Arithmetic of the step.
    pub arithmetic: Arithmetic,
    /// Loss scale; the gradient is first divided by it.
    pub loss_scale: f32,
    /// Clipping coefficient, by which the gradient is then multiplied; negative to maximize.
    pub factor: f32,
    /// Weight decay.
    pub decay: f32,
    /// Momentum; 0 for no buffer.
    pub momentum: f32,
    /// `1 − dampening`
    pub one_minus_dampening: f32,
    /// Learning rate.
    pub lr: f32,
    /// Whether it is the parameter's first step, whose buffer is the gradient.
    pub is_first: bool,
    /// Whether to look ahead, as given.
    pub nesterov: bool,
}

impl SgdStep {
    /// Count of a step's numbers.
    pub const LEN: usize = 9;
    /// Arithmetics of this optimizer.
    pub const ARITHMETICS: [Arithmetic; 2] = [Arithmetic::Evermoe, Arithmetic::TorchCpuFused];

    /// Computes the numbers of a step, the parameter's first or a later one, for gradients of a loss that was
    /// multiplied by `loss_scale`. The gradients are to be multiplied by `clip`.
    ///
    /// ```
    /// use evermoe::cpu::{Arithmetic, SgdOptions, SgdStep};
    /// let options =
    ///     SgdOptions { lr: 0.5, momentum: 0.75, dampening: 0.0, weight_decay: 0.25, nesterov: true, maximize: true };
    /// let step = SgdStep::new(Arithmetic::Evermoe, &options, true, 8.0, 0.5)?;
    /// assert_eq!(step.to_array(), [0.0, 8.0, -0.5, 0.25, 0.75, 1.0, 0.5, 1.0, 1.0]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if a number is out of its range, or the arithmetic is another optimizer's.
    pub fn new(
        arithmetic: Arithmetic,
        options: &SgdOptions,
        is_first: bool,
        loss_scale: f64,
        clip: f64,
    ) -> Result<Self> {
        let SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize } = *options;
        Arithmetic::named(arithmetic.name(), &Self::ARITHMETICS)?;
        for (name, value) in [("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)] {
            check_option(name, value)?;
        }
        ensure!((dampening as f32).is_finite(), "dampening: expected a finite number, got {dampening}");
        ensure!(
            !nesterov || (momentum > 0.0 && dampening == 0.0),
            "nesterov: expected a momentum above 0 and no dampening with it, got momentum {momentum}, dampening \
             {dampening}"
        );
        let Scaling { loss_scale, factor, .. } = Scaling::checked(arithmetic, loss_scale, clip, maximize)?;
        Ok(Self {
            arithmetic,
            loss_scale,
            factor,
            decay: weight_decay as f32,
            momentum: momentum as f32,
            one_minus_dampening: (1.0 - dampening) as f32,
            lr: lr as f32,
            is_first,
            nesterov,
        })
    }

    /// Returns the numbers in the order of the fields; the arithmetic is its number, true is 1.
    pub fn to_array(&self) -> [f32; Self::LEN] {
        let flag = |is_set: bool| f32::from(u8::from(is_set));
        [
            self.arithmetic.number(),
            self.loss_scale,
            self.factor,
            self.decay,
            self.momentum,
            self.one_minus_dampening,
            self.lr,
            flag(self.is_first),
            flag(self.nesterov),
        ]
    }

    /// Creates a step from its numbers, in the order of the fields.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the arithmetic is not of this optimizer, or a truth value is neither 0 nor
    /// 1.
    pub fn from_array(numbers: [f32; Self::LEN]) -> Result<Self> {
        let [arithmetic, loss_scale, factor, decay, momentum, one_minus_dampening, lr, is_first, nesterov] =
            numbers;
        let arithmetic = Arithmetic::numbered(arithmetic, &Self::ARITHMETICS)?;
        for flag in [is_first, nesterov] {
            ensure!(
                flag == 0.0 || flag == 1.0,
                "steps: expected 0 or 1 for is_first and nesterov, got {flag}; rows come from the function of the \
                 optimizer's steps"
            );
        }
        let (is_first, nesterov) = (is_first == 1.0, nesterov == 1.0);
        Ok(Self {
            arithmetic,
            loss_scale,
            factor,
            decay,
            momentum,
            one_minus_dampening,
            lr,
            is_first,
            nesterov,
        })
    }
}

/// Applies the steps in order, in one pass over the memory; the bits equal those of one call per step.
///
/// `p` are the parameters, `buffer` that of the momentum; without it no step may have momentum. If `p` is the master of
/// weights of 16 bits, the same pass writes them, `rounded`.
///
/// ```
/// use evermoe::cpu::{Gradient, Arithmetic, Serial, SgdOptions, SgdStep, sgd};
/// let options =
///     SgdOptions { lr: 0.5, momentum: 0.5, dampening: 0.0, weight_decay: 0.25, nesterov: false, maximize: false };
/// let step = SgdStep::new(Arithmetic::Evermoe, &options, false, 1.0, 1.0)?;
/// let (mut p, mut buffer) = ([4.0], [6.0]);
/// sgd(&mut p, Some(&mut buffer), None, &[(step, Gradient::F32(&[2.0]))], &Serial)?;
/// assert_eq!((p, buffer), ([4.0 - 0.5 * 6.0], [2.0 + 0.25 * 4.0 + 0.5 * 6.0]));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Invalid`] if a step has momentum and there is no buffer; nothing is changed then.
///
/// # Panics
/// If the lengths do not match each other.
pub fn sgd(
    p: &mut [f32],
    buffer: Option<&mut [f32]>,
    rounded: Option<Rounded<'_>>,
    steps: &[(SgdStep, Gradient<'_>)],
    pool: &impl Parallel,
) -> Result<()> {
    match buffer {
        Some(buffer) => apply_steps([p, buffer], rounded, steps, pool),
        None => {
            check_no_momentum(steps.iter().map(|(step, _)| step))?;
            apply_steps([p], rounded, steps, pool);
        }
    }
    Ok(())
}

/// Refuses steps that need a buffer where there is none.
pub(crate) fn check_no_momentum<'a>(steps: impl IntoIterator<Item = &'a SgdStep>) -> Result<()> {
    match steps.into_iter().find(|step| step.momentum != 0.0) {
        None => Ok(()),
        Some(step) => Err(Error::invalid(format!(
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

impl Numbers for SgdStep {
    fn scaling(&self) -> Scaling {
        Scaling::of(self.arithmetic, self.loss_scale, self.factor)
    }
}

/// A step with a buffer.
impl Step<2> for SgdStep {
    #[inline(always)]
    fn update<G: Copy>(
        &self,
        [p, buffer]: [&mut [f32]; 2],
        gradient: &[G],
        widen: impl Fn(G) -> f32,
        in_tail: bool,
    ) {
        let Self { momentum, one_minus_dampening, lr, is_first, nesterov, .. } = *self;
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
                let b = b.mul_add(momentum, g * one_minus_dampening);
                [ahead(b, g).mul_add(-lr, p), b]
            });
        } else {
            for_each(state, gradient, |[p, b], g| {
                let g = self.decayed(p, widen(g));
                let b = g.mul_add(one_minus_dampening, b * momentum);
                [ahead(b, g).mul_add(-lr, p), b]
            });
        }
    }
}

/// A step without a buffer.
impl Step<1> for SgdStep {
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
