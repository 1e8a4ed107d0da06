//! Python bindings of the copying thread.

#[cfg(feature = "cuda")]
use super::chunks::{ChunkCopier, stream};
use super::snapshot::Arena;
#[cfg(feature = "cuda")]
use crate::cuda;
#[cfg(feature = "cuda")]
use crate::ensure;
use crate::error::Error;
use crate::snapshot::{self, CaptureState, Run};
use numpy::PyReadwriteArray1;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(copy_units, module)?)?;
    module.add_class::<CopyEngine>()?;
    module.add_class::<Capture>()
}

#[pyfunction]
fn copy_units(
    py: Python<'_>,
    sources: Vec<Vec<(usize, usize)>>,
    mut outs: Vec<PyReadwriteArray1<'_, u8>>,
) -> PyResult<()> {
    let sources: Vec<Vec<Run>> = sources.into_iter().map(runs).collect();
    let outs = outs.iter_mut().map(|out| out.as_slice_mut());
    let mut outs = outs.collect::<Result<Vec<&mut [u8]>, _>>()?;
    // SAFETY: the caller promises not to change the sources, see the stub.
    Ok(py.detach(|| unsafe { snapshot::copy_units(&sources, &mut outs) })?)
}

fn runs(unit: Vec<(usize, usize)>) -> Vec<Run> {
    unit.into_iter().map(|(address, bytes)| Run { address, bytes }).collect()
}

/// Interval at which a wait checks for signals, such as Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// See `snapshot::CopyEngine`.
#[pyclass(frozen, module = "evermoe._native")]
struct CopyEngine(snapshot::CopyEngine);

#[pymethods]
impl CopyEngine {
    #[new]
    #[pyo3(signature = (chunk_bytes = 1 << 20))]
    fn new(chunk_bytes: usize) -> PyResult<Self> {
        Ok(Self(snapshot::CopyEngine::new(chunk_bytes)?))
    }

    fn capture(
        &self,
        py: Python<'_>,
        arena: &Bound<'_, Arena>,
        version: u64,
        sources: Vec<Vec<(usize, usize)>>,
        keep: Py<PyAny>,
    ) -> PyResult<Capture> {
        let arena = arena.get().0.clone();
        let sources: Vec<Vec<Run>> = sources.into_iter().map(runs).collect();
        // SAFETY: `keep` owns the sources; the caller promises not to write them, see the stub.
        let capture = py.detach(|| unsafe { self.0.capture(&arena, version, &sources, Box::new(keep)) })?;
        Ok(Capture(capture))
    }

    #[cfg(feature = "cuda")]
    fn capture_device(
        &self,
        py: Python<'_>,
        arena: &Bound<'_, Arena>,
        version: u64,
        copier: Py<ChunkCopier>,
        tensors_per_unit: Vec<usize>,
        current_stream: usize,
    ) -> PyResult<Capture> {
        let arena = arena.get().0.clone();
        let chunks = copier.get().copier.clone();
        let capture = py.detach(move || {
            // SAFETY: torch's streams live as long as the process; the caller does not use the tensors and the copier
            // until the capture is over, see the stub.
            let mut fetcher = unsafe { cuda::Fetcher::new(chunks.clone(), stream(current_stream))? };
            let digests: snapshot::Digests = Box::new(fetcher.digests(&tensors_per_unit)?);
            if arena.is_page_locked() {
                let places = places(arena.layout(), chunks.layout().sizes(), &tensors_per_unit)?;
                let mut fetcher = fetcher.with_places(places)?;
                // SAFETY: the places lie in the buffer, which belongs to the capture.
                let fetch = Box::new(move |buffer| unsafe { fetcher.fetch_to(buffer) });
                // SAFETY: as above; `copier` owns the tensors, and is dropped after the fetcher.
                return unsafe {
                    self.0.capture_fetched(&arena, version, None, fetch, Some(digests), Box::new(copier))
                };
            }
            let sources = by_unit(&fetcher.copies(), &tensors_per_unit)?;
            let fetch = Box::new(move |_| fetcher.fetch());
            // SAFETY: as above; `copier` owns the tensors' copies, and is dropped after the fetcher.
            unsafe {
                self.0.capture_fetched(
                    &arena,
                    version,
                    Some(&sources),
                    fetch,
                    Some(digests),
                    Box::new(copier),
                )
            }
        });
        Ok(Capture(capture?))
    }

    #[pyo3(signature = (nbytes = None))]
    fn open(&self, py: Python<'_>, nbytes: Option<usize>) {
        py.detach(|| self.0.open(nbytes));
    }

    fn close_gate(&self, py: Python<'_>) {
        py.detach(|| self.0.close_gate());
    }

    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.0.shutdown());
    }
}

/// See `snapshot::Capture`.
#[pyclass(frozen, module = "evermoe._native")]
struct Capture(snapshot::Capture);

#[pymethods]
impl Capture {
    #[getter]
    fn index(&self) -> usize {
        self.0.index()
    }

    #[getter]
    fn version(&self) -> u64 {
        self.0.version()
    }

    #[getter]
    fn state(&self) -> &'static str {
        match self.0.state() {
            CaptureState::Waiting => "waiting",
            CaptureState::Copying => "copying",
            CaptureState::Complete => "complete",
            CaptureState::Cancelled => "cancelled",
        }
    }

    #[getter]
    fn done_bytes(&self) -> usize {
        self.0.done_bytes()
    }

    #[getter]
    fn seconds_busy(&self) -> f64 {
        self.0.busy().as_secs_f64()
    }

    #[pyo3(signature = (nbytes = None, timeout = None))]
    fn wait(&self, py: Python<'_>, nbytes: Option<usize>, timeout: Option<f64>) -> PyResult<usize> {
        let deadline = timeout.map(deadline).transpose()?.flatten();
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNALS, |left| left.min(SIGNALS));
            let done = py.detach(|| self.0.wait(nbytes, Some(slice)))?;
            let arrived =
                nbytes.map_or_else(|| self.0.state() == CaptureState::Complete, |nbytes| done >= nbytes);
            if arrived || left == Some(Duration::ZERO) {
                // It may have progressed since.
                return Ok(self.0.done_bytes());
            }
            py.check_signals()?;
        }
    }

    fn hurry(&self, py: Python<'_>) {
        py.detach(|| self.0.hurry());
    }

    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.0.cancel());
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The runs of each unit: those of `counts` tensors, in order.
#[cfg(feature = "cuda")]
fn by_unit(tensors: &[Vec<(usize, usize)>], counts: &[usize]) -> Result<Vec<Vec<Run>>, Error> {
    check_counts(tensors.len(), counts)?;
    let mut tensors = tensors.iter();
    let run = |&(address, bytes): &(usize, usize)| Run { address, bytes };
    Ok(counts.iter().map(|&count| tensors.by_ref().take(count).flatten().map(run).collect()).collect())
}

/// Place of each tensor in a buffer: consecutive in its unit.
#[cfg(feature = "cuda")]
fn places(layout: &snapshot::Layout, sizes: &[usize], counts: &[usize]) -> Result<Vec<usize>, Error> {
    check_counts(sizes.len(), counts)?;
    let num_units = layout.units().len();
    ensure!(counts.len() == num_units, "tensors_per_unit: expected {num_units} counts, got {}", counts.len());
    let (mut places, mut sizes) = (vec![], sizes.iter());
    for (unit, &count) in layout.units().iter().zip(counts) {
        let mut end = unit.offset;
        for bytes in sizes.by_ref().take(count) {
            places.push(end);
            end += bytes;
        }
        let got = end - unit.offset;
        let (name, bytes) = (&unit.name, unit.bytes);
        ensure!(got == bytes, "tensors: unit {name:?}: expected {bytes} bytes in all, got {got}");
    }
    Ok(places)
}

#[cfg(feature = "cuda")]
fn check_counts(num_tensors: usize, counts: &[usize]) -> Result<(), Error> {
    let all = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
    ensure!(
        all == Some(num_tensors),
        "tensors_per_unit: expected counts that add up to the copier's {num_tensors} tensors, got {counts:?}"
    );
    Ok(())
}

/// The end of a timeout in seconds; none if it is too far away to be represented.
fn deadline(seconds: f64) -> Result<Option<Instant>, Error> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) => Ok(Instant::now().checked_add(timeout)),
        Err(_) if seconds.is_nan() || seconds < 0.0 => {
            Err(Error::invalid(format!("timeout: expected seconds, 0 or more, got {seconds}")))
        }
        Err(_) => Ok(None),
    }
}
