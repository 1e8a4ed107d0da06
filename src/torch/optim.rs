//! The optimizers' ops: checks, and the call to the CPU's or the GPU's arithmetic.

use super::checks::{check_device, check_disjoint, on_cuda};
use super::library::TorchPool;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu::{AdamWStep, Gradient, SgdStep, adamw, check_no_momentum, sgd};
use crate::ensure;
use crate::error::Result;

/// Applies one step for each gradient, in place. Rows of `steps` are [`AdamWStep`]s; no gradient stands for zeros.
pub(super) fn adamw_(
    mut p: Tensor,
    mut m: Tensor,
    mut v: Tensor,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
) -> Result<()> {
    let state = [("p", &p), ("m", &m), ("v", &v)];
    check_state(&state)?;
    let gradients = check_gradients(gradients, &state)?;
    let steps = read_steps(steps, gradients.len(), AdamWStep::from_array)?;
    for (_, tensor) in state {
        tensor.bump_version()?;
    }
    if p.device() != Device::Cpu {
        return on_cuda!(adamw([&p, &m, &v], &gradients, &steps));
    }
    let steps = pair(steps, &gradients)?;
    adamw(p.slice_mut()?, m.slice_mut()?, v.slice_mut()?, &steps, &TorchPool);
    Ok(())
}

/// Applies steps of SGD like [`adamw_`]; no buffer where no step has momentum.
pub(super) fn sgd_(
    mut p: Tensor,
    mut buffer: Option<Tensor>,
    gradients: Vec<Option<Tensor>>,
    steps: Tensor,
) -> Result<()> {
    let state: Vec<_> =
        [("p", &p)].into_iter().chain(buffer.as_ref().map(|buffer| ("buffer", buffer))).collect();
    check_state(&state)?;
    let gradients = check_gradients(gradients, &state)?;
    let steps = read_steps(steps, gradients.len(), SgdStep::from_array)?;
    if buffer.is_none() {
        check_no_momentum(&steps)?;
    }
    for (_, tensor) in state {
        tensor.bump_version()?;
    }
    if p.device() != Device::Cpu {
        return on_cuda!(sgd(&p, buffer.as_ref(), &gradients, &steps));
    }
    let steps = pair(steps, &gradients)?;
    let buffer = buffer.as_mut().map(Tensor::slice_mut).transpose()?;
    sgd(p.slice_mut()?, buffer, &steps, &TorchPool)
}

/// The parameters first, which the others are like.
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
        check_device(name, tensor, p)?;
        check_disjoint(name, tensor, &state[..index])?;
    }
    Ok(())
}

/// The gradients, made contiguous.
fn check_gradients(gradients: Vec<Option<Tensor>>, state: &[(&str, &Tensor)]) -> Result<Vec<Option<Tensor>>> {
    gradients
        .into_iter()
        .map(|gradient| gradient.map(|gradient| check_gradient(gradient, state)).transpose())
        .collect()
}

fn check_gradient(gradient: Tensor, state: &[(&str, &Tensor)]) -> Result<Tensor> {
    let (p, dtype, sizes) = (state[0].1, gradient.dtype(), gradient.sizes());
    ensure!(
        matches!(dtype, Dtype::Float32 | Dtype::Bfloat16) && sizes == p.sizes(),
        "gradients: expected float32 or bfloat16 of shape {:?}, got {dtype} of shape {sizes:?}",
        p.sizes()
    );
    check_device("gradients", &gradient, p)?;
    let gradient = gradient.contiguous()?;
    check_disjoint("gradients", &gradient, state)?;
    Ok(gradient)
}

/// The rows of `steps`, `count` of them.
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

/// Each step with its gradient on the CPU.
fn pair<S>(steps: Vec<S>, gradients: &[Option<Tensor>]) -> Result<Vec<(S, Gradient<'_>)>> {
    let gradients = gradients.iter().map(|gradient| match gradient {
        None => Ok(Gradient::Zero),
        Some(gradient) if gradient.dtype() == Dtype::Bfloat16 => gradient.slice().map(Gradient::Bf16),
        Some(gradient) => gradient.slice().map(Gradient::F32),
    });
    steps.into_iter().zip(gradients).map(|(step, gradient)| Ok((step, gradient?))).collect()
}
