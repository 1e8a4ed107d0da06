//! The chunk plan: which part of which unit is sent to which rank in which window, and why.

use super::capacity::{Load, Work};
use super::pace::{Pace, ROUNDING, total};
use super::request::{MAX_CHUNKS, MAX_STEPS, Policy, Request};
use super::span::Resource;
use super::stream::{Filled, stream};
use super::{auto, baft};
use crate::ensure;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Step of the version, from 0.
    pub step: usize,
    /// Position in [`Windows::windows`](super::Windows); none if no window has room for it.
    pub window: Option<usize>,
    /// Position in [`ChunkPlan::units`].
    pub unit: usize,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The rank that receives them.
    pub destination: usize,
    /// Seconds from the opening of the window. Without a window: seconds from the end of the step's last window, or,
    /// for `moetion`, which sends during compute, from the step's start.
    pub start: f64,
    /// Seconds of the transfer.
    pub seconds: f64,
}

/// Properties of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// Whether all bytes are in windows.
    pub fits: bool,
    /// Number of steps after which a version is complete.
    pub steps_per_version: usize,
    /// Number of steps in windows alone: the checkpoint interval without delay; none if more than 4096.
    pub steps_in_windows: Option<usize>,
    /// Seconds by which copying delays a step, averaged over the version's steps.
    pub delay_seconds: f64,
    /// Seconds of windows that transfers use, over all steps of the version.
    pub used_seconds: f64,
    /// Seconds of windows, over all steps of the version.
    pub available_seconds: f64,
    /// Bytes of the version, counted once per destination.
    pub bytes: u64,
    /// Bytes outside of windows.
    pub outside_bytes: u64,
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps_per_version: steps, used_seconds: used, available_seconds: available, .. } = *self;
        let plural = if steps == 1 { "step" } else { "steps" };
        write!(out, "a version takes {steps} {plural} and {used:.6} of {available:.6} s of windows")?;
        if self.fits {
            return write!(out, "; nothing is delayed");
        }
        let Self { outside_bytes, bytes, delay_seconds, .. } = *self;
        write!(
            out,
            "; {outside_bytes} of {bytes} bytes have no window and delay a step by {delay_seconds:.6} s"
        )?;
        match self.steps_in_windows {
            Some(steps) => write!(out, "; in windows alone it would take {steps} steps"),
            None => write!(out, "; in windows alone it would take more than {MAX_STEPS} steps"),
        }
    }
}

/// Plan of the transfers of one version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkPlan {
    /// Names of the units.
    pub units: Vec<String>,
    /// Chunks in the order in which they are sent: by step, then by window and start, those without a window last.
    pub chunks: Vec<Chunk>,
    /// Properties of the plan.
    pub reason: Reason,
}

/// Plans the transfers of one version.
///
/// A chunk lies within the usable seconds of a window of the sender. For a destination in `receivers` it also lies
/// within one of the destination's windows. Chunks do not overlap, and no more sub-buffers are in use than exist,
/// drains included. Destinations are served one after the other, so that the first complete copy exists early.
///
/// ```
/// use evermoe::schedule::*;
/// let send = |start| Span {
///     name: "send".into(), kind: Kind::Send, resource: Resource::Network, start, seconds: 1.0, bytes: 64, peers: vec![1],
/// };
/// let step = StepProfile { seconds: 8.0, spans: vec![send(0.0), send(4.0)] };
/// let options = WindowOptions { gamma: 1.0, ..Default::default() };
/// let windows = find_windows(&[step], &options)?; // two of 3 seconds
/// let request = Request {
///     pieces: &[CopyItem { unit: "expert".into(), bytes: 50, destinations: vec![1] }],
///     windows: &windows,
///     receivers: &[],
///     link: Link { alpha: 1.0, beta: 10.0 }, // 3 seconds for a chunk of 20 bytes
///     memory: Memory { bytes: 40, buffers: 2, drain: None },
///     policy: Policy::Gemini,
///     max_steps: 4,
///     version_steps: 1,
/// };
/// let plan = plan_chunks(&request)?;
/// assert_eq!(plan.chunks.iter().map(|chunk| chunk.bytes).collect::<Vec<_>>(), [20, 20, 10]);
/// assert_eq!((plan.reason.delay_seconds, plan.reason.steps_in_windows), (2.0, Some(2))); // the last 10 bytes
/// let plan = plan_chunks(&Request { policy: Policy::Auto, ..request })?;
/// assert_eq!((plan.reason.delay_seconds, plan.reason.steps_per_version), (0.0, 2));
/// let plan = plan_chunks(&Request { version_steps: 2, ..request })?;
/// assert_eq!(plan.chunks.iter().map(|chunk| (chunk.step, chunk.bytes)).collect::<Vec<_>>(), [(0, 20), (0, 20), (1, 10)]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] naming the field, also if a version would be more than 2^22 chunks.
pub fn plan_chunks(request: &Request<'_>) -> Result<ChunkPlan> {
    request.check()?;
    let work = Work::new(request);
    let full = Pace::full(request.link, request.memory);
    let chunks = work.chunks(&full);
    ensure!(
        chunks <= MAX_CHUNKS,
        "memory: sub-buffers of {} bytes make {chunks} chunks of a version; expected at most {MAX_CHUNKS}: larger or \
         fewer sub-buffers",
        full.most
    );
    let (pace, filled) = match request.policy {
        Policy::Auto => auto::fill(request, &work),
        _ => (full, over(request, &work, &full, request.version_steps)),
    };
    let reason = reason(request, &work, &pace, &filled);
    let chunks = cut(request, &pace, &filled)?;
    Ok(ChunkPlan { units: request.pieces.iter().map(|piece| piece.unit.clone()).collect(), chunks, reason })
}

impl Filled {
    /// All loads, inside and outside of windows.
    pub(super) fn loads(&self) -> impl Iterator<Item = &Load> {
        self.runs.iter().map(|run| &run.load).chain(&self.rest)
    }
}

/// Returns the minimum number of steps, up to `most`, over which a version delays no step under the request's policy.
///
/// These are the n iterations of a BAFT checkpoint; the same rule is used for the other policies. If a version delays
/// steps even over `most` steps, the result is `most`, as each step then waits for only a part of it. If the windows
/// take nothing, it is 1. The request's own `version_steps` is ignored.
///
/// ```
/// use evermoe::schedule::*;
/// let send = |start| Span {
///     name: "send".into(), kind: Kind::Send, resource: Resource::Network, start, seconds: 1.0, bytes: 64, peers: vec![1],
/// };
/// let step = StepProfile { seconds: 8.0, spans: vec![send(0.0), send(4.0)] };
/// let options = WindowOptions { gamma: 1.0, ..Default::default() };
/// let request = |bytes| [CopyItem { unit: "expert".into(), bytes, destinations: vec![1] }];
/// let windows = find_windows(&[step], &options)?; // two of 3 seconds, each for a chunk of 20 bytes
/// let steps = |bytes, most| version_steps(&Request {
///     pieces: &request(bytes), windows: &windows, receivers: &[],
///     link: Link { alpha: 1.0, beta: 10.0 }, memory: Memory { bytes: 40, buffers: 2, drain: None },
///     policy: Policy::Gemini, max_steps: 1, version_steps: 1,
/// }, most);
/// assert_eq!((steps(40, 8)?, steps(50, 8)?, steps(130, 8)?, steps(400, 8)?), (1, 2, 4, 8));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// As [`plan_chunks`]; also [`Error::Invalid`] for a `most` that is not 1 to 4096.
pub fn version_steps(request: &Request<'_>, most: usize) -> Result<usize> {
    Request { max_steps: most, ..*request }.check()?;
    let work = Work::new(request);
    let pace = Pace::full(request.link, request.memory);
    let found = match request.policy {
        Policy::Auto => auto::fill(&Request { max_steps: most, ..*request }, &work).1,
        Policy::Moetion => {
            let delays = |steps: &usize| {
                moetion_delay(request, &pace, &over(request, &work, &pace, *steps), *steps) > 0.0
            };
            let copy: f64 = total(work.in_order().iter().map(|load| pace.seconds(load.bytes)));
            // Bubbles and compute together are no longer than the steps.
            let fewest = ((copy / request.windows.step_seconds) as usize).clamp(1, most);
            return Ok((fewest..most).find(|steps| !delays(steps)).unwrap_or(most));
        }
        _ => over(request, &work, &pace, most),
    };
    Ok(match (found.rest.is_empty(), found.runs.is_empty()) {
        (true, _) => found.steps.max(1),
        (false, true) => 1,
        (false, false) => most,
    })
}

/// Fills the windows of `steps` steps, for policies that do not choose the number.
fn over(request: &Request<'_>, work: &Work, pace: &Pace, steps: usize) -> Filled {
    let mut filled = match request.policy {
        Policy::Baft => baft::fill(work, pace, steps),
        Policy::Moetion => split(request, work, pace, steps),
        _ => stream(&work.in_order(), &work.intervals, pace, steps),
    };
    if !filled.rest.is_empty() {
        filled.steps = steps;
    }
    filled
}

/// MoEtion: of n chunks that take `t_copy`, the first ⌊n · `t_bubble` ÷ `t_copy`⌋ may use the bubble, which is that of
/// all steps of the version.
fn split(request: &Request<'_>, work: &Work, pace: &Pace, steps: usize) -> Filled {
    let loads = work.in_order();
    let [bubble, copy] = [
        window_seconds(request) * steps as f64,
        loads.iter().map(|load| pace.seconds(load.bytes)).sum::<f64>(),
    ];
    let chunks: u64 = loads.iter().map(|load| pace.chunks(load.bytes)).sum();
    let mut quota = quota(chunks, bubble, copy);
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for load in loads {
        let count = pace.chunks(load.bytes).min(quota);
        quota -= count;
        let (first, rest) = load.split(load.bytes.min(count.saturating_mul(pace.most)));
        inside.extend((first.bytes > 0).then_some(first));
        outside.extend((rest.bytes > 0).then_some(rest));
    }
    let mut filled = stream(&inside, &work.intervals, pace, steps);
    filled.rest.extend(outside);
    filled
}

/// ⌊n · `bubble` ÷ `copy`⌋, at most n. Both are rounded sums of seconds: a quotient that misses a whole number by
/// rounding alone counts as that number.
fn quota(chunks: u64, bubble: f64, copy: f64) -> u64 {
    let available = chunks as f64 * (bubble + ROUNDING);
    let mut quota = if copy > 0.0 { (available / copy).min(chunks as f64) as u64 } else { chunks };
    // The division is rounded, too.
    while quota < chunks && (quota + 1) as f64 * copy <= available {
        quota += 1;
    }
    quota
}

/// Seconds of the sender's windows in a step.
fn window_seconds(request: &Request<'_>) -> f64 {
    total(request.windows.of(Resource::Network).map(|(_, window)| window.seconds))
}

/// Seconds of delay per step if chunks without a window are sent during compute, which hides them for as long as it
/// lasts.
fn moetion_delay(request: &Request<'_>, pace: &Pace, filled: &Filled, steps: usize) -> f64 {
    let outside = total(filled.rest.iter().map(|load| pace.seconds(load.bytes)));
    let compute = (request.windows.step_seconds - window_seconds(request)).max(0.0);
    (outside - compute * steps as f64).max(0.0) / steps as f64
}

fn reason(request: &Request<'_>, work: &Work, pace: &Pace, filled: &Filled) -> Reason {
    let steps = filled.steps.max(1);
    let available = window_seconds(request);
    let fits = filled.rest.is_empty();
    let delay_seconds = match request.policy {
        Policy::Moetion => moetion_delay(request, pace, filled, steps),
        _ => auto::delay(pace, filled),
    };
    let alone = || match request.policy {
        Policy::Baft => baft::fill(work, pace, MAX_STEPS),
        _ => stream(&work.in_order(), &work.intervals, pace, MAX_STEPS),
    };
    let steps_in_windows =
        if fits { Some(steps) } else { Some(alone()).filter(|all| all.rest.is_empty()).map(|all| all.steps) };
    let transfer = |load: &Load| {
        let tail = load.bytes % pace.most;
        let full = (load.bytes / pace.most) as f64 * pace.transfer(pace.most);
        if tail > 0 { full + pace.transfer(tail) } else { full }
    };
    Reason {
        fits,
        steps_per_version: steps,
        steps_in_windows,
        delay_seconds,
        used_seconds: total(filled.runs.iter().map(|run| transfer(&run.load))),
        available_seconds: available * steps as f64,
        bytes: filled.loads().map(|load| load.bytes).sum(),
        outside_bytes: filled.rest.iter().map(|load| load.bytes).sum(),
    }
}

/// The chunks of the runs, and of the rest, which is spread over the ends of the steps.
fn cut(request: &Request<'_>, pace: &Pace, filled: &Filled) -> Result<Vec<Chunk>> {
    let steps = filled.steps.max(1);
    let windows = &request.windows.windows;
    let outside: u64 = filled.rest.iter().map(|load| pace.chunks(load.bytes)).sum();
    let mut late = vec![Vec::new(); steps];
    let mut ends = vec![0.0; steps];
    let mut number = 0_u64;
    for load in &filled.rest {
        for_each_chunk(load, pace, |part| {
            let step = (u128::from(number) * steps as u128 / u128::from(outside)) as usize;
            number += 1;
            late[step].push(chunk(step, None, ends[step], part, pace));
            ends[step] += pace.cost(part.bytes);
        });
    }
    let mut chunks = Vec::new();
    let mut runs = filled.runs.iter().peekable();
    for (step, late) in late.into_iter().enumerate() {
        while let Some(run) = runs.next_if(|run| run.step == step) {
            let mut start = run.start - windows[run.window].start;
            for_each_chunk(&run.load, pace, |part| {
                chunks.push(chunk(step, Some(run.window), start, part, pace));
                start += pace.cost(part.bytes);
            });
        }
        chunks.extend(late);
    }
    Ok(chunks)
}

fn chunk(step: usize, window: Option<usize>, start: f64, part: Load, pace: &Pace) -> Chunk {
    let Load { unit, destination, offset, bytes, .. } = part;
    Chunk { step, window, unit, offset, bytes, destination, start, seconds: pace.transfer(bytes) }
}

fn for_each_chunk(load: &Load, pace: &Pace, mut each: impl FnMut(Load)) {
    let mut rest = *load;
    while rest.bytes > 0 {
        let (part, others) = rest.split(pace.most.min(rest.bytes));
        each(part);
        rest = others;
    }
}

impl ChunkPlan {
    /// Returns the plan as JSON, for the executor or a file.
    pub fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Reads the JSON of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`Error::Invalid`] for other text: also for more steps or chunks than a plan may have, chunks out of order, and
    /// invalid numbers.
    pub fn from_json(text: &str) -> Result<Self> {
        let plan: Self = serde_json::from_str(text)
            .map_err(|error| Error::invalid(format!("text: expected the JSON of a chunk plan: {error}")))?;
        let Self { units, chunks, reason } = &plan;
        let steps = reason.steps_per_version;
        ensure!(
            (1..=MAX_STEPS).contains(&steps),
            "text: expected a version of 1 to {MAX_STEPS} steps, got {steps}"
        );
        ensure!(
            chunks.len() as u64 <= MAX_CHUNKS,
            "text: expected at most {MAX_CHUNKS} chunks, got {}",
            chunks.len()
        );
        let seconds = [reason.delay_seconds, reason.used_seconds, reason.available_seconds];
        ensure!(
            seconds.iter().all(|seconds| seconds.is_finite() && *seconds >= 0.0),
            "text: expected finite seconds in the reason"
        );
        let is_chunk = |chunk: &Chunk| {
            let times = [chunk.start, chunk.seconds];
            chunk.unit < units.len()
                && chunk.step < steps
                && chunk.offset.checked_add(chunk.bytes).is_some()
                && times.iter().all(|time| time.is_finite() && *time >= 0.0)
        };
        if let Some(wrong) = chunks.iter().position(|chunk| !is_chunk(chunk)) {
            ensure!(false, "text: chunk {wrong} has a unit, step, range or time that the plan does not");
        }
        ensure!(
            chunks.is_sorted_by_key(|chunk| chunk.step),
            "text: expected chunks in the order of their steps"
        );
        Ok(plan)
    }
}
