//! [`crate::reach`] for Python.

use crate::reach;
use pyo3::prelude::*;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(reachable, module)?)?;
    module.add_class::<Door>()
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
