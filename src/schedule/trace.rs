//! Chrome's trace event format, which Perfetto reads: one process per rank, one track per resource.

use super::plan::{Chunk, ChunkPlan};
use super::span::{Resource, Span, StepProfile, check};
use super::windows::{Anchor, Window, Windows};
use crate::ensure;
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const CHUNKS: usize = 6;
const COPIES: usize = 7;

/// Names of the tracks; windows of different resources overlap, so each resource has a track for its windows.
const TRACKS: [&str; 8] = [
    "compute",
    "network",
    "host link",
    "compute windows",
    "network windows",
    "host link windows",
    "chunks",
    "copies",
];

/// Distance between the numbers of tracks of different kinds; overlapping events go to tracks in between.
const LANES: usize = 1000;

/// A chunk that was actually sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// Start, in seconds on the clock of the trace's `start`.
    pub start: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Number of bytes sent.
    pub bytes: u64,
    /// The rank that received them.
    pub peer: usize,
    /// Position of the window in which it began; none outside of all windows.
    pub window: Option<usize>,
}

/// One event: its place and its content.
struct Event {
    track: usize,
    start: f64,
    seconds: f64,
    body: Value,
}

/// Returns consecutive steps of one rank, from `start` on, as JSON in Chrome's trace event format.
///
/// `ph` is "X", `ts` and `dur` are microseconds, `pid` is the rank. Windows are shown in each step where its own spans
/// open them, and the chunks of the plan's steps follow in order. `sent` shows chunks that were sent during these
/// steps. Spans that overlap without nesting go to a second track.
///
/// # Errors
/// [`Error::Invalid`] for invalid times, or a plan whose windows are not in `windows`.
pub fn chrome_trace(
    steps: &[StepProfile],
    windows: Option<&Windows>,
    plan: Option<&ChunkPlan>,
    sent: &[Sent],
    rank: usize,
    start: f64,
) -> Result<String> {
    check(steps)?;
    ensure!(start.is_finite(), "start: expected finite seconds, got {start}");
    let windows = windows.map_or(&[][..], |windows| &windows.windows);
    let known = |chunk: &Chunk| chunk.window.is_none_or(|window| window < windows.len());
    ensure!(
        plan.is_none_or(|plan| plan.chunks.iter().all(known)),
        "plan: a chunk is in a window that is not one of the {} of windows",
        windows.len()
    );
    let mut events = Vec::new();
    let mut begin = start;
    for (number, step) in steps.iter().enumerate() {
        events.extend(step.spans.iter().map(|span| span_event(span, begin)));
        let opens: Vec<Option<f64>> = windows.iter().map(|window| opens(window, step)).collect();
        for (number, (window, open)) in windows.iter().zip(&opens).enumerate() {
            events.extend(open.map(|open| window_event(number, window, begin + open)));
        }
        if let Some(plan) = plan {
            let turn = number % plan.reason.steps_per_version.max(1);
            events.extend(
                chunk_events(plan, turn, windows, &opens)
                    .map(|event| Event { start: begin + event.start, ..event }),
            );
        }
        begin += step.seconds;
    }
    let wrong = sent.iter().position(|each| !(each.start + each.seconds).is_finite() || each.seconds < 0.0);
    ensure!(wrong.is_none(), "sent: number {} has a time that is none", wrong.unwrap_or_default());
    let meanwhile = |each: &&Sent| each.start + each.seconds >= start && each.start <= begin;
    events.extend(sent.iter().filter(meanwhile).map(sent_event));
    Ok(json!({ "displayTimeUnit": "ms", "traceEvents": to_json(events, rank) }).to_string())
}

/// Opening of the window in this particular step; none if the step lacks its anchor.
fn opens(window: &Window, step: &StepProfile) -> Option<f64> {
    let Anchor::After { name, occurrence } = &window.anchor else { return Some(window.offset) };
    let mut spans: Vec<&Span> =
        step.spans.iter().filter(|span| span.resource == window.resource && span.name == *name).collect();
    spans.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.seconds.total_cmp(&a.seconds)));
    spans.get(*occurrence).map(|span| span.end() + window.offset)
}

fn span_event(span: &Span, begin: f64) -> Event {
    let Span { name, kind, resource, start, seconds, bytes, peers } = span;
    let body = json!({ "name": name, "cat": kind, "args": { "bytes": bytes, "peers": peers } });
    Event { track: *resource as usize, start: begin + start, seconds: *seconds, body }
}

fn window_event(number: usize, window: &Window, start: f64) -> Event {
    let Window { resource, anchor, expected, jitter, seconds, .. } = window;
    let args = json!({
        "number": number, "after": anchor.to_string(), "expected_us": expected * 1e6, "jitter_us": jitter * 1e6,
    });
    let body = json!({ "name": "window", "cat": "window", "args": args });
    Event { track: Resource::ALL.len() + *resource as usize, start, seconds: *seconds, body }
}

/// The chunks of one step of the plan; those without a window follow the last window that has chunks.
fn chunk_events<'a>(
    plan: &'a ChunkPlan,
    step: usize,
    windows: &'a [Window],
    opens: &'a [Option<f64>],
) -> impl Iterator<Item = Event> + 'a {
    let used = plan.chunks.iter().filter_map(|chunk| chunk.window);
    let resource = used.map(|window| windows[window].resource).next().unwrap_or(Resource::Network);
    let of = windows.iter().zip(opens).filter(move |(window, _)| window.resource == resource);
    let last = of.filter_map(|(window, open)| Some((*open)? + window.seconds)).fold(0.0, f64::max);
    let first = plan.chunks.partition_point(move |chunk| chunk.step < step);
    plan.chunks[first..].iter().take_while(move |chunk| chunk.step == step).filter_map(move |chunk| {
        let open = chunk.window.map_or(Some(last), |window| opens[window])?;
        let Chunk { window, unit, offset, bytes, destination, start, seconds, .. } = *chunk;
        let args = json!({
            "offset": offset, "bytes": bytes, "destination": destination, "window": window, "step": step,
        });
        let body = json!({ "name": plan.units[unit], "cat": "chunk", "args": args });
        Some(Event { track: CHUNKS, start: open + start, seconds, body })
    })
}

fn sent_event(sent: &Sent) -> Event {
    let Sent { start, seconds, bytes, peer, window } = *sent;
    let args = json!({ "bytes": bytes, "destination": peer, "window": window });
    let body = json!({ "name": format!("copy to {peer}"), "cat": "copy", "args": args });
    Event { track: COPIES, start, seconds, body }
}

/// Events, preceded by the names of process and tracks.
fn to_json(mut events: Vec<Event>, rank: usize) -> Vec<Value> {
    // By start; of nested ones the outer first.
    events.sort_by(|a, b| {
        a.track.cmp(&b.track).then(a.start.total_cmp(&b.start)).then(b.seconds.total_cmp(&a.seconds))
    });
    let mut lanes: BTreeMap<usize, Vec<Vec<f64>>> = BTreeMap::new();
    let mut found = vec![
        json!({ "ph": "M", "pid": rank, "name": "process_name", "args": { "name": format!("rank {rank}") } }),
    ];
    let mut spans = Vec::new();
    for Event { track, start, seconds, mut body } in events {
        let lane = lane(lanes.entry(track).or_default(), start, start + seconds);
        let place = json!({ "ph": "X", "pid": rank, "tid": track * LANES + lane, "ts": start * 1e6, "dur": seconds * 1e6 });
        if let (Value::Object(body), Value::Object(place)) = (&mut body, place) {
            body.extend(place);
        }
        spans.push(body);
    }
    for (track, lanes) in lanes {
        for lane in 0..lanes.len() {
            let name =
                if lane == 0 { TRACKS[track].to_owned() } else { format!("{} {}", TRACKS[track], lane + 1) };
            let tid = track * LANES + lane;
            found.push(json!({ "ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": { "name": name } }));
            found.push(json!({ "ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": { "sort_index": tid } }));
        }
    }
    found.extend(spans);
    found
}

/// The first lane in which the event follows or nests. A lane is the stack of the ends of open events.
fn lane(lanes: &mut Vec<Vec<f64>>, start: f64, end: f64) -> usize {
    // Sums of seconds are rounded; viewers count nanoseconds.
    const ROUNDING: f64 = 1e-9;
    for (number, open) in lanes.iter_mut().enumerate() {
        while open.last().is_some_and(|last| *last <= start + ROUNDING) {
            open.pop();
        }
        if open.last().is_none_or(|last| end <= last + ROUNDING) {
            open.push(end);
            return number;
        }
    }
    lanes.push(vec![end]);
    lanes.len() - 1
}

/// Merges the traces of several ranks.
///
/// # Errors
/// [`Error::Invalid`] if a text is no trace, or two are of the same rank.
pub fn merge_traces(traces: &[String]) -> Result<String> {
    let mut all = Vec::new();
    let mut from: BTreeMap<u64, usize> = BTreeMap::new();
    for (number, text) in traces.iter().enumerate() {
        let wrong = |what: String| {
            Error::invalid(format!("traces: number {number} is not a trace of one rank: {what}"))
        };
        let mut trace: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let events = trace.get_mut("traceEvents").and_then(Value::as_array_mut).map(std::mem::take);
        for event in events.ok_or_else(|| wrong("traceEvents is missing".into()))? {
            let rank = event.get("pid").and_then(Value::as_u64);
            let rank = rank.ok_or_else(|| wrong(format!("pid is missing in {event}")))?;
            let first = *from.entry(rank).or_insert(number);
            ensure!(first == number, "traces: numbers {first} and {number} are both of rank {rank}");
            all.push(event);
        }
    }
    Ok(json!({ "displayTimeUnit": "ms", "traceEvents": all }).to_string())
}
