//! Python bindings of [`crate::reachability`].

use crate::error::Error;
use crate::python::secret::Secret;
use crate::reachability::{self, Answer};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(probe_all, module)?)?;
    module.add_class::<ProbeServer>()?;
    module.add_class::<FailureDetector>()
}

/// See [`reachability::ProbeServer`].
#[pyclass(frozen, module = "evermoe._native")]
struct ProbeServer(reachability::ProbeServer);

#[pymethods]
impl ProbeServer {
    #[new]
    #[pyo3(signature = (member, address=None, secret=None))]
    fn new(py: Python<'_>, member: &str, address: Option<&str>, secret: Option<&Secret>) -> PyResult<Self> {
        let wrong = |error| {
            Error::invalid(format!("ProbeServer: expected a numeric address, got {address:?}: {error}"))
        };
        let address = address.map(str::parse::<IpAddr>).transpose().map_err(wrong)?;
        let secret = secret.map(Secret::get);
        Ok(Self(py.detach(|| reachability::ProbeServer::open(member, address, secret))?))
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

/// Group for whose next step the member computes, and group in which its wait timed out; 0 for none.
type Report = (u64, u64);

#[pyfunction]
#[pyo3(signature = (members, milliseconds, secret=None))]
fn probe_all(
    py: Python<'_>,
    members: Vec<(String, String)>,
    milliseconds: u64,
    secret: Option<&Secret>,
) -> (Vec<Option<Report>>, Vec<String>) {
    let secret = secret.map(Secret::get);
    let answers =
        py.detach(|| reachability::probe_all(&members, Duration::from_millis(milliseconds), secret));
    let (mut reports, mut ended) = (Vec::new(), Vec::new());
    for (answer, (member, _)) in answers.into_iter().zip(members) {
        reports.push(match answer {
            Answer::Report(report) => Some((report.computes, report.gave_up)),
            Answer::Ended | Answer::Nothing => None,
        });
        ended.extend((answer == Answer::Ended).then_some(member));
    }
    (reports, ended)
}

/// See [`reachability::FailureDetector`].
#[pyclass(frozen, module = "evermoe._native")]
struct FailureDetector(reachability::FailureDetector);

#[pymethods]
impl FailureDetector {
    #[new]
    #[pyo3(signature = (members, group, milliseconds, secret=None))]
    fn new(members: Vec<(String, String)>, group: u64, milliseconds: u64, secret: Option<&Secret>) -> Self {
        let limit = Duration::from_millis(milliseconds);
        Self(reachability::FailureDetector::start(members, group, limit, secret.map(Secret::get)))
    }

    fn wait(&self, py: Python<'_>) -> (Vec<String>, bool, Option<String>) {
        let finding = py.detach(|| self.0.wait());
        (finding.silent, finding.has_ended, finding.gave_up)
    }

    fn stop(&self) {
        self.0.stop();
    }
}
