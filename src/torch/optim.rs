//! The optimizers' ops: checks, and the calls to the CPU's or the GPU's arithmetic.

use super::checks::{check_device, check_disjoint, on_cuda};
use super::library::TorchPool;
use super::stepped::Stepped;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu::{AdamWStep, Gradient, Rounded, SgdStep, adamw, check_no_momentum, sgd};
use crate::ensure;
use crate::error::{Error, Result};

/// An optimizer, by its step.
pub(super) trait Step: Sized {
    /// Names of the parameter and of the optimizer's arrays; the last ones may be missing.
    const NAMES: &'static [&'static str];

    /// Takes the steps of one parameter on the CPU.
    fn on_cpu(
        state: &mut [Tensor],
        rounded: Option<Rounded<'_>>,
        steps: &[(Self, Gradient<'_>)],
    ) -> Result<()>;

    /// Takes the steps of all parameters of one other device.
    fn on_device(all: &[Stepped<Self>]) -> Result<()>;
}

impl Step for AdamWStep {
    const NAMES: &'static [&'static str] = &["p", "m", "v"];

    fn on_cpu(
        state: &mut [Tensor],
        rounded: Option<Rounded<'_>>,
        steps: &[(Self, Gradient<'_>)],
    ) -> Result<()> {
        let [p, m, v] = state else { unreachable!("three arrays") };
        adamw(p.slice_mut()?, m.slice_mut()?, v.slice_mut()?, rounded, steps, &TorchPool);
        Ok(())
    }

    fn on_device(all: &[Stepped<Self>]) -> Result<()> {
        on_cuda!(adamw(all))
    }
}

impl Step for SgdStep {
    const NAMES: &'static [&'static str] = &["p", "buffer"];

    fn on_cpu(
        state: &mut [Tensor],
        rounded: Option<Rounded<'_>>,
        steps: &[(Self, Gradient<'_>)],
    ) -> Result<()> {
        let (p, buffer) = state.split_first_mut().expect("a parameter");
        let buffer = buffer.first_mut().map(Tensor::slice_mut).transpose()?;
        sgd(p.slice_mut()?, buffer, rounded, steps, &TorchPool)
    }

    fn on_device(all: &[Stepped<Self>]) -> Result<()> {
        on_cuda!(sgd(all))
    }
}

impl<S: Step> Stepped<S> {
    /// Checks the tensors, and makes the gradients contiguous.
    fn new(
        state: Vec<Tensor>,
        rounded: Option<Tensor>,
        gradients: Vec<Option<Tensor>>,
        steps: Vec<S>,
    ) -> Result<Self> {
        let mut named: Vec<_> = S::NAMES.iter().copied().zip(&state).collect();
        check_state(&named)?;
        if let Some(rounded) = &rounded {
            check_rounded(rounded, &named)?;
            named.push(("rounded", rounded));
        }
        let check = |gradient| check_gradient(gradient, &named);
        let gradients = gradients.into_iter().map(|gradient| gradient.map(check).transpose());
        let gradients = gradients.collect::<Result<_>>()?;
        Ok(Self { state, rounded, gradients, steps })
    }

    fn device(&self) -> Device {
        self.state[0].device()
    }
}

/// Applies one step for each gradient, in place. Rows of `steps` are [`AdamWStep`]s; a missing gradient means zeros.
pub(super) fn adamw_(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
    rounded: Option<Tensor>,
) -> Result<()> {
    let steps = read_steps(steps, gradients.len(), AdamWStep::from_array)?;
    take(vec![Stepped::new(vec![p, m, v], rounded, gradients, steps)?])
}

/// Applies one step to each parameter, in place; nothing changes if one of them cannot take its step.
pub(super) fn adamw_all_(
    p: Vec<Tensor>,
    m: Vec<Tensor>,
    v: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
    rounded: Vec<Tensor>,
    rounded_of: Vec<i64>,
) -> Result<()> {
    let count = p.len();
    let others = [("m", m.len()), ("v", v.len()), ("gradients", gradients.len())];
    check_counts(count, &others)?;
    let steps = read_steps(steps, count, AdamWStep::from_array)?;
    let state = p.into_iter().zip(m).zip(v).map(|((p, m), v)| vec![p, m, v]);
    take(check_all(state, one_of_each(count, rounded, &rounded_of)?, gradients, steps)?)
}

/// Applies steps of SGD like [`adamw_`]; there is no buffer if no step has momentum.
pub(super) fn sgd_(
    p: Tensor,
    buffer: Option<Tensor>,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
    rounded: Option<Tensor>,
) -> Result<()> {
    let steps = read_steps(steps, gradients.len(), SgdStep::from_array)?;
    if buffer.is_none() {
        check_no_momentum(&steps)?;
    }
    let state = [Some(p), buffer].into_iter().flatten().collect();
    take(vec![Stepped::new(state, rounded, gradients, steps)?])
}

/// Applies steps of SGD like [`adamw_all_`]; only parameters whose step has momentum have a buffer, in order.
pub(super) fn sgd_all_(
    p: Vec<Tensor>,
    buffers: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
    rounded: Vec<Tensor>,
    rounded_of: Vec<i64>,
) -> Result<()> {
    let count = p.len();
    check_counts(count, &[("gradients", gradients.len())])?;
    let steps = read_steps(steps, count, SgdStep::from_array)?;
    let has_momentum: Vec<_> = steps.iter().map(|step| step.momentum != 0.0).collect();
    let (expected, got) = (has_momentum.iter().filter(|has| **has).count(), buffers.len());
    ensure!(
        got == expected,
        "buffers: expected one for each of the {expected} parameters whose step has momentum, got {got}"
    );
    let mut buffers = buffers.into_iter();
    let state = p.into_iter().zip(has_momentum).map(|(p, has_momentum)| {
        let buffer = if has_momentum { buffers.next() } else { None };
        [Some(p), buffer].into_iter().flatten().collect()
    });
    take(check_all(state, one_of_each(count, rounded, &rounded_of)?, gradients, steps)?)
}

/// Checks each parameter with its single step; an error names the parameter.
fn check_all<S: Step>(
    state: impl Iterator<Item = Vec<Tensor>>,
    rounded: Vec<Option<Tensor>>,
    gradients: Vec<Option<Tensor>>,
    steps: Vec<S>,
) -> Result<Vec<Stepped<S>>> {
    let each = state.zip(rounded).zip(gradients).zip(steps).enumerate();
    each.map(|(index, (((state, rounded), gradient), step))| {
        Stepped::new(state, rounded, vec![gradient], vec![step])
            .map_err(|error| error.within(&format!("parameter {index}")))
    })
    .collect()
}

/// Returns for each parameter its weights of 16 bits, if it is their master.
fn one_of_each(count: usize, rounded: Vec<Tensor>, of: &[i64]) -> Result<Vec<Option<Tensor>>> {
    let mut found: Vec<Option<Tensor>> = Vec::new();
    found.resize_with(count, || None);
    check_counts(of.len(), &[("rounded", rounded.len())])?;
    for (weights, &index) in rounded.into_iter().zip(of) {
        let place = usize::try_from(index).ok().and_then(|index| found.get_mut(index));
        let Some(place) = place.filter(|place| place.is_none()) else {
            return Err(Error::invalid(format!(
                "rounded_of: expected the indices of different parameters, each below {count}, got {index}"
            )));
        };
        *place = Some(weights);
    }
    Ok(found)
}

fn check_counts(count: usize, others: &[(&str, usize)]) -> Result<()> {
    for (name, other) in others {
        ensure!(*other == count, "{name}: expected one for each of the {count} parameters, got {other}");
    }
    Ok(())
}

/// Takes all steps of checked parameters, device by device. The Python functions increment the versions.
fn take<S: Step>(mut rest: Vec<Stepped<S>>) -> Result<()> {
    while let Some(first) = rest.first() {
        let device = first.device();
        let (here, others) = rest.into_iter().partition(|each| each.device() == device);
        rest = others;
        if device == Device::Cpu {
            for Stepped { mut state, mut rounded, gradients, steps } in here {
                let rounded = rounded.as_mut().map(rounded_slice).transpose()?;
                S::on_cpu(&mut state, rounded, &pair(steps, &gradients)?)?;
            }
        } else {
            S::on_device(&here)?;
        }
    }
    Ok(())
}

/// Checks the parameter first, then that the other arrays match it.
fn check_state(state: &[(&str, &Tensor)]) -> Result<()> {
    let p = state[0].1;
    for (index, (name, tensor)) in state.iter().enumerate() {
        ensure!(
            tensor.dtype() == Dtype::Float32 && tensor.sizes() == p.sizes(),
            "{name}: expected float32 of shape {:?}, got {} of shape {:?}",
            p.sizes(),
            tensor.dtype(),
            tensor.sizes()
        );
        ensure!(tensor.is_contiguous(), "{name}: expected a contiguous tensor");
        tensor.check_memory()?;
        check_device(name, tensor, p)?;
        check_disjoint(name, tensor, &state[..index])?;
    }
    Ok(())
}

fn check_rounded(rounded: &Tensor, state: &[(&str, &Tensor)]) -> Result<()> {
    let (p, dtype, sizes) = (state[0].1, rounded.dtype(), rounded.sizes());
    ensure!(
        matches!(dtype, Dtype::Bfloat16 | Dtype::Float16) && sizes == p.sizes(),
        "rounded: expected bfloat16 or float16 of shape {:?}, got {dtype} of shape {sizes:?}",
        p.sizes()
    );
    ensure!(rounded.is_contiguous(), "rounded: expected a contiguous tensor");
    rounded.check_memory()?;
    check_device("rounded", rounded, p)?;
    check_disjoint("rounded", rounded, state)
}

fn check_gradient(gradient: Tensor, state: &[(&str, &Tensor)]) -> Result<Tensor> {
    let (p, dtype, sizes) = (state[0].1, gradient.dtype(), gradient.sizes());
    ensure!(
        matches!(dtype, Dtype::Float32 | Dtype::Bfloat16) && sizes == p.sizes(),
        "gradients: expected float32 or bfloat16 of shape {:?}, got {dtype} of shape {sizes:?}",
        p.sizes()
    );
    gradient.check_memory()?;
    check_device("gradients", &gradient, p)?;
    let gradient = gradient.contiguous()?;
    check_disjoint("gradients", &gradient, state)?;
    Ok(gradient)
}

/// Reads `count` rows of `steps`.
fn read_steps<S, const LEN: usize>(
    steps: Tensor,
    count: usize,
    from_array: impl Fn([f32; LEN]) -> Result<S>,
) -> Result<Vec<S>> {
    ensure!(
        steps.dtype() == Dtype::Float32 && steps.sizes() == [count as i64, LEN as i64],
        "steps: expected float32 of shape [{count}, {LEN}], a row for each gradient, got {} of shape {:?}",
        steps.dtype(),
        steps.sizes()
    );
    ensure!(
        steps.device() == Device::Cpu,
        "steps: expected a tensor on the CPU, got one on {}",
        steps.device()
    );
    let steps = steps.contiguous()?;
    steps.slice::<f32>()?.as_chunks::<LEN>().0.iter().map(|&numbers| from_array(numbers)).collect()
}

/// Returns the elements of a checked tensor on the CPU.
fn rounded_slice(rounded: &mut Tensor) -> Result<Rounded<'_>> {
    match rounded.dtype() {
        Dtype::Bfloat16 => rounded.slice_mut().map(Rounded::Bf16),
        _ => rounded.slice_mut().map(Rounded::F16),
    }
}

/// Pairs each step with its gradient on the CPU.
fn pair<S>(steps: Vec<S>, gradients: &[Option<Tensor>]) -> Result<Vec<(S, Gradient<'_>)>> {
    let gradients = gradients.iter().map(|gradient| match gradient {
        None => Ok(Gradient::Zero),
        Some(gradient) if gradient.dtype() == Dtype::Bfloat16 => gradient.slice().map(Gradient::Bf16),
        Some(gradient) => gradient.slice().map(Gradient::F32),
    });
    steps.into_iter().zip(gradients).map(|(step, gradient)| Ok((step, gradient?))).collect()
}
