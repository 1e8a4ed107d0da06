//! [`crate::reach`] for Python.

use crate::reach;
use pyo3::prelude::*;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(reachable, module)?)?;
    module.add_class::<Door>()?;
    module.add_class::<Watch>()
}

/// A port that answers for one member.
#[pyclass(frozen, module = "evermoe._native")]
struct Door(reach::Door);

#[pymethods]
impl Door {
    #[new]
    fn new(member: &str) -> PyResult<Self> {
        Ok(Self(reach::Door::open(member)?))
    }

    #[getter]
    fn port(&self) -> u16 {
        self.0.port()
    }
}

#[pyfunction]
fn reachable(py: Python<'_>, members: Vec<(String, String)>, milliseconds: u64) -> Vec<bool> {
    py.detach(|| reach::reachable(&members, Duration::from_millis(milliseconds)))
}

/// Threads that ask members until one falls silent.
#[pyclass(frozen, module = "evermoe._native")]
struct Watch(reach::Watch);

#[pymethods]
impl Watch {
    #[new]
    fn new(members: Vec<(String, String)>, milliseconds: u64) -> Self {
        Self(reach::Watch::start(members, Duration::from_millis(milliseconds)))
    }

    fn wait(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.0.wait())
    }

    fn stop(&self) {
        self.0.stop();
    }
}
