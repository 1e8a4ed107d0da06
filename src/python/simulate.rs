//! Python bindings of [`crate::simulate`]. Scenarios and outcomes are passed as JSON.

use crate::error::{Error, Result};
use crate::simulate as simulation;
use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(simulate, module)?)?;
    module.add_function(wrap_pyfunction!(forecast, module)?)?;
    module.add_function(wrap_pyfunction!(read_bamboo, module)?)?;
    module.add_function(wrap_pyfunction!(read_skypilot, module)?)
}

/// `progress` is called with a share, 0 to 1; an exception that it raises ends the simulation.
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
    let mut report = |part: f64| -> Result<()> {
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
        py.detach(|| simulation::simulate(&scenario, &scheme, seed, &simulation::Product, &mut report));
    match raised {
        Some(error) => Err(error),
        None => to_json(&outcome?),
    }
}

/// Returns the forecast as JSON.
#[pyfunction]
fn forecast(py: Python<'_>, scenario: &str, preset: &str) -> PyResult<String> {
    let (scenario, preset) = (read("scenario", scenario)?, preset.parse()?);
    to_json(&py.detach(|| simulation::forecast(&scenario, preset))?)
}

/// Returns the source as JSON.
#[pyfunction]
fn read_bamboo(text: &str) -> PyResult<String> {
    to_json(&simulation::read_bamboo(text)?)
}

/// Returns the source as JSON; there is one text per node.
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
