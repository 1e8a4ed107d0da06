//! The op `adamw_`: checks, and the call to the CPU's or the GPU's arithmetic.

use super::library::TorchPool;
use super::ops::{check_device, check_disjoint, on_cuda};
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu::{AdamWStep, Gradient, adamw};
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
    check_state([("p", &p), ("m", &m), ("v", &v)])?;
    let gradients = gradients
        .into_iter()
        .map(|gradient| gradient.map(|gradient| check_gradient(gradient, [&p, &m, &v])).transpose())
        .collect::<Result<Vec<_>>>()?;
    let steps = read_steps(steps, gradients.len())?;
    for tensor in [&p, &m, &v] {
        tensor.bump_version()?;
    }
    if p.device() != Device::Cpu {
        return on_cuda!(adamw([&p, &m, &v], &gradients, &steps));
    }
    let gradients = gradients.iter().map(|gradient| match gradient {
        None => Ok(Gradient::Zero),
        Some(gradient) if gradient.dtype() == Dtype::Bfloat16 => gradient.slice().map(Gradient::Bf16),
        Some(gradient) => gradient.slice().map(Gradient::F32),
    });
    let steps = steps.into_iter().zip(gradients).map(|(step, gradient)| Ok((step, gradient?)));
    let steps = steps.collect::<Result<Vec<_>>>()?;
    adamw(p.slice_mut()?, m.slice_mut()?, v.slice_mut()?, &steps, &TorchPool);
    Ok(())
}

fn check_state(state: [(&str, &Tensor); 3]) -> Result<()> {
    let p = state[0].1;
    for (index, (name, tensor)) in state.into_iter().enumerate() {
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

/// The gradient, made contiguous.
fn check_gradient(gradient: Tensor, [p, m, v]: [&Tensor; 3]) -> Result<Tensor> {
    let (dtype, sizes) = (gradient.dtype(), gradient.sizes());
    ensure!(
        matches!(dtype, Dtype::Float32 | Dtype::Bfloat16) && sizes == p.sizes(),
        "gradients: expected float32 or bfloat16 of shape {:?}, got {dtype} of shape {sizes:?}",
        p.sizes()
    );
    check_device("gradients", &gradient, p)?;
    let gradient = gradient.contiguous()?;
    check_disjoint("gradients", &gradient, &[("p", p), ("m", m), ("v", v)])?;
    Ok(gradient)
}

fn read_steps(steps: Tensor, count: usize) -> Result<Vec<AdamWStep>> {
    ensure!(
        steps.dtype() == Dtype::Float32 && steps.sizes() == [count as i64, AdamWStep::LEN as i64],
        "steps: expected float32 of shape [{count}, {}], a row for each gradient, got {} of shape {:?}",
        AdamWStep::LEN,
        steps.dtype(),
        steps.sizes()
    );
    ensure!(
        steps.device() == Device::Cpu,
        "steps: expected a tensor on the CPU, got one on {}",
        steps.device()
    );
    let steps = steps.contiguous()?;
    let rows = steps.slice::<f32>()?.as_chunks::<{ AdamWStep::LEN }>().0;
    Ok(rows.iter().map(|&numbers| AdamWStep::from_array(numbers)).collect())
}
