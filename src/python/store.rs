//! Python bindings of object stores.

use crate::error::Error;
use crate::store::{self, Address, Options};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::time::Duration;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ObjectStore>()
}

/// See `store::ObjectStore`.
#[pyclass(frozen, module = "evermoe._native")]
struct ObjectStore(store::ObjectStore);

#[pymethods]
impl ObjectStore {
    #[new]
    fn new(
        py: Python<'_>,
        url: &str,
        patience: f64,
        upload_limit: Option<f64>,
        download_limit: Option<f64>,
    ) -> PyResult<Self> {
        let patience = Duration::try_from_secs_f64(patience)
            .map_err(|_| Error::invalid(format!("patience: expected seconds, got {patience}")))?;
        let address = Address::parse(url)?;
        let options = Options { patience, upload_limit, download_limit };
        Ok(Self(py.detach(|| store::ObjectStore::open(&address, options))?))
    }

    #[getter]
    fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }

    fn put(&self, py: Python<'_>, name: &str, data: &[u8]) -> PyResult<()> {
        Ok(py.detach(|| self.0.put(name, data))?)
    }

    fn create(&self, py: Python<'_>, name: &str, data: &[u8]) -> PyResult<bool> {
        Ok(py.detach(|| self.0.create(name, data))?)
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        most_bytes: u64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = py.detach(|| self.0.read(name, most_bytes))?;
        Ok(found.map(|data| PyBytes::new(py, &data)))
    }

    fn size(&self, py: Python<'_>, name: &str) -> PyResult<Option<u64>> {
        Ok(py.detach(|| self.0.size(name))?)
    }

    fn read_into(
        &self,
        py: Python<'_>,
        name: &str,
        start: u64,
        out: &Bound<'_, PyArray1<u8>>,
    ) -> PyResult<()> {
        let mut out = out.try_readwrite()?;
        let out = out.as_slice_mut()?;
        Ok(py.detach(|| self.0.read_into(name, start, out))?)
    }

    /// (name, bytes, seconds since 1970) of each object below a name.
    fn list(&self, py: Python<'_>, below: &str) -> PyResult<Vec<(String, u64, f64)>> {
        let found = py.detach(|| self.0.list(below))?;
        Ok(found.into_iter().map(|each| (each.name, each.nbytes, each.modified)).collect())
    }

    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(py.detach(|| self.0.names())?)
    }

    fn remove(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        Ok(py.detach(|| self.0.remove(&names))?)
    }
}
