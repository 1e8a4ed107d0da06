//! Python face of the copying thread.

use super::snapshot::Arena;
use crate::error::Error;
use crate::snapshot::{self, CaptureState, Run};
use pyo3::prelude::*;
use std::time::{Duration, Instant};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CopyEngine>()?;
    module.add_class::<Capture>()
}

/// A wait looks for signals, such as Ctrl-C, this often.
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
        let runs = |unit: Vec<(usize, usize)>| {
            unit.into_iter().map(|(address, bytes)| Run { address, bytes }).collect()
        };
        let sources: Vec<Vec<Run>> = sources.into_iter().map(runs).collect();
        // SAFETY: `keep` owns the sources; that nobody writes them is what the caller promises, see the stub.
        let capture = py.detach(|| unsafe { self.0.capture(&arena, version, &sources, Box::new(keep)) })?;
        Ok(Capture(capture))
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
            CaptureState::Whole => "whole",
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
                nbytes.map_or_else(|| self.0.state() == CaptureState::Whole, |nbytes| done >= nbytes);
            if arrived || left == Some(Duration::ZERO) {
                // It may have come further since.
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

/// The end of a timeout in seconds; none when that is too far away to tell.
fn deadline(seconds: f64) -> Result<Option<Instant>, Error> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) => Ok(Instant::now().checked_add(timeout)),
        Err(_) if seconds.is_nan() || seconds < 0.0 => {
            Err(Error::Invalid(format!("timeout: expected seconds, 0 or more, got {seconds}")))
        }
        Err(_) => Ok(None),
    }
}
