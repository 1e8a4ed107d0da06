//! Python bindings of the copier between CUDA tensors and chunks in page-locked host memory.

use crate::cpu::ChunkLayout;
use crate::cuda;
use crate::error::Error;
use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::ffi::c_void;
use std::sync::Arc;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(digest_units, module)?)?;
    module.add_class::<ChunkCopier>()
}

#[pyfunction]
fn digest_units(
    py: Python<'_>,
    device: usize,
    current_stream: usize,
    spans: u64,
    ends: u64,
    num_units: usize,
    digests: u64,
) -> PyResult<()> {
    Ok(py.detach(|| {
        // SAFETY: torch's streams live as long as the process; `evermoe.state.gpu_digests`, the only caller, passes the
        // addresses of tensors that it holds until the stream has passed the launch.
        unsafe {
            let launcher = cuda::Launcher::new(device, stream(current_stream))?;
            launcher.digest_units(spans, ends, num_units, digests, num_units)
        }
    })?)
}

/// See `cuda::ChunkCopier`. Streams are those of `torch.cuda.Stream.cuda_stream`.
#[pyclass(frozen, module = "evermoe._native")]
pub(super) struct ChunkCopier {
    pub(super) copier: Arc<cuda::ChunkCopier>,
    /// The tensors, the workspace and the host memory: dropped after the copier has waited for its streams.
    _kept: Py<PyAny>,
}

pub(super) fn stream(address: usize) -> *mut c_void {
    address as *mut c_void
}

fn with_count(count: usize) -> cuda::Staging {
    cuda::Staging { count, ..Default::default() }
}

#[pymethods]
impl ChunkCopier {
    #[staticmethod]
    fn workspace_bytes(sizes: Vec<usize>, chunk_bytes: usize, staging: usize) -> PyResult<usize> {
        Ok(cuda::ChunkCopier::workspace_bytes(&ChunkLayout::new(&sizes, chunk_bytes)?, with_count(staging))?)
    }

    #[new]
    #[pyo3(signature = (device, current_stream, tensors, chunk_bytes, staging, workspace, host, for_captures, kept))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        device: usize,
        current_stream: usize,
        tensors: Vec<(u64, usize)>,
        chunk_bytes: usize,
        staging: usize,
        workspace: u64,
        host: Option<&Bound<'_, PyArray1<u8>>>,
        for_captures: bool,
        kept: Py<PyAny>,
    ) -> PyResult<Self> {
        let (addresses, sizes): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        let layout = ChunkLayout::new(&sizes, chunk_bytes)?;
        let host = host.filter(|host| host.len() > 0).map(|host| {
            if !host.is_contiguous() {
                return Err(Error::invalid("host: expected contiguous bytes"));
            }
            // SAFETY: this number of bytes, which `kept` keeps alive as long as the copier.
            unsafe { cuda::PinnedBuffer::register(device, host.data(), host.len()) }
        });
        let host = match host.transpose()? {
            Some(host) => cuda::HostMemory::Given(host),
            None if for_captures => cuda::HostMemory::Slots,
            None => cuda::HostMemory::Own,
        };
        // SAFETY: `evermoe.copies.snapshot.chunked_copy`, the only caller, passes the addresses of the objects in `kept`.
        let copier = py.detach(move || unsafe {
            let current_stream = stream(current_stream);
            cuda::ChunkCopier::new(
                device,
                current_stream,
                layout,
                &addresses,
                workspace,
                with_count(staging),
                host,
            )
        })?;
        Ok(Self { copier: Arc::new(copier), _kept: kept })
    }

    fn chunks<'py>(slf: Bound<'py, Self>) -> Bound<'py, PyArray1<u8>> {
        let copier = &slf.get().copier;
        view(copier.chunks(), copier.host_bytes(), slf)
    }

    fn hashes<'py>(slf: Bound<'py, Self>) -> Bound<'py, PyArray1<i64>> {
        let copier = &slf.get().copier;
        view(copier.hashes(), copier.num_hashes(), slf)
    }

    fn wrong<'py>(slf: Bound<'py, Self>) -> Bound<'py, PyArray1<i64>> {
        let copier = &slf.get().copier;
        view(copier.wrong(), copier.layout().num_chunks(), slf)
    }

    fn save(&self, py: Python<'_>, current_stream: usize, first: usize, end: usize) -> PyResult<()> {
        // SAFETY: torch's streams live as long as the process; the caller calls `release` before it writes.
        Ok(py.detach(|| unsafe { self.copier.save(stream(current_stream), first..end) })?)
    }

    fn restore(&self, py: Python<'_>, current_stream: usize, first: usize, end: usize) -> PyResult<()> {
        // SAFETY: as above.
        Ok(py.detach(|| unsafe { self.copier.restore(stream(current_stream), first..end) })?)
    }

    fn release(&self, current_stream: usize) -> PyResult<()> {
        // SAFETY: as above.
        Ok(unsafe { self.copier.release(stream(current_stream)) }?)
    }

    fn is_done(&self, first: usize, end: usize) -> PyResult<bool> {
        Ok(self.copier.is_done(first..end)?)
    }

    fn wait(&self, py: Python<'_>, first: usize, end: usize) -> PyResult<()> {
        Ok(py.detach(|| self.copier.wait(first..end))?)
    }
}

/// An array over host memory of the copier, which it keeps alive.
fn view<'py, T: numpy::Element>(
    start: *const T,
    len: usize,
    copier: Bound<'py, ChunkCopier>,
) -> Bound<'py, PyArray1<T>> {
    // SAFETY: the memory has this length and lives as long as the copier, the array's base; the view itself is only
    // used for its address and length.
    unsafe { PyArray1::borrow_from_array(&ArrayView1::from_shape_ptr(len, start), copier.into_any()) }
}
