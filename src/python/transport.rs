//! Python bindings of [`crate::transport`].

use crate::error::Error;
use crate::python::secret::Secret;
use crate::transport;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Port>()?;
    module.add_class::<Links>()?;
    module.add_class::<Transfer>()
}

/// See [`transport::Port`].
#[pyclass(frozen, module = "evermoe._native")]
struct Port(transport::Port);

#[pymethods]
impl Port {
    #[new]
    #[pyo3(signature = (addresses=Vec::new(), secret=None, ucx=None))]
    fn new(addresses: Vec<String>, secret: Option<&Secret>, ucx: Option<Vec<String>>) -> PyResult<Self> {
        let numeric = |address: &String| {
            let wrong =
                |error| Error::invalid(format!("Port: expected a numeric address, got {address:?}: {error}"));
            address.parse::<IpAddr>().map_err(wrong)
        };
        let addresses = addresses.iter().map(numeric).collect::<Result<Vec<_>, _>>()?;
        let carrier = ucx.map_or(transport::Carrier::Tcp, |libraries| transport::Carrier::Ucx { libraries });
        Ok(Self(transport::Port::open(&addresses, secret.map(Secret::get), &carrier)?))
    }

    #[getter]
    fn ports(&self) -> Vec<u16> {
        self.0.ports()
    }
}

/// See [`transport::Links`].
#[pyclass(frozen, module = "evermoe._native")]
struct Links(transport::Links);

#[pymethods]
impl Links {
    #[new]
    fn new(
        port: &Port,
        group: u64,
        rank: usize,
        addresses: Vec<String>,
        streams: usize,
        milliseconds: u64,
    ) -> PyResult<Self> {
        let limit = Duration::from_millis(milliseconds);
        let peers = transport::Peers { group, rank, addresses, streams, limit };
        Ok(Self(transport::Links::begin(&port.0, peers)?))
    }

    fn send(
        &self,
        py: Python<'_>,
        data: Bound<'_, PyArray1<u8>>,
        peer: usize,
        tag: u64,
    ) -> PyResult<Transfer> {
        let (address, nbytes) = bytes(&data)?;
        // SAFETY: the transfer keeps the array alive until it is over or dropped; the caller does not change its bytes.
        let transfer = py.detach(|| unsafe { self.0.send(address.get(), nbytes, peer, tag) })?;
        Ok(Transfer { transfer, _data: data.unbind() })
    }

    fn receive(
        &self,
        py: Python<'_>,
        data: Bound<'_, PyArray1<u8>>,
        peer: usize,
        tag: u64,
    ) -> PyResult<Transfer> {
        let (address, nbytes) = bytes(&data)?;
        // SAFETY: the transfer keeps the array until it is over or dropped; the caller does not read it before.
        let transfer = py.detach(|| unsafe { self.0.receive(address.get(), nbytes, peer, tag) })?;
        Ok(Transfer { transfer, _data: data.unbind() })
    }

    fn end(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.0.end(reason));
    }
}

/// The address of an array's bytes, for another thread.
struct Address(*mut u8);

// SAFETY: it is only an address; each use states why it is allowed.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    fn get(&self) -> *mut u8 {
        self.0
    }
}

fn bytes(data: &Bound<'_, PyArray1<u8>>) -> PyResult<(Address, usize)> {
    if !data.is_contiguous() {
        return Err(Error::invalid("data: expected contiguous bytes").into());
    }
    Ok((Address(data.data()), data.len()))
}

/// See [`transport::Transfer`].
#[pyclass(frozen, module = "evermoe._native")]
struct Transfer {
    /// Dropped before the array whose memory it uses.
    transfer: transport::Transfer,
    _data: Py<PyArray1<u8>>,
}

#[pymethods]
impl Transfer {
    fn wait(&self, py: Python<'_>, milliseconds: u64) -> Option<String> {
        let limit = Duration::from_millis(milliseconds);
        match py.detach(|| self.transfer.wait(limit)) {
            Some(result) => result.err(),
            None => Some(format!("timed out after {milliseconds} ms")),
        }
    }

    fn seconds(&self) -> Option<f64> {
        self.transfer.took().map(|took| took.as_secs_f64())
    }
}
