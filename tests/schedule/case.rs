//! Requests for chunk plans, and properties of every plan.

use super::idle;
use evermoe::schedule::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Start and seconds of each window.
pub(crate) type Spans = Vec<(f64, f64)>;

/// A request with owned parts.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) pieces: Vec<CopyItem>,
    pub(crate) own: Vec<(f64, f64)>,
    /// Rank, windows, clock offset.
    pub(crate) receivers: Vec<(usize, Spans, f64)>,
    pub(crate) link: Link,
    pub(crate) memory: Memory,
    pub(crate) max_steps: usize,
}

pub(crate) const STEP: f64 = 100.0;

impl Case {
    pub(crate) fn plan(&self, policy: Policy) -> ChunkPlan {
        let windows = idle(&self.own, STEP);
        let receivers = self.receivers();
        plan_chunks(&self.request(&windows, &receivers, policy)).unwrap()
    }

    /// A plan over `version_steps` steps, and the result of [`version_steps`].
    pub(crate) fn over(&self, policy: Policy, version_steps: usize, most: usize) -> (ChunkPlan, usize) {
        let (windows, receivers) = (idle(&self.own, STEP), self.receivers());
        let request = Request { version_steps, ..self.request(&windows, &receivers, policy) };
        (plan_chunks(&request).unwrap(), evermoe::schedule::version_steps(&request, most).unwrap())
    }

    pub(crate) fn receivers(&self) -> Vec<Receiver> {
        let receivers = self.receivers.iter();
        receivers
            .map(|(rank, at, clock_offset)| Receiver {
                rank: *rank,
                windows: idle(at, STEP),
                clock_offset: *clock_offset,
            })
            .collect()
    }

    pub(crate) fn request<'a>(
        &'a self,
        windows: &'a Windows,
        receivers: &'a [Receiver],
        policy: Policy,
    ) -> Request<'a> {
        let Self { pieces, link, memory, max_steps, .. } = self;
        let (link, memory, max_steps, version_steps) = (*link, *memory, *max_steps, 1);
        Request { pieces, windows, receivers, link, memory, policy, max_steps, version_steps }
    }
}

/// Windows (start, seconds) in integer seconds, at least a second apart.
pub(crate) fn windows_at() -> impl Strategy<Value = Vec<(f64, f64)>> {
    prop::collection::vec((1_u32..6, 1_u32..14), 0..6).prop_map(|rows| {
        let mut start = 0.0;
        let mut found = Vec::new();
        for (gap, length) in rows {
            start += f64::from(gap);
            if start + f64::from(length) < STEP {
                found.push((start, f64::from(length)));
                start += f64::from(length);
            }
        }
        found
    })
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
    let pieces = prop::collection::vec((0_u64..60, 1_usize..4), 0..6);
    let drain = prop_oneof![2 => Just(None), 1 => (0_u32..3, 1_u32..9).prop_map(Some)];
    let receivers = prop::collection::vec((windows_at(), -30_i32..30), 3);
    let sizes = (1_u64..30, 1_u64..5, 1_usize..9);
    (pieces, windows_at(), receivers, (0_u32..4, 1_u32..9), drain, sizes, 0_usize..4).prop_map(
        |(pieces, own, receivers, (alpha, beta), drain, (size, buffers, max_steps), known)| {
            let link = |(alpha, beta)| Link { alpha: f64::from(alpha) / 2.0, beta: f64::from(beta) };
            let piece = |(unit, (bytes, copies)): (usize, (u64, usize))| CopyItem {
                unit: format!("unit{unit}"),
                bytes,
                destinations: (0..copies).map(|copy| (unit + copy) % 3).collect(),
            };
            let receivers = receivers.into_iter().enumerate().take(known);
            Case {
                pieces: pieces.into_iter().enumerate().map(piece).collect(),
                own,
                receivers: receivers.map(|(rank, (at, offset))| (rank, at, f64::from(offset))).collect(),
                link: link((alpha, beta)),
                memory: Memory {
                    bytes: size * buffers + size.min(buffers) - 1,
                    buffers,
                    drain: drain.map(link),
                },
                max_steps,
            }
        },
    )
}

pub(crate) const EPSILON: f64 = 1e-9;

/// Checks the properties of every plan.
pub(crate) fn check_plan(case: &Case, plan: &ChunkPlan, policy: Policy) {
    check_plan_over(case, plan, policy, if policy == Policy::Auto { case.max_steps } else { 1 });
}

/// The same for a plan over at most `most` steps.
pub(crate) fn check_plan_over(case: &Case, plan: &ChunkPlan, policy: Policy, most: usize) {
    assert!((1..=most).contains(&plan.reason.steps_per_version));
    check_bytes(case, plan);
    check_places(case, plan);
    check_reason(case, plan, policy);
    assert_eq!(&ChunkPlan::from_json(&plan.to_json()).unwrap(), plan);
}

/// Every byte goes to every destination exactly once.
fn check_bytes(case: &Case, plan: &ChunkPlan) {
    let mut parts: BTreeMap<(usize, usize), Vec<(u64, u64)>> = BTreeMap::new();
    for chunk in &plan.chunks {
        assert!(chunk.bytes > 0 && chunk.bytes <= case.memory.bytes / case.memory.buffers, "{chunk:?}");
        assert!((chunk.seconds - case.link.seconds(chunk.bytes)).abs() < EPSILON);
        parts.entry((chunk.unit, chunk.destination)).or_default().push((chunk.offset, chunk.bytes));
    }
    for (unit, piece) in case.pieces.iter().enumerate() {
        for &destination in &piece.destinations {
            let mut parts = parts.remove(&(unit, destination)).unwrap_or_default();
            parts.sort_unstable();
            let end = parts.iter().fold(0, |end, &(offset, bytes)| {
                assert_eq!(offset, end, "unit {unit} for {destination}: {parts:?}");
                offset + bytes
            });
            assert_eq!(end, piece.bytes, "unit {unit} for {destination}");
        }
    }
    assert!(parts.is_empty(), "{parts:?}");
}

/// Chunks are inside windows of both ends, consecutive, and there are enough sub-buffers.
fn check_places(case: &Case, plan: &ChunkPlan) {
    let windows = idle(&case.own, STEP);
    let steps = plan.reason.steps_per_version;
    let mut busy: Vec<(f64, f64, u64)> = Vec::new();
    for chunk in &plan.chunks {
        let Some(window) = chunk.window else { continue };
        let window = &windows.windows[window];
        assert_eq!(window.resource, Resource::Network);
        assert!(
            chunk.start >= 0.0 && chunk.start + chunk.seconds <= window.seconds + EPSILON,
            "{chunk:?} {window:?}"
        );
        let [start, end] = [window.start + chunk.start, window.start + chunk.start + chunk.seconds];
        if let Some((_, at, offset)) = case.receivers.iter().find(|(rank, ..)| *rank == chunk.destination) {
            let inside = |&(open, length): &(f64, f64)| {
                [-1.0, 0.0, 1.0].iter().any(|turn| {
                    let open = open + offset + turn * STEP;
                    start >= open - EPSILON && end <= open + length + EPSILON
                })
            };
            assert!(at.iter().any(inside), "{chunk:?} is outside the receiver's {at:?} + {offset}");
        }
        let first = chunk.step as f64 * STEP;
        busy.push((first + start, first + end, chunk.bytes));
    }
    assert!(busy.is_sorted_by(|a, b| a.1 <= b.0 + EPSILON), "in order and not at once: {busy:?}");
    assert!(plan.chunks.is_sorted_by_key(|chunk| (chunk.step, chunk.window.is_none())));
    // The same plan again for the next version: sub-buffers are not needed twice.
    let again: Vec<_> = busy
        .iter()
        .map(|&(start, end, bytes)| (start + steps as f64 * STEP, end + steps as f64 * STEP, bytes))
        .collect();
    busy.extend(again);
    let free = |end: f64, bytes: u64| end + case.memory.drain.map_or(0.0, |drain| drain.seconds(bytes));
    for (number, &(start, ..)) in busy.iter().enumerate() {
        let used =
            busy[..=number].iter().filter(|&&(_, end, bytes)| free(end, bytes) > start + EPSILON).count();
        assert!(used as u64 <= case.memory.buffers, "{used} sub-buffers at {start}: {busy:?}");
    }
}

/// The numbers of the reason are right.
fn check_reason(case: &Case, plan: &ChunkPlan, policy: Policy) {
    let reason = &plan.reason;
    let steps = reason.steps_per_version;
    let outside: Vec<&Chunk> = plan.chunks.iter().filter(|chunk| chunk.window.is_none()).collect();
    assert_eq!(reason.fits, outside.is_empty());
    assert_eq!(reason.outside_bytes, outside.iter().map(|chunk| chunk.bytes).sum::<u64>());
    assert_eq!(reason.bytes, plan.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>());
    let used: f64 =
        plan.chunks.iter().filter(|chunk| chunk.window.is_some()).map(|chunk| chunk.seconds).sum();
    assert!((reason.used_seconds - used).abs() < 1e-6, "{reason:?}");
    assert!(used <= reason.available_seconds + 1e-6, "{reason:?}");
    let late: f64 = outside.iter().map(|chunk| chunk.seconds).sum();
    if policy != Policy::Moetion {
        assert!(reason.delay_seconds >= late / steps as f64 - 1e-6, "{reason:?}");
        let none = case.memory.drain.is_none();
        assert!(!none || (reason.delay_seconds - late / steps as f64).abs() < 1e-6, "{reason:?}");
    }
    if reason.fits {
        assert_eq!((reason.delay_seconds, reason.steps_in_windows), (0.0, Some(steps)));
    }
}

pub(crate) fn complete(mut case: Case) -> Case {
    for rank in case.receivers.len()..3 {
        case.receivers.push((rank, case.own.clone(), 0.0));
    }
    case
}

pub(crate) fn simple(pieces: &[(u64, &[usize])], own: &[(f64, f64)], alpha: f64) -> Case {
    let piece = |(unit, &(bytes, ranks)): (usize, &(u64, &[usize]))| CopyItem {
        unit: format!("unit{unit}"),
        bytes,
        destinations: ranks.to_vec(),
    };
    Case {
        pieces: pieces.iter().enumerate().map(piece).collect(),
        own: own.to_vec(),
        receivers: Vec::new(),
        link: Link { alpha, beta: 1.0 },
        memory: Memory { bytes: 100, buffers: 1, drain: None },
        max_steps: 8,
    }
}

/// (step, start of the window, unit, offset, bytes) of each chunk.
pub(crate) fn placed(case: &Case, plan: &ChunkPlan) -> Vec<(usize, Option<f64>, usize, u64, u64)> {
    let windows = idle(&case.own, STEP);
    let start = |window: usize| windows.windows[window].start;
    plan.chunks
        .iter()
        .map(|chunk| (chunk.step, chunk.window.map(start), chunk.unit, chunk.offset, chunk.bytes))
        .collect()
}
