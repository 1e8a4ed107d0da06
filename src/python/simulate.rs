//! [`crate::simulate`] for Python. Scenarios and outcomes travel as JSON.

use crate::error::{Error, Result};
use crate::simulate as simulation;
use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(simulate, module)?)?;
    module.add_function(wrap_pyfunction!(read_bamboo, module)?)?;
    module.add_function(wrap_pyfunction!(read_skypilot, module)?)
}

/// Progress is told as a part, 0 to 1; what the function raises ends the simulation.
#[pyfunction]
#[pyo3(signature = (scenario, scheme, seed, progress=None))]
fn simulate(
    py: Python<'_>,
    scenario: &str,
    scheme: &str,
    seed: u64,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (scenario, scheme) = (read("scenario", scenario)?, read("scheme", scheme)?);
    let mut raised = None;
    let mut tell = |part: f64| -> Result<()> {
        let told = Python::attach(|py| {
            py.check_signals()?;
            progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (part,)).map(|_| ()))
        });
        told.map_err(|error| {
            raised = Some(error);
            Error::cancelled("the simulation", "its progress function raised")
        })
    };
    let outcome =
        py.detach(|| simulation::simulate(&scenario, &scheme, seed, &simulation::Product, &mut tell));
    match raised {
        Some(error) => Err(error),
        None => to_json(&outcome?),
    }
}

/// The source as JSON.
#[pyfunction]
fn read_bamboo(text: &str) -> PyResult<String> {
    to_json(&simulation::read_bamboo(text)?)
}

/// The source as JSON; a text for each node.
#[pyfunction]
fn read_skypilot(texts: Vec<String>) -> PyResult<String> {
    to_json(&simulation::read_skypilot(&texts)?)
}

fn read<T: DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::invalid(format!("{what}: {error}")))
}

fn to_json<T: Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| Error::Internal(format!("simulate: {error}")).into())
}
