//! Python bindings of [`crate::schedule`]: tuples in, tuples out; windows and plans stay in Rust, behind a handle.

use super::shape_error;
use crate::schedule::{
    self, Anchor, Change, Chunk, CopyItem, Evidence, Link, Memory, Receiver, Request, Sent, Span, StepProfile,
};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(find_windows, module)?)?;
    module.add_function(wrap_pyfunction!(forecast_memory, module)?)?;
    module.add_function(wrap_pyfunction!(has_changed, module)?)?;
    module.add_function(wrap_pyfunction!(plan_chunks, module)?)?;
    module.add_function(wrap_pyfunction!(version_pace, module)?)?;
    module.add_function(wrap_pyfunction!(snapshot_memory, module)?)?;
    module.add_function(wrap_pyfunction!(chrome_trace, module)?)?;
    module.add_function(wrap_pyfunction!(merge_traces, module)?)?;
    module.add_class::<Windows>()?;
    module.add_class::<ChunkPlan>()
}

/// Name, kind, resource, start, seconds, bytes, peers.
type SpanRow = (String, String, String, f64, f64, u64, Vec<usize>);

/// Resource, name and occurrence of the anchor, offset, start, seconds, expected, jitter.
type WindowRow<'a> = (&'static str, Option<&'a str>, usize, f64, f64, f64, f64, f64);

/// Step, window, unit, offset, bytes, destination, start, seconds.
type ChunkRow<'a> = (usize, Option<usize>, &'a str, u64, u64, usize, f64, f64);

/// The fields of [`schedule::Reason`], and a summary.
type ReasonRow = (bool, usize, Option<usize>, f64, f64, f64, u64, u64, String);

/// Kind of change, resource, anchor, before, now, and a summary.
type ChangeRow = (&'static str, &'static str, Option<String>, Option<f64>, Option<f64>, String);

/// See [`schedule::Windows`].
#[pyclass(frozen, eq, module = "evermoe._native")]
#[derive(PartialEq)]
struct Windows(schedule::Windows);

#[pymethods]
impl Windows {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        Ok(Self(schedule::Windows::from_json(text)?))
    }

    fn to_json(&self) -> String {
        self.0.to_json()
    }

    #[getter]
    fn step_seconds(&self) -> f64 {
        self.0.step_seconds
    }

    #[getter]
    fn evidence(&self) -> (usize, usize, String) {
        let evidence = &self.0.evidence;
        let (used, left_out) = match *evidence {
            Evidence::Steady { steps } => (steps, 0),
            Evidence::MostlySteady { steps, left_out } => (steps, left_out),
            Evidence::Unsteady { steps, .. } => (0, steps),
        };
        (used, left_out, evidence.to_string())
    }

    #[getter]
    fn rows(&self) -> Vec<WindowRow<'_>> {
        self.0.windows.iter().map(window_row).collect()
    }
}

fn window_row(window: &schedule::Window) -> WindowRow<'_> {
    let schedule::Window { resource, ref anchor, offset, start, seconds, expected, jitter } = *window;
    let (after, occurrence) = match anchor {
        Anchor::Start => (None, 0),
        Anchor::After { name, occurrence } => (Some(name.as_str()), *occurrence),
    };
    (resource.name(), after, occurrence, offset, start, seconds, expected, jitter)
}

/// See [`schedule::ChunkPlan`].
#[pyclass(frozen, eq, module = "evermoe._native")]
#[derive(PartialEq)]
struct ChunkPlan(schedule::ChunkPlan);

#[pymethods]
impl ChunkPlan {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        Ok(Self(schedule::ChunkPlan::from_json(text)?))
    }

    fn to_json(&self) -> String {
        self.0.to_json()
    }

    #[getter]
    fn rows(&self) -> Vec<ChunkRow<'_>> {
        let row = |chunk: &Chunk| {
            let Chunk { step, window, unit, offset, bytes, destination, start, seconds } = *chunk;
            (step, window, self.0.units[unit].as_str(), offset, bytes, destination, start, seconds)
        };
        self.0.chunks.iter().map(row).collect()
    }

    #[getter]
    fn reason(&self) -> ReasonRow {
        let reason = &self.0.reason;
        (
            reason.fits,
            reason.steps_per_version,
            reason.steps_in_windows,
            reason.delay_seconds,
            reason.used_seconds,
            reason.available_seconds,
            reason.bytes,
            reason.outside_bytes,
            reason.to_string(),
        )
    }
}

/// The steps of a profile, from pairs of seconds and spans.
fn to_steps(steps: &Bound<'_, PyAny>) -> PyResult<Vec<StepProfile>> {
    let py = steps.py();
    let wrong = |place: String, error: PyErr| shape_error(format!("steps: {place}{}", error.value(py)));
    let steps = steps.try_iter();
    let steps = steps.map_err(|error| wrong("expected a list of steps (seconds, spans): ".into(), error))?;
    let mut found = Vec::new();
    for (number, step) in steps.enumerate() {
        let at = |error| wrong(format!("step {number}: expected seconds and a list of spans: "), error);
        let (seconds, rows): (f64, Vec<Bound<'_, PyAny>>) = step?.extract().map_err(at)?;
        let spans = rows.iter().enumerate().map(|(place, row)| {
            to_span(row).map_err(|error| wrong(format!("step {number}: span {place}: "), error))
        });
        found.push(StepProfile { seconds, spans: spans.collect::<PyResult<_>>()? });
    }
    Ok(found)
}

fn to_span(row: &Bound<'_, PyAny>) -> PyResult<Span> {
    let (name, kind, resource, start, seconds, bytes, peers): SpanRow = row.extract()?;
    Ok(Span { name, kind: kind.parse()?, resource: resource.parse()?, start, seconds, bytes, peers })
}

#[pyfunction]
fn find_windows(
    py: Python<'_>,
    steps: &Bound<'_, PyAny>,
    quantile: f64,
    gamma: f64,
    ignore: Vec<String>,
) -> PyResult<Windows> {
    let steps = to_steps(steps)?;
    let options = schedule::WindowOptions { quantile, gamma, ignore };
    Ok(Windows(py.detach(|| schedule::find_windows(&steps, &options))?))
}

/// Bytes and buffers.
#[pyfunction]
fn forecast_memory(bytes: u64) -> (u64, u64) {
    let memory = schedule::forecast_memory(bytes);
    (memory.bytes, memory.buffers)
}

#[pyfunction]
fn has_changed(
    py: Python<'_>,
    windows: &Windows,
    steps: &Bound<'_, PyAny>,
    tolerance: f64,
) -> PyResult<Option<ChangeRow>> {
    let steps = to_steps(steps)?;
    let change = py.detach(|| schedule::has_changed(&windows.0, &steps, tolerance))?;
    Ok(change.map(|change| {
        let words = change.to_string();
        match change {
            Change::Sequence { resource, found, .. } => {
                ("sequence", resource.name(), found, None, None, words)
            }
            Change::Window { resource, anchor, before, now } => {
                let after = match anchor {
                    Anchor::Start => None,
                    Anchor::After { name, .. } => Some(name),
                };
                ("window", resource.name(), after, Some(before), Some(now), words)
            }
            Change::Total { resource, before, now } => {
                ("total", resource.name(), None, Some(before), Some(now), words)
            }
        }
    }))
}

#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one for each argument of the Python function")]
fn plan_chunks(
    py: Python<'_>,
    pieces: Vec<(String, u64, Vec<usize>)>,
    windows: &Windows,
    receivers: Vec<(usize, PyRef<'_, Windows>, f64)>,
    link: (f64, f64),
    memory: (u64, u64, Option<(f64, f64)>),
    policy: &str,
    max_steps: usize,
    version_steps: Option<usize>,
) -> PyResult<ChunkPlan> {
    let piece = |(unit, bytes, destinations)| CopyItem { unit, bytes, destinations };
    let pieces: Vec<CopyItem> = pieces.into_iter().map(piece).collect();
    let receivers: Vec<Receiver> = receivers
        .iter()
        .map(|(rank, windows, clock_offset)| Receiver {
            rank: *rank,
            windows: windows.0.clone(),
            clock_offset: *clock_offset,
        })
        .collect();
    let link_of = |(alpha, beta)| Link { alpha, beta };
    let (bytes, buffers, drain) = memory;
    let request = Request {
        pieces: &pieces,
        windows: &windows.0,
        receivers: &receivers,
        link: link_of(link),
        memory: Memory { bytes, buffers, drain: drain.map(link_of) },
        policy: policy.parse()?,
        max_steps,
        version_steps: version_steps.unwrap_or(1),
    };
    let plan = || {
        let version_steps = version_steps.map_or_else(|| schedule::version_steps(&request, max_steps), Ok)?;
        schedule::plan_chunks(&Request { version_steps, ..request })
    };
    Ok(ChunkPlan(py.detach(plan)?))
}

/// Steps, delay and wasted seconds of the interval for a plan's reason: see [`schedule::Reason::pace`].
#[pyfunction]
fn version_pace(
    plan: (usize, f64, f64, u64),
    step_seconds: f64,
    link: (f64, f64),
    failures_per_step: f64,
    most: usize,
) -> PyResult<Option<(usize, f64, f64)>> {
    let (steps_per_version, delay_seconds, used_seconds, bytes) = plan;
    let reason = schedule::Reason {
        fits: false,
        steps_per_version,
        steps_in_windows: None,
        delay_seconds,
        used_seconds,
        available_seconds: used_seconds,
        bytes,
        outside_bytes: bytes,
    };
    let link = schedule::Link { alpha: link.0, beta: link.1 };
    let found = reason.pace(step_seconds, link, failures_per_step, most)?;
    Ok(found.map(|period| (period.steps, period.delay, period.wasted)))
}

#[pyfunction]
fn snapshot_memory(free_bytes: u64, nbytes: Vec<u64>, reserve: u64) -> Vec<&'static str> {
    schedule::snapshot_memory(free_bytes, &nbytes, reserve)
        .into_iter()
        .map(schedule::MemoryKind::name)
        .collect()
}

#[pyfunction]
fn chrome_trace(
    py: Python<'_>,
    steps: &Bound<'_, PyAny>,
    windows: Option<&Windows>,
    plan: Option<&ChunkPlan>,
    sent: Vec<(f64, f64, u64, usize, Option<usize>)>,
    rank: usize,
    start: f64,
) -> PyResult<String> {
    let steps = to_steps(steps)?;
    let as_sent = |(start, seconds, bytes, peer, window)| Sent { start, seconds, bytes, peer, window };
    let sent: Vec<Sent> = sent.into_iter().map(as_sent).collect();
    let (windows, plan) = (windows.map(|windows| &windows.0), plan.map(|plan| &plan.0));
    Ok(py.detach(|| schedule::chrome_trace(&steps, windows, plan, &sent, rank, start))?)
}

#[pyfunction]
fn merge_traces(py: Python<'_>, traces: Vec<String>) -> PyResult<String> {
    Ok(py.detach(|| schedule::merge_traces(&traces))?)
}
