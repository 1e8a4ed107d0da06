//! Python bindings of the triple buffer's states (Python owns its bytes), of retention, and of manifests.

use crate::persist::{self, Event, Manifest, SavedUnit, Slot};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(retained_versions, module)?)?;
    module.add_function(wrap_pyfunction!(parse_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(format_manifest, module)?)?;
    module.add_class::<TripleBuffer>()
}

/// See [`persist::TripleBuffer`].
#[pyclass(frozen, module = "evermoe._native")]
struct TripleBuffer(Mutex<persist::TripleBuffer>);

impl TripleBuffer {
    /// Ignores poisoning: a panic in another thread leaves the states unchanged, as they change in one assignment.
    fn lock(&self) -> MutexGuard<'_, persist::TripleBuffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn advance(&self, event: Event) -> PyResult<()> {
        let mut buffer = self.lock();
        *buffer = buffer.next(event)?;
        Ok(())
    }
}

#[pymethods]
impl TripleBuffer {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    #[getter]
    fn slots(&self) -> Vec<(&'static str, Option<u64>)> {
        self.lock().slots.map(row).to_vec()
    }

    #[getter]
    fn writing(&self) -> Option<usize> {
        self.lock().writing()
    }

    #[getter]
    fn persisting(&self) -> Option<usize> {
        self.lock().persisting()
    }

    #[getter]
    fn recovery(&self) -> Option<usize> {
        self.lock().recovery()
    }

    #[getter]
    fn next_to_persist(&self) -> Option<usize> {
        self.lock().next_to_persist()
    }

    fn begin(&self, version: u64) -> PyResult<()> {
        self.advance(Event::Begin(version))
    }

    fn commit(&self) -> PyResult<()> {
        self.advance(Event::Commit)
    }

    fn abandon(&self) -> PyResult<()> {
        self.advance(Event::Abandon)
    }

    fn persist(&self) -> PyResult<()> {
        self.advance(Event::Persist)
    }

    fn durable(&self) -> PyResult<()> {
        self.advance(Event::Durable)
    }

    fn failed(&self) -> PyResult<()> {
        self.advance(Event::Failed)
    }

    fn rewind(&self, version: u64) -> PyResult<()> {
        self.advance(Event::Rewind(version))
    }

    fn __repr__(&self) -> String {
        let states = self.slots().into_iter().map(|(state, version)| match version {
            Some(version) => format!("{state} {version}"),
            None => state.into(),
        });
        format!("TripleBuffer({})", states.collect::<Vec<_>>().join(", "))
    }
}

fn row(slot: Slot) -> (&'static str, Option<u64>) {
    match slot {
        Slot::Empty => ("empty", None),
        Slot::Writing(version) => ("writing", Some(version)),
        Slot::Snapshot(version) => ("snapshot", Some(version)),
        Slot::Persisting(version) => ("persisting", Some(version)),
        Slot::Recovery(version) => ("recovery", Some(version)),
    }
}

#[pyfunction]
fn retained_versions(
    py: Python<'_>,
    versions: Vec<Vec<u64>>,
    partial: Vec<Vec<u64>>,
    open: Vec<u64>,
    may_lag: Vec<usize>,
    spare: usize,
) -> PyResult<Vec<Vec<u64>>> {
    Ok(py.detach(|| persist::retained(&versions, &partial, &open, &may_lag, spare))?)
}

/// Name, file, origin of the file, digest, part and tensors of a unit.
type UnitRow = (String, String, Option<String>, u64, Option<(u64, u64, u64)>, Vec<String>);

/// Version, step, layout, members and units of a manifest.
type ManifestFields = (u64, u64, String, Vec<String>, Vec<UnitRow>);

#[pyfunction]
fn parse_manifest(py: Python<'_>, text: &[u8]) -> PyResult<ManifestFields> {
    let Manifest { version, step, layout, members, units } = py.detach(|| Manifest::from_json(text))?;
    let row = |unit: SavedUnit| (unit.name, unit.file, unit.origin, unit.digest, unit.part, unit.tensors);
    Ok((version, step, layout, members, units.into_iter().map(row).collect()))
}

#[pyfunction]
fn format_manifest(
    py: Python<'_>,
    version: u64,
    step: u64,
    layout: String,
    members: Vec<String>,
    units: Vec<UnitRow>,
) -> PyResult<String> {
    let unit =
        |(name, file, origin, digest, part, tensors)| SavedUnit { name, file, origin, digest, part, tensors };
    let units = units.into_iter().map(unit).collect();
    Ok(py.detach(|| Manifest { version, step, layout, members, units }.to_json())?)
}
