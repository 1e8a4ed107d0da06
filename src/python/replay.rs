//! Python bindings of the records of steps, and of a replica's log.

use crate::cpu::Gradient;
use crate::error::{Error, Result};
use crate::replay::{
    self, Accepted, Draft, Encoded, FRAME_HEAD_BYTES, Fault, HEADER_BYTES, Header, Kind, Outgoing, Rule,
    Stored,
};
use crate::snapshot::digest;
use crate::torch::TorchPool;
use half::bf16;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("RECORD_HEADER_BYTES", HEADER_BYTES)?;
    module.add("FRAME_HEAD_BYTES", FRAME_HEAD_BYTES)?;
    module.add_function(wrap_pyfunction!(encode_gradient, module)?)?;
    module.add_function(wrap_pyfunction!(fill_frame, module)?)?;
    module.add_function(wrap_pyfunction!(seal_record, module)?)?;
    module.add_function(wrap_pyfunction!(state_digest, module)?)?;
    module.add_class::<ReplayLog>()
}

/// (encoding, bytes, digest) of a payload.
type Payload = (u8, usize, u64);

/// Error for an array that must be contiguous.
fn contiguous() -> Error {
    Error::invalid("expected contiguous memory")
}

/// A gradient: float32, or the bits of bfloat16.
#[derive(FromPyObject)]
enum AnyGradient<'py> {
    F32(PyReadonlyArray1<'py, f32>),
    Bf16(PyReadonlyArray1<'py, u16>),
}

impl AnyGradient<'_> {
    /// The values, and their number.
    fn values(&self) -> Result<(Gradient<'_>, usize)> {
        Ok(match self {
            Self::F32(array) => {
                let values = array.as_slice().map_err(|_| contiguous())?;
                (Gradient::F32(values), values.len())
            }
            Self::Bf16(array) => {
                let bits = array.as_slice().map_err(|_| contiguous())?;
                // SAFETY: bfloat16 has the layout of its bits.
                let values = unsafe { std::slice::from_raw_parts(bits.as_ptr().cast::<bf16>(), bits.len()) };
                (Gradient::Bf16(values), values.len())
            }
        })
    }
}

/// Encodes a gradient into a record's memory, after the room for its header.
#[pyfunction]
fn encode_gradient(
    py: Python<'_>,
    gradient: AnyGradient<'_>,
    numbers: Vec<f32>,
    mut record: PyReadwriteArray1<'_, u8>,
) -> PyResult<Payload> {
    let (gradient, len) = gradient.values()?;
    let bytes = record.as_slice_mut().map_err(|_| contiguous())?;
    let payload = bytes.get_mut(HEADER_BYTES..).filter(|rest| rest.len() >= replay::most_payload_bytes(len));
    let payload = payload.ok_or_else(|| {
        Error::invalid(format!("record: expected {HEADER_BYTES} bytes and {} more", 4 * len))
    })?;
    let any_zero = replay::ignores_sign_of_zero(&rule(&numbers)?);
    let Encoded { encoding, payload_bytes, digest } =
        py.detach(|| replay::encode_gradient(gradient, len, any_zero, payload, &TorchPool));
    Ok((encoding as u8, payload_bytes, digest))
}

/// A record: its bytes; or name, step, the unit's own step count, numbers, and gradient.
#[derive(FromPyObject)]
enum AnyRecord<'py> {
    Finished(PyReadonlyArray1<'py, u8>),
    Draft(String, u64, u64, Vec<f32>, AnyGradient<'py>),
}

impl AnyRecord<'_> {
    fn outgoing(&self) -> Result<Outgoing<'_>> {
        Ok(match self {
            Self::Finished(array) => Outgoing::Finished(array.as_slice().map_err(|_| contiguous())?),
            Self::Draft(name, step, t, numbers, gradient) => {
                let (gradient, elements) = gradient.values()?;
                let rule = rule(numbers)?;
                Outgoing::Draft(Draft { unit: id(name), step: *step, t: *t, rule, elements, gradient })
            }
        })
    }
}

/// Writes records into a frame and a tail; returns the bytes of both.
#[pyfunction]
fn fill_frame(
    py: Python<'_>,
    mut frame: PyReadwriteArray1<'_, u8>,
    most: usize,
    records: Vec<AnyRecord<'_>>,
    mut tail: PyReadwriteArray1<'_, u8>,
) -> PyResult<(usize, usize)> {
    let records = records.iter().map(AnyRecord::outgoing).collect::<Result<Vec<_>>>()?;
    let frame = frame.as_slice_mut().map_err(|_| contiguous())?;
    let tail = tail.as_slice_mut().map_err(|_| contiguous())?;
    Ok(py.detach(|| replay::fill_frame(frame, most, &records, tail, &TorchPool))?)
}

fn rule(numbers: &[f32]) -> Result<Rule> {
    Rule::from_slice(numbers)
        .ok_or_else(|| Error::invalid(format!("numbers: expected 0, 9 or 10, got {}", numbers.len())))
}

/// Writes the header of a record whose payload is in place: from `encode_gradient` (with its result), or unencoded.
#[pyfunction]
#[pyo3(signature = (record, *, kind, name, step, t, elements, numbers, payload))]
#[allow(clippy::too_many_arguments)]
fn seal_record(
    py: Python<'_>,
    mut record: PyReadwriteArray1<'_, u8>,
    kind: &str,
    name: &str,
    step: u64,
    t: u64,
    elements: usize,
    numbers: Vec<f32>,
    payload: Option<Payload>,
) -> PyResult<usize> {
    let kind = match kind {
        "step" => Kind::Step,
        "no_step" => Kind::NoStep,
        "skip_all" => Kind::SkipAll,
        "full_state" => Kind::FullState,
        "proof" => Kind::Proof,
        _ => return Err(Error::invalid(format!("kind: got {kind:?}")).into()),
    };
    let bytes = record.as_slice_mut().map_err(|_| contiguous())?;
    if bytes.len() < HEADER_BYTES {
        return Err(Error::invalid(format!("record: expected {HEADER_BYTES} bytes or more")).into());
    }
    let (head, rest) = bytes.split_at_mut(HEADER_BYTES);
    let (encoding, payload_bytes, digest) =
        payload.unwrap_or_else(|| (0, rest.len(), py.detach(|| Header::digest(rest, &TorchPool))));
    let encoding = replay::Encoding::numbered(encoding)
        .filter(|_| payload_bytes <= rest.len())
        .ok_or_else(|| Error::invalid("payload: expected what encode_gradient returned"))?;
    let rule = rule(&numbers)?;
    let header = Header { kind, encoding, rule, unit: id(name), step, t, elements, payload_bytes };
    head.copy_from_slice(&header.seal(digest));
    Ok(HEADER_BYTES + payload_bytes)
}

/// Returns the digest of a state in parts, as used in proofs.
#[pyfunction]
fn state_digest(py: Python<'_>, parts: Vec<PyReadonlyArray1<'_, u8>>) -> PyResult<u64> {
    let parts = parts.iter().map(|part| part.as_slice().map_err(|_| contiguous()));
    let parts = parts.collect::<Result<Vec<&[u8]>>>()?;
    Ok(py.detach(|| replay::state_digest(&parts, &TorchPool)))
}

/// Returns the number that identifies a unit in records.
fn id(name: &str) -> u64 {
    digest(name.as_bytes())
}

fn code(fault: &Fault) -> &'static str {
    match fault {
        Fault::Corrupt(_) => "corrupt",
        Fault::UnknownVersion(_) => "unknown_version",
        Fault::WrongUnit(_) => "wrong_unit",
        Fault::WrongSize { .. } => "wrong_size",
        Fault::NoState { .. } => "no_state",
        Fault::Gap { .. } => "gap",
        Fault::Reordered { .. } => "reordered",
    }
}

/// See [`replay::Log`].
#[pyclass(frozen, module = "evermoe._native")]
struct ReplayLog(Mutex<replay::Log>);

/// Outcome of a record: code, unit, message, digest of the state.
type Received = (&'static str, Option<usize>, String, Option<u64>);
/// Epoch, version, step count of the unit, numbers, gradients, bytes, whether the data is unchanged, and whether there is
/// a digest of the state after the batch.
type Taken<'py> =
    (u64, u64, Option<u64>, Bound<'py, PyArray1<f32>>, Vec<Option<Bound<'py, PyAny>>>, usize, bool, bool);

fn received(accepted: std::result::Result<Accepted, (Option<usize>, Fault)>) -> Received {
    match accepted {
        Ok(Accepted::Logged { unit }) => ("ok", Some(unit), String::new(), None),
        Ok(Accepted::Duplicate { unit }) => ("duplicate", Some(unit), String::new(), None),
        Ok(Accepted::ApplyNow { unit }) => ("apply_now", Some(unit), String::new(), None),
        Ok(Accepted::Proof { unit }) => ("proof", Some(unit), String::new(), None),
        Ok(Accepted::State { unit, digest }) => ("state", Some(unit), String::new(), Some(digest)),
        Err((unit, fault)) => (code(&fault), unit, fault.to_string(), None),
    }
}

impl ReplayLog {
    /// Ignores poisoning: a panic in another thread leaves the log between two calls, or with one record less.
    fn lock(&self) -> MutexGuard<'_, replay::Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a function on a unit of the log, without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        unit: usize,
        act: impl Send + FnOnce(&mut replay::Log) -> T,
    ) -> PyResult<T> {
        let found = py.detach(|| {
            let mut log = self.lock();
            let units = log.units();
            (unit < units).then(|| act(&mut log)).ok_or(units)
        });
        found.map_err(|units| {
            Error::invalid(format!("unit: expected the place of one of {units} units, got {unit}")).into()
        })
    }
}

#[pymethods]
impl ReplayLog {
    #[new]
    fn new(units: Vec<(String, usize, usize)>, limit_bytes: usize) -> PyResult<Self> {
        let units: Vec<_> =
            units.iter().map(|(name, elements, bytes)| (id(name), *elements, *bytes)).collect();
        Ok(Self(Mutex::new(replay::Log::new(&units, limit_bytes)?)))
    }

    #[pyo3(signature = (record, hold = false))]
    fn accept(&self, py: Python<'_>, record: PyReadonlyArray1<'_, u8>, hold: bool) -> PyResult<Received> {
        let bytes = record.as_slice().map_err(|_| contiguous())?;
        let accepted = py.detach(|| match hold {
            true => self.lock().hold(bytes, &TorchPool),
            false => self.lock().accept(bytes, &TorchPool),
        });
        Ok(received(accepted))
    }

    /// Holds consecutive records, up to the first whose outcome is more than logged; returns their number, and that
    /// outcome.
    fn hold_all(
        &self,
        py: Python<'_>,
        records: PyReadonlyArray1<'_, u8>,
        sizes: Vec<usize>,
    ) -> PyResult<(usize, Option<Received>)> {
        let mut rest = records.as_slice().map_err(|_| contiguous())?;
        let (expected, got) =
            (sizes.iter().fold(0, |sum: usize, &size| sum.saturating_add(size)), rest.len());
        if expected != got {
            return Err(Error::invalid(format!("records: expected {expected} bytes, got {got}")).into());
        }
        let (held, other) = py.detach(|| {
            let mut log = self.lock();
            for (held, &size) in sizes.iter().enumerate() {
                let (record, after) = rest.split_at(size);
                rest = after;
                match log.hold(record, &TorchPool) {
                    Ok(Accepted::Logged { .. }) => {}
                    other => return (held, Some(other)),
                }
            }
            (sizes.len(), None)
        });
        Ok((held, other.map(received)))
    }

    fn take<'py>(
        &self,
        py: Python<'py>,
        unit: usize,
        max_steps: usize,
        until: u64,
    ) -> PyResult<Option<Taken<'py>>> {
        let Some(batch) = self.with(py, unit, |log| log.take(unit, max_steps, until, &TorchPool))? else {
            return Ok(None);
        };
        let is_intact = py.detach(|| batch.is_intact(&TorchPool));
        let gradients = batch.gradients.into_iter().map(|gradient| match gradient {
            None => None,
            Some(Stored::F32(values)) => Some(values.into_pyarray(py).into_any()),
            Some(Stored::Bf16(values)) => {
                let bits: Vec<u16> = values.into_iter().map(bf16::to_bits).collect();
                Some(bits.into_pyarray(py).into_any())
            }
        });
        let numbers = batch.numbers.into_pyarray(py);
        Ok(Some((
            batch.epoch,
            batch.version,
            batch.t,
            numbers,
            gradients.collect(),
            batch.bytes,
            is_intact,
            batch.has_proof,
        )))
    }

    fn applied(
        &self,
        py: Python<'_>,
        unit: usize,
        epoch: u64,
        version: u64,
        nbytes: usize,
    ) -> PyResult<bool> {
        self.with(py, unit, |log| log.applied(unit, epoch, version, nbytes))
    }

    fn release(&self, py: Python<'_>, clip: Option<f32>) {
        py.detach(|| match clip {
            Some(clip) => self.lock().release(clip),
            None => self.lock().skip(),
        });
    }

    fn begin(&self, py: Python<'_>, unit: usize, step: u64) -> PyResult<()> {
        self.with(py, unit, |log| log.begin(unit, step))
    }

    fn installed(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        self.with(py, unit, |log| log.installed(unit))
    }

    fn forget(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        self.with(py, unit, |log| log.forget(unit))
    }

    fn newest(&self, py: Python<'_>, unit: usize) -> PyResult<Option<u64>> {
        self.with(py, unit, |log| log.newest(unit))
    }

    fn version(&self, py: Python<'_>, unit: usize) -> PyResult<Option<u64>> {
        self.with(py, unit, |log| log.version(unit))
    }

    /// Returns the number of steps by which each unit's log is ahead of its state; none without a state.
    fn waiting(&self, py: Python<'_>) -> Vec<Option<u64>> {
        py.detach(|| {
            let log = self.lock();
            let steps = |unit| Some(log.newest(unit)?.saturating_sub(log.version(unit)?));
            (0..log.units()).map(steps).collect()
        })
    }

    fn proof(&self, py: Python<'_>, unit: usize) -> PyResult<Option<u64>> {
        self.with(py, unit, |log| log.proof(unit))
    }

    fn needs_state(&self, py: Python<'_>, unit: usize) -> PyResult<bool> {
        self.with(py, unit, |log| log.needs_state(unit))
    }

    fn fullest(&self, py: Python<'_>) -> Option<usize> {
        py.detach(|| self.lock().fullest())
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().bytes())
    }
}
