//! Python bindings of [`crate::nccl`].

use super::chunks::stream;
use super::duration;
use crate::nccl::{Communicator, UniqueId, wait_for_aborts};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(nccl_unique_id, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for_nccl_aborts, module)?)?;
    module.add("NCCL_NAME_BYTES", UniqueId::BYTES)?;
    module.add_class::<NcclCommunicator>()
}

#[pyfunction]
fn nccl_unique_id(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let id = py.detach(Communicator::unique_id)?;
    Ok(PyBytes::new(py, id.as_bytes()))
}

#[pyfunction]
fn wait_for_nccl_aborts(py: Python<'_>, seconds: f64) -> PyResult<bool> {
    let limit = duration(seconds)?;
    Ok(py.detach(|| wait_for_aborts(limit)))
}

fn pointer(address: usize) -> *mut c_void {
    address as *mut c_void
}

/// See [`Communicator`]. Tensors are addresses, and streams those of `torch.cuda.Stream.cuda_stream`.
#[pyclass(frozen, module = "evermoe._native")]
struct NcclCommunicator(Arc<Communicator>);

#[pymethods]
impl NcclCommunicator {
    #[new]
    fn new(
        py: Python<'_>,
        id: &[u8],
        rank: usize,
        size: usize,
        device: usize,
        seconds: f64,
    ) -> PyResult<Self> {
        let id = UniqueId::from_bytes(id)?;
        let limit = duration(seconds)?;
        Ok(Self(py.detach(|| Communicator::connect(id, rank, size, device, limit))?))
    }

    fn all_reduce(
        &self,
        py: Python<'_>,
        numbers: usize,
        count: usize,
        kind: c_int,
        on: usize,
    ) -> PyResult<()> {
        // SAFETY: `evermoe.comm.nccl`, the only caller, passes the memory of tensors, which torch frees in the stream's order.
        Ok(py.detach(|| unsafe { self.0.all_reduce(pointer(numbers), count, kind, stream(on)) })?)
    }

    #[pyo3(signature = (from, into, bytes, on, /))]
    fn all_gather(&self, py: Python<'_>, from: usize, into: usize, bytes: usize, on: usize) -> PyResult<()> {
        // SAFETY: as above.
        Ok(py.detach(|| unsafe { self.0.all_gather(pointer(from), pointer(into), bytes, stream(on)) })?)
    }

    #[pyo3(signature = (from, sent, into, received, on, /))]
    #[allow(clippy::needless_pass_by_value)] // PyO3 makes vectors of Python's lists
    fn all_to_all(
        &self,
        py: Python<'_>,
        from: usize,
        sent: Vec<usize>,
        into: usize,
        received: Vec<usize>,
        on: usize,
    ) -> PyResult<()> {
        // SAFETY: as above.
        Ok(py.detach(|| unsafe {
            self.0.all_to_all((pointer(from), &sent), (pointer(into), &received), stream(on))
        })?)
    }

    fn mark(&self, py: Python<'_>, on: usize) -> PyResult<()> {
        // SAFETY: as above, a stream of torch's, which never destroys one.
        Ok(py.detach(|| unsafe { self.0.mark(stream(on)) })?)
    }

    fn has_waited(&self, seconds: f64) -> PyResult<bool> {
        Ok(self.0.has_waited(duration(seconds)?))
    }

    fn has_timed_out(&self) -> bool {
        self.0.has_timed_out()
    }

    fn end(&self) -> Option<String> {
        self.0.end()
    }

    fn failure(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.0.failure())
    }

    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.0.abort());
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        self.0.abort();
    }
}
