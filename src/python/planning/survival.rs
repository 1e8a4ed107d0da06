//! [`crate::placement`] for Python: what survives.

use super::numbers;
use crate::placement;
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(recovery_probability, module)?)?;
    module.add_function(wrap_pyfunction!(copy_recovery_probability, module)?)
}

/// Probability, error, samples.
type Survival = (f64, f64, Option<u64>);

fn to_tuple(found: placement::Survival) -> Survival {
    (found.probability, found.error, found.samples)
}

#[pyfunction]
fn recovery_probability(
    py: Python<'_>,
    matrix: PyReadonlyArray2<'_, i64>,
    failures: usize,
    domains: Option<Vec<Vec<usize>>>,
    samples: Option<u64>,
    seed: u64,
) -> PyResult<Survival> {
    let [nodes, experts] = [matrix.shape()[0], matrix.shape()[1]];
    let matrix = numbers(&matrix);
    let find = || {
        placement::recovery_probability(&matrix, nodes, experts, failures, domains.as_deref(), samples, seed)
    };
    Ok(to_tuple(py.detach(find)?))
}

#[pyfunction]
fn copy_recovery_probability(
    py: Python<'_>,
    holders: Vec<Vec<usize>>,
    failures: usize,
    nodes: Option<Vec<String>>,
    samples: Option<u64>,
    seed: u64,
) -> PyResult<Survival> {
    let find = || placement::copy_recovery_probability(&holders, failures, nodes.as_deref(), samples, seed);
    Ok(to_tuple(py.detach(find)?))
}
