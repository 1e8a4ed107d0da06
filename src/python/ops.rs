//! Python bindings of the torch ops, and of the numbers of an optimizer's step.

use crate::cpu::{AdamWOptions, AdamWStep, Arithmetic, SgdOptions, SgdStep};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// Registers the ops of `torch.ops.evermoe`; torch must have been imported. Calls after the first change nothing.
#[pyfunction]
fn register_ops() -> PyResult<()> {
    crate::torch::register_ops().map_err(|error| PyImportError::new_err(error.to_string()))
}

/// Returns whether this build contains compiled CUDA kernels.
#[pyfunction]
fn has_cuda_kernels() -> bool {
    #[cfg(feature = "cuda")]
    return crate::cuda::has_kernels();
    #[cfg(not(feature = "cuda"))]
    return false;
}

/// Sets the maximum bytes of idle buffers that are kept for results on the CPU; none for the peak of the bytes in use.
#[pyfunction]
fn set_cpu_cache_limit(limit: Option<usize>) {
    crate::torch::set_cpu_cache_limit(limit);
}

/// Returns the bytes of idle buffers for results on the CPU.
#[pyfunction]
fn cpu_cache_bytes() -> usize {
    crate::torch::cpu_cache_bytes()
}

/// Returns the numbers of one step of AdamW, in the order of `AdamWStep`'s fields; each is a float32.
#[pyfunction]
#[pyo3(signature = (*, t, lr, betas, eps, weight_decay, maximize, loss_scale, clip, arithmetic, powers))]
#[allow(clippy::too_many_arguments)]
fn adamw_step(
    t: i64,
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    maximize: bool,
    loss_scale: f64,
    clip: f64,
    arithmetic: &str,
    powers: Option<[f32; 2]>,
) -> PyResult<[f32; AdamWStep::LEN]> {
    let options = AdamWOptions { lr, betas, eps, weight_decay, maximize };
    let arithmetic = Arithmetic::named(arithmetic, &Arithmetic::ALL)?;
    Ok(AdamWStep::with_arithmetic(arithmetic, &options, t, powers, loss_scale, clip)?.to_array())
}

/// Returns the numbers of one step of SGD, in the order of `SgdStep`'s fields; each is a float32.
#[pyfunction]
#[pyo3(signature = (*, is_first, lr, momentum, dampening, weight_decay, nesterov, maximize, loss_scale, clip, arithmetic))]
#[allow(clippy::too_many_arguments)]
fn sgd_step(
    is_first: bool,
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
    loss_scale: f64,
    clip: f64,
    arithmetic: &str,
) -> PyResult<[f32; SgdStep::LEN]> {
    let options = SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize };
    let arithmetic = Arithmetic::named(arithmetic, &SgdStep::ARITHMETICS)?;
    Ok(SgdStep::new(arithmetic, &options, is_first, loss_scale, clip)?.to_array())
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(register_ops, module)?)?;
    module.add_function(wrap_pyfunction!(adamw_step, module)?)?;
    module.add_function(wrap_pyfunction!(set_cpu_cache_limit, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_cache_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(sgd_step, module)?)?;
    module.add_function(wrap_pyfunction!(has_cuda_kernels, module)?)
}
