//! Python bindings of [`crate::placement`]: replicas and their nodes.

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::placement::{self, Policy, Request};
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// Construction, failures, survival, spread, imbalance, the least imbalance, moved, and a summary.
type Reason = (String, usize, f64, usize, f64, f64, Option<usize>, String);

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(allocate, module)?)?;
    module.add_function(wrap_pyfunction!(place, module)?)?;
    module.add_function(wrap_pyfunction!(session_slots, module)?)?;
    module.add_function(wrap_pyfunction!(is_worth_moving, module)?)
}

#[pyfunction]
fn session_slots(
    experts: usize,
    domain_sizes: Vec<usize>,
    slots: Option<usize>,
    replicas: usize,
) -> PyResult<usize> {
    Ok(placement::session_slots(experts, &domain_sizes, slots, replicas)?)
}

#[pyfunction]
fn is_worth_moving(now: f64, then: f64) -> bool {
    placement::is_worth_moving(now, then)
}

#[pyfunction]
#[pyo3(signature = (load, nodes, slots, min_replicas, previous = None))]
fn allocate<'py>(
    py: Python<'py>,
    load: PyReadonlyArray1<'py, f64>,
    nodes: usize,
    slots: usize,
    min_replicas: usize,
    previous: Option<PyReadonlyArray1<'py, i64>>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let load: Vec<f64> = load.as_array().iter().copied().collect();
    let previous: Option<Vec<i64>> = previous.map(|counts| counts.as_array().iter().copied().collect());
    let replicas = py.detach(|| match &previous {
        Some(previous) => placement::reallocate(&load, nodes, slots, min_replicas, previous),
        None => placement::allocate(&load, nodes, slots, min_replicas),
    })?;
    Ok(PyArray1::from_vec(py, replicas))
}

#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one for each argument of the Python function")]
#[pyo3(signature = (replicas, nodes, slots, policy, load, previous, domains, failures))]
fn place<'py>(
    py: Python<'py>,
    replicas: PyReadonlyArray1<'py, i64>,
    nodes: usize,
    slots: usize,
    policy: &str,
    load: Option<PyReadonlyArray1<'py, f64>>,
    previous: Option<PyReadonlyArray2<'py, i64>>,
    domains: Option<Vec<Vec<usize>>>,
    failures: Option<usize>,
) -> PyResult<(Matrix<'py>, Reason)> {
    let policy: Policy = policy.parse()?;
    let replicas: Vec<i64> = replicas.as_array().iter().copied().collect();
    let experts = replicas.len();
    if let Some(shape) =
        previous.as_ref().map(|previous| previous.shape()).filter(|shape| *shape != [nodes, experts])
    {
        return Err(shape_error(format!(
            "previous: expected shape [{nodes}, {experts}] (nodes, experts), got {shape:?}"
        )));
    }
    let load: Option<Vec<f64>> = load.map(|load| load.as_array().iter().copied().collect());
    let previous = previous.as_ref().map(numbers);
    let request = Request {
        replicas: &replicas,
        nodes,
        slots,
        policy,
        load: load.as_deref(),
        previous: previous.as_deref(),
        domains: domains.as_deref(),
        failures,
    };
    let placement = py.detach(|| placement::place(&request))?;
    let reason = placement.reason;
    let words = reason.to_string();
    let placement::Reason { construction, failures, survival, spread, imbalance, least_imbalance, moved } =
        reason;
    let reason =
        (construction.to_string(), failures, survival, spread, imbalance, least_imbalance, moved, words);
    Ok((to_matrix(py, placement.matrix, [nodes, experts])?, reason))
}
