//! Python bindings of arenas.

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Error;
use crate::snapshot;
use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(digest, module)?)?;
    module.add_function(wrap_pyfunction!(digests, module)?)?;
    module.add_class::<Arena>()
}

/// See [`snapshot::Arena`].
#[pyclass(frozen, module = "evermoe._native")]
pub(super) struct Arena(pub(super) Arc<snapshot::Arena>);

#[pymethods]
impl Arena {
    #[staticmethod]
    #[pyo3(signature = (path, meta, units, *, reserves = true, room = None, gpu = None))]
    fn create(
        py: Python<'_>,
        path: PathBuf,
        meta: &str,
        units: Vec<(String, usize)>,
        reserves: bool,
        room: Option<PathBuf>,
        gpu: Option<usize>,
    ) -> PyResult<Self> {
        let create = || {
            #[cfg(feature = "cuda")]
            let _near = gpu.map(cuda::near);
            #[cfg(not(feature = "cuda"))]
            let _ = gpu;
            match room {
                Some(room) => snapshot::Arena::create_in(&path, meta, &units, &room, !reserves),
                None if reserves => snapshot::Arena::create(&path, meta, &units),
                None => snapshot::Arena::create_unreserved(&path, meta, &units),
            }
        };
        Ok(Self(Arc::new(py.detach(create)?)))
    }

    fn reserve(&self, py: Python<'_>, most_bytes: usize) -> PyResult<bool> {
        Ok(py.detach(|| self.0.reserve(most_bytes))?)
    }

    #[staticmethod]
    fn open(path: PathBuf) -> PyResult<Self> {
        Ok(Self(Arc::new(snapshot::Arena::open(&path)?)))
    }

    #[getter]
    fn meta(&self) -> &str {
        self.0.layout().meta()
    }

    #[getter]
    fn path(&self) -> String {
        self.0.path().to_string_lossy().into_owned()
    }

    #[getter]
    fn payload_bytes(&self) -> usize {
        self.0.layout().payload_bytes()
    }

    fn units(&self) -> Vec<(&str, usize, usize)> {
        self.0.layout().units().iter().map(|unit| (unit.name.as_str(), unit.offset, unit.bytes)).collect()
    }

    #[cfg(feature = "cuda")]
    fn page_lock(&self, py: Python<'_>, device: usize) -> PyResult<()> {
        let lock = |start, len| -> Result<snapshot::PageLock, Error> {
            // SAFETY: the arena's own mapping, which drops the lock before it is unmapped.
            Ok(Box::new(unsafe { cuda::PinnedBuffer::register(device, start, len)? }))
        };
        Ok(py.detach(|| self.0.page_lock(lock))?)
    }

    #[getter]
    fn is_page_locked(&self) -> bool {
        self.0.is_page_locked()
    }

    #[getter]
    fn mapped_bytes(&self) -> usize {
        self.0.layout().file_bytes()
    }

    fn begin(&self, version: u64) -> usize {
        self.0.begin(version)
    }

    fn buffer<'py>(slf: Bound<'py, Self>, index: usize) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let arena = &slf.get().0;
        let start = arena.buffer(index)?;
        // SAFETY: the buffer has this length and lives as long as the arena, which the array keeps alive as its base;
        // the view itself is only used for its address and length.
        unsafe {
            let view = ArrayView1::from_shape_ptr(arena.layout().payload_bytes(), start.cast_const());
            Ok(PyArray1::borrow_from_array(&view, slf.into_any()))
        }
    }

    fn commit(&self, py: Python<'_>, index: usize) -> PyResult<Vec<u64>> {
        Ok(py.detach(|| self.0.commit(index))?)
    }

    fn commit_received(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        Ok(py.detach(|| self.0.commit_received(index))?)
    }

    fn versions(&self) -> Vec<(usize, u64)> {
        self.0.versions()
    }

    fn digests(&self, index: usize) -> PyResult<Vec<u64>> {
        Ok(self.0.digests(index)?)
    }

    fn verify(&self, py: Python<'_>, index: usize) -> PyResult<Vec<String>> {
        Ok(py.detach(|| self.0.verify(index))?)
    }

    fn unlink(&self) -> PyResult<()> {
        Ok(self.0.unlink()?)
    }

    fn __repr__(&self) -> String {
        format!("Arena({:?}, {} units, versions={:?})", self.0.path(), self.units().len(), self.0.versions())
    }
}

pub(super) fn bytes_of<'a>(array: &'a PyReadonlyArray1<'_, u8>) -> PyResult<&'a [u8]> {
    Ok(array
        .as_slice()
        .map_err(|_| Error::invalid("array: expected contiguous bytes; use numpy.ascontiguousarray"))?)
}

#[pyfunction]
fn digest(py: Python<'_>, array: PyReadonlyArray1<'_, u8>) -> PyResult<u64> {
    let bytes = bytes_of(&array)?;
    Ok(py.detach(|| snapshot::digest(bytes)))
}

#[pyfunction]
fn digests(py: Python<'_>, units: Vec<Vec<PyReadonlyArray1<'_, u8>>>) -> PyResult<Vec<u64>> {
    let parts = units.iter().map(|parts| parts.iter().map(bytes_of).collect());
    let parts = parts.collect::<PyResult<Vec<Vec<&[u8]>>>>()?;
    Ok(py.detach(|| snapshot::digests(&parts)))
}
