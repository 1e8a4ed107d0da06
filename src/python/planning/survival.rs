//! Python bindings of [`crate::placement`]: survival.

use super::numbers;
use crate::error::{Error, Result};
use crate::placement::{self, Draws};
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(recovery_probability, module)?)?;
    module.add_function(wrap_pyfunction!(copy_recovery_probability, module)?)
}

/// Probability, error, samples.
type Survival = (f64, f64, Option<u64>);

fn to_tuple(found: placement::Survival) -> Survival {
    (found.probability, found.error, found.samples)
}

/// Calls a planner without the GIL; a signal (such as Ctrl-C) ends its draws.
fn interruptible(
    py: Python<'_>,
    samples: Option<u64>,
    seed: u64,
    find: impl Send + FnOnce(Draws<'_>) -> Result<placement::Survival>,
) -> PyResult<Survival> {
    let raised = Mutex::new(None);
    let proceed = || {
        Python::attach(|py| py.check_signals()).map_err(|error| {
            *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::cancelled("the draws", "a signal came")
        })
    };
    let found = py.detach(|| find(Draws { samples, seed, proceed: &proceed }));
    match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(to_tuple(found?)),
    }
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
    let shape = [matrix.shape()[0], matrix.shape()[1]];
    let matrix = numbers(&matrix);
    interruptible(py, samples, seed, |draws| {
        placement::recovery_until(&matrix, shape, failures, domains.as_deref(), draws)
    })
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
    interruptible(py, samples, seed, |draws| {
        placement::copy_recovery_until(&holders, failures, nodes.as_deref(), draws)
    })
}
