//! [`crate::protocol`] for Python. Events and commands travel as JSON, so that what is recorded is what was done.

use crate::error::Error;
use crate::protocol::{self, Event, Settings};
use crate::python::secret::Secret;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version_of, module)?)?;
    module.add_function(wrap_pyfunction!(step_of, module)?)?;
    module.add_function(wrap_pyfunction!(generation_of, module)?)?;
    module.add_function(wrap_pyfunction!(tell, module)?)?;
    module.add_function(wrap_pyfunction!(promote, module)?)?;
    module.add_function(wrap_pyfunction!(tell_ended, module)?)?;
    module.add_function(wrap_pyfunction!(hear, module)?)?;
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
fn tell(id: &str, job: &str, message: &str, secret: Option<&Secret>) -> PyResult<String> {
    let wrong = |why: String| Error::invalid(format!("what this member tells others: {why}"));
    Ok(protocol::tell(id, job, &read(message)?, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, job, generation=None, secret=None))]
fn promote(id: &str, job: &str, generation: Option<u64>, secret: Option<&Secret>) -> PyResult<String> {
    let wrong = |why: String| Error::Internal(format!("what an operator tells members: {why}"));
    Ok(protocol::promote(id, job, generation, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, job, member, secret=None))]
fn tell_ended(id: &str, job: &str, member: &str, secret: Option<&Secret>) -> PyResult<String> {
    let wrong = |why: String| Error::Internal(format!("what this member tells of another: {why}"));
    Ok(protocol::tell_ended(id, job, member, secret.map(Secret::get)).map_err(wrong)?)
}

#[pyfunction]
#[pyo3(signature = (id, text, secret=None))]
fn hear(id: &str, text: &str, secret: Option<&Secret>) -> PyResult<String> {
    let heard = protocol::hear(id, text, secret.map(Secret::get));
    serde_json::to_string(&heard).map_err(|error| Error::Internal(format!("protocol: {error}")).into())
}

/// The state machine of one member.
#[pyclass(frozen, module = "evermoe._native")]
struct Protocol(Mutex<protocol::Protocol>);

impl Protocol {
    /// A panic in another thread leaves the machine as the last event did.
    fn lock(&self) -> MutexGuard<'_, protocol::Protocol> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read<'a, T: serde::Deserialize<'a>>(text: &'a str) -> PyResult<T> {
    Ok(serde_json::from_str(text).map_err(|error| Error::invalid(format!("protocol: {error} in {text}")))?)
}

#[pymethods]
impl Protocol {
    #[new]
    fn new(settings: &str) -> PyResult<Self> {
        Ok(Self(Mutex::new(protocol::Protocol::new(read::<Settings>(settings)?))))
    }

    fn handle(&self, event: &str) -> PyResult<String> {
        let commands = self.lock().handle(read::<Event>(event)?)?;
        serde_json::to_string(&commands).map_err(|error| Error::Internal(format!("protocol: {error}")).into())
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
