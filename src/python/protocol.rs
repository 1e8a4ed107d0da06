//! Python bindings of [`crate::protocol`]. Events and commands are passed as dictionaries of their fields, as in the JSON
//! of recordings, which contain exactly what was executed. Messages between members are text.

use crate::error::Error;
use crate::protocol;
use crate::python::secret::Secret;
use pyo3::prelude::*;
use pythonize::{depythonize, pythonize};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version_of, module)?)?;
    module.add_function(wrap_pyfunction!(step_of, module)?)?;
    module.add_function(wrap_pyfunction!(generation_of, module)?)?;
    module.add_function(wrap_pyfunction!(encode_message, module)?)?;
    module.add_function(wrap_pyfunction!(encode_promotion, module)?)?;
    module.add_function(wrap_pyfunction!(encode_ended, module)?)?;
    module.add_function(wrap_pyfunction!(encode_lift, module)?)?;
    module.add_function(wrap_pyfunction!(decode_message, module)?)?;
    module.add("PROTOCOL", protocol::PROTOCOL)?;
    module.add_class::<Protocol>()
}

#[pyfunction]
fn version_of(generation: u64, step: u64) -> u64 {
    protocol::version_of(generation, step)
}

#[pyfunction]
fn step_of(version: u64) -> u64 {
    protocol::step_of(version)
}

#[pyfunction]
fn generation_of(version: u64) -> u64 {
    protocol::generation_of(version)
}

#[pyfunction]
#[pyo3(signature = (id, job, message, secret=None))]
fn encode_message(
    id: &str,
    job: &str,
    message: &Bound<'_, PyAny>,
    secret: Option<&Secret>,
) -> PyResult<String> {
    let wrong = |why: String| Error::invalid(format!("this member's message: {why}"));
    Ok(protocol::encode_message(id, job, &read(message)?, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, job, generation=None, secret=None))]
fn encode_promotion(
    id: &str,
    job: &str,
    generation: Option<u64>,
    secret: Option<&Secret>,
) -> PyResult<String> {
    let wrong = |why: String| Error::Internal(format!("the operator's message: {why}"));
    Ok(protocol::encode_promotion(id, job, generation, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, job, member, secret=None))]
fn encode_ended(id: &str, job: &str, member: &str, secret: Option<&Secret>) -> PyResult<String> {
    let wrong = |why: String| Error::Internal(format!("the message about a member's end: {why}"));
    Ok(protocol::encode_ended(id, job, member, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, job, name, secret=None))]
fn encode_lift(id: &str, job: &str, name: &str, secret: Option<&Secret>) -> PyResult<String> {
    let wrong = |why: String| Error::Internal(format!("the operator's message: {why}"));
    Ok(protocol::encode_lift(id, job, name, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, text, secret=None))]
fn decode_message(id: &str, text: &str, secret: Option<&Secret>) -> PyResult<String> {
    let decoded = protocol::decode_message(id, text, secret.map(Secret::get));
    serde_json::to_string(&decoded).map_err(|error| Error::Internal(format!("protocol: {error}")).into())
}

/// See [`protocol::Protocol`].
#[pyclass(frozen, module = "evermoe._native")]
struct Protocol(Mutex<protocol::Protocol>);

impl Protocol {
    /// Ignores poisoning: a panic in another thread leaves the state of the last event.
    fn lock(&self) -> MutexGuard<'_, protocol::Protocol> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read<'a, T: serde::Deserialize<'a>>(value: &'a Bound<'_, PyAny>) -> PyResult<T> {
    Ok(depythonize(value).map_err(|error| Error::invalid(format!("protocol: {error} in {value}")))?)
}

#[pymethods]
impl Protocol {
    #[new]
    fn new(settings: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(Mutex::new(protocol::Protocol::new(read(settings)?))))
    }

    fn handle<'py>(&self, event: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let read_event = read(event)?; // which may run Python code: not while the machine is locked
        let commands = self.lock().handle(read_event)?;
        Ok(pythonize(event.py(), &commands)?)
    }

    #[getter]
    fn version(&self) -> u64 {
        self.lock().version()
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.lock().generation()
    }

    #[getter]
    fn is_established(&self) -> bool {
        self.lock().is_established()
    }

    #[getter]
    fn is_ready(&self) -> bool {
        self.lock().is_ready()
    }

    #[getter]
    fn is_over(&self) -> bool {
        self.lock().is_over()
    }
}
