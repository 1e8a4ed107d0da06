//! Python bindings of [`crate::placement`]: the holders of copies.

use crate::placement;
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(copy_holders, module)?)?;
    module.add_function(wrap_pyfunction!(training_copy_holders, module)?)?;
    module.add_function(wrap_pyfunction!(primaries, module)?)?;
    module.add_function(wrap_pyfunction!(unit_copy_holders, module)?)
}

#[pyfunction]
fn copy_holders(nodes: Vec<String>, copies: usize, policy: &str) -> PyResult<Vec<Vec<usize>>> {
    Ok(placement::copy_holders(&nodes, copies, policy.parse()?)?)
}

/// The holders of each rank's parameters, and of its optimizer state.
type Holders = Vec<Vec<usize>>;

#[pyfunction]
fn training_copy_holders(
    py: Python<'_>,
    nodes: Vec<String>,
    data_parallel: Vec<usize>,
    pipeline: Vec<usize>,
    copies: usize,
    zero_stage: usize,
) -> PyResult<(Holders, Holders)> {
    let find = || placement::training_copy_holders(&nodes, &data_parallel, &pipeline, copies, zero_stage);
    let found = py.detach(find)?;
    Ok((found.parameters, found.optimizer))
}

#[pyfunction]
fn primaries(holders: Vec<Vec<usize>>, nbytes: Vec<u64>, ranks: usize) -> PyResult<Vec<usize>> {
    Ok(placement::primaries(&holders, &nbytes, ranks)?)
}

#[pyfunction]
fn unit_copy_holders(
    primaries: Vec<usize>,
    active: Vec<Vec<usize>>,
    nodes: Vec<String>,
    copies: usize,
) -> PyResult<Vec<Vec<usize>>> {
    Ok(placement::unit_copy_holders(&primaries, &active, &nodes, copies)?)
}
