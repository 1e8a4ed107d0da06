//! Python face of the torch ops.

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// Registers the ops of `torch.ops.evermoe`; `import torch` comes first. Calls after the first change nothing.
#[pyfunction]
fn register_ops() -> PyResult<()> {
    crate::torch::register_ops().map_err(|error| PyImportError::new_err(error.to_string()))
}

/// Whether this build holds compiled CUDA kernels.
#[pyfunction]
fn has_cuda_kernels() -> bool {
    #[cfg(feature = "cuda")]
    return crate::cuda::has_kernels();
    #[cfg(not(feature = "cuda"))]
    return false;
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(register_ops, module)?)?;
    module.add_function(wrap_pyfunction!(has_cuda_kernels, module)?)
}
