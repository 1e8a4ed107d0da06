//! [`crate::reach`] for Python.

use crate::error::Error;
use crate::python::secret::Secret;
use crate::reach::{self, Answer};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(ask_all, module)?)?;
    module.add_class::<Door>()?;
    module.add_class::<Watch>()
}

/// A port that answers for one member.
#[pyclass(frozen, module = "evermoe._native")]
struct Door(reach::Door);

#[pymethods]
impl Door {
    #[new]
    #[pyo3(signature = (member, address=None, secret=None))]
    fn new(py: Python<'_>, member: &str, address: Option<&str>, secret: Option<&Secret>) -> PyResult<Self> {
        let wrong =
            |error| Error::invalid(format!("Door: expected a numeric address, got {address:?}: {error}"));
        let address = address.map(str::parse::<IpAddr>).transpose().map_err(wrong)?;
        let secret = secret.map(Secret::get);
        Ok(Self(py.detach(|| reach::Door::open(member, address, secret))?))
    }

    #[getter]
    fn port(&self) -> u16 {
        self.0.port()
    }

    fn set_computes(&self, group: u64) {
        self.0.set_computes(group);
    }

    fn set_gave_up(&self, group: u64) {
        self.0.set_gave_up(group);
    }
}

/// What a door says: the groups for which the member computes, and in which it has waited in vain.
type Said = (u64, u64);

#[pyfunction]
#[pyo3(signature = (members, milliseconds, secret=None))]
fn ask_all(
    py: Python<'_>,
    members: Vec<(String, String)>,
    milliseconds: u64,
    secret: Option<&Secret>,
) -> (Vec<Option<Said>>, Vec<String>) {
    let secret = secret.map(Secret::get);
    let answers = py.detach(|| reach::ask_all(&members, Duration::from_millis(milliseconds), secret));
    let (mut said, mut ended) = (Vec::new(), Vec::new());
    for (answer, (member, _)) in answers.into_iter().zip(members) {
        said.push(match answer {
            Answer::Said(said) => Some((said.computes, said.gave_up)),
            Answer::Ended | Answer::Nothing => None,
        });
        ended.extend((answer == Answer::Ended).then_some(member));
    }
    (said, ended)
}

/// Threads that ask members until one falls silent.
#[pyclass(frozen, module = "evermoe._native")]
struct Watch(reach::Watch);

#[pymethods]
impl Watch {
    #[new]
    #[pyo3(signature = (members, group, milliseconds, secret=None))]
    fn new(members: Vec<(String, String)>, group: u64, milliseconds: u64, secret: Option<&Secret>) -> Self {
        let limit = Duration::from_millis(milliseconds);
        Self(reach::Watch::start(members, group, limit, secret.map(Secret::get)))
    }

    fn wait(&self, py: Python<'_>) -> (Vec<String>, bool, Option<String>) {
        let seen = py.detach(|| self.0.wait());
        (seen.silent, seen.has_ended, seen.gave_up)
    }

    fn stop(&self) {
        self.0.stop();
    }
}
