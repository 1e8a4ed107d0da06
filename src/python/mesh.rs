//! Python bindings of [`crate::mesh`].

use super::duration;
use crate::error::Error;
use crate::mesh::{self, Bytes};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MESH_COLLECTIVE", mesh::COLLECTIVE)?;
    module.add_class::<MeshListening>()?;
    module.add_class::<Mesh>()
}

/// See [`mesh::Listening`].
#[pyclass(frozen, module = "evermoe._native")]
struct MeshListening(Mutex<Option<mesh::Listening>>, String);

#[pymethods]
impl MeshListening {
    #[new]
    #[pyo3(signature = (address=None))]
    fn new(address: Option<&str>) -> PyResult<Self> {
        let numeric = |address: &str| {
            let wrong = |error| {
                Error::invalid(format!("address: expected a numeric address, got {address:?}: {error}"))
            };
            address.parse::<IpAddr>().map_err(wrong)
        };
        let listening = mesh::Listening::open(address.map(numeric).transpose()?)?;
        let name = listening.name();
        Ok(Self(Mutex::new(Some(listening)), name))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.1
    }

    #[allow(clippy::needless_pass_by_value)] // PyO3 makes vectors of Python's lists
    fn connect(&self, py: Python<'_>, rank: usize, names: Vec<String>, seconds: f64) -> PyResult<Mesh> {
        let limit = duration(seconds)?;
        let listening = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let listening = listening.ok_or_else(|| Error::invalid("connect: this was connected before"))?;
        Ok(Mesh(py.detach(|| listening.connect(rank, &names, limit))?.with_signals(handle_signals)))
    }
}

/// Calls Python's signal handlers, which run in the main thread alone. Other threads may outlive the interpreter.
///
/// Returns whether none has raised an exception; [`result`] returns that.
fn handle_signals() -> bool {
    // SAFETY: both calls have no requirements.
    let is_main_thread = unsafe { libc::gettid() == libc::getpid() };
    !is_main_thread || Python::attach(|py| py.check_signals().map_err(|error| error.restore(py)).is_ok())
}

/// Returns why a call failed, or raises the exception of a signal handler.
fn result(py: Python<'_>, result: std::result::Result<(), String>) -> PyResult<Option<String>> {
    PyErr::take(py).map_or(Ok(result.err()), Err)
}

/// See [`mesh::Mesh`]. Memory is `(address, bytes)`.
#[pyclass(frozen, module = "evermoe._native")]
struct Mesh(mesh::Mesh);

type Memory = (usize, usize);

fn bytes((address, length): Memory) -> Bytes {
    Bytes { address: address as *mut u8, length }
}

#[pymethods]
impl Mesh {
    #[allow(clippy::needless_pass_by_value)] // as above
    fn all_to_all(
        &self,
        py: Python<'_>,
        tag: u32,
        sends: Vec<Memory>,
        receives: Vec<Memory>,
        seconds: f64,
    ) -> PyResult<Option<String>> {
        let limit = duration(seconds)?;
        let parts = |all: &[Memory]| all.iter().copied().map(bytes).collect::<Vec<_>>();
        let (sends, receives) = (parts(&sends), parts(&receives));
        // SAFETY: `evermoe.comm.mesh`, the only caller, passes memory of tensors that it keeps until the call returns.
        result(py, py.detach(|| unsafe { self.0.all_to_all(tag, &sends, &receives, limit) }))
    }

    #[allow(clippy::needless_pass_by_value)] // as above
    fn exchange(
        &self,
        py: Python<'_>,
        tag: u32,
        sends: Vec<(usize, Memory)>,
        receives: Vec<(usize, Memory)>,
        seconds: f64,
    ) -> PyResult<Option<String>> {
        let limit = duration(seconds)?;
        let parts =
            |all: &[(usize, Memory)]| all.iter().map(|&(rank, each)| (rank, bytes(each))).collect::<Vec<_>>();
        let (sends, receives) = (parts(&sends), parts(&receives));
        // SAFETY: as above.
        result(py, py.detach(|| unsafe { self.0.exchange(tag, &sends, &receives, limit) }))
    }

    #[allow(clippy::needless_pass_by_value)] // as above
    fn post(&self, py: Python<'_>, tag: u32, data: &[u8], ranks: Vec<usize>) -> Option<String> {
        py.detach(|| self.0.post(tag, data, &ranks)).err()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}
