//! [`crate::reach`] for Python.

use crate::error::Error;
use crate::python::secret::Secret;
use crate::reach;
use pyo3::prelude::*;
use std::net::IpAddr;
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
    #[pyo3(signature = (member, address=None, secret=None))]
    fn new(member: &str, address: Option<&str>, secret: Option<&Secret>) -> PyResult<Self> {
        let wrong =
            |error| Error::Invalid(format!("Door: expected a numeric address, got {address:?}: {error}"));
        let address = address.map(str::parse::<IpAddr>).transpose().map_err(wrong)?;
        Ok(Self(reach::Door::open(member, address, secret.map(Secret::get))?))
    }

    #[getter]
    fn port(&self) -> u16 {
        self.0.port()
    }
}

#[pyfunction]
#[pyo3(signature = (members, milliseconds, secret=None))]
fn reachable(
    py: Python<'_>,
    members: Vec<(String, String)>,
    milliseconds: u64,
    secret: Option<&Secret>,
) -> Vec<bool> {
    let secret = secret.map(Secret::get);
    py.detach(|| reach::reachable(&members, Duration::from_millis(milliseconds), secret))
}
