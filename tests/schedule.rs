//! Windows, chunk plans, traces: what must hold for all inputs, and everything on small sizes.

use evermoe::schedule::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn span(name: &str, resource: Resource, start: f64, seconds: f64) -> Span {
    Span { name: name.into(), kind: Kind::Collective, resource, start, seconds, bytes: 8, peers: vec![1] }
}

fn network(name: &str, start: f64, seconds: f64) -> Span {
    span(name, Resource::Network, start, seconds)
}

fn exact() -> WindowOptions {
    WindowOptions { quantile: 0.0, gamma: 1.0, ignore: Vec::new() }
}

/// Network windows (start, seconds), in order and apart, of a step: what lies between is busy.
fn idle(at: &[(f64, f64)], seconds: f64) -> Windows {
    let mut busy = Vec::new();
    let mut time = 0.0;
    for &(start, length) in at {
        busy.push(network("busy", time, start - time));
        time = start + length;
    }
    busy.push(network("busy", time, seconds - time));
    busy.retain(|span| span.seconds > 0.0);
    find_windows(&[Step { seconds, spans: busy }], &exact()).unwrap()
}

fn times(windows: &Windows) -> Vec<(f64, f64)> {
    windows.of(Resource::Network).map(|(_, window)| (window.start, window.seconds)).collect()
}

// ---- windows ----

#[test]
fn busy_spans_overlap_and_nest() {
    // Busy from 1 to 5 (a, in it b, then c that overlaps a) and from 7 to 8; the windows follow c and d.
    let spans =
        vec![network("d", 7.0, 1.0), network("b", 2.0, 1.0), network("a", 1.0, 3.0), network("c", 3.0, 2.0)];
    let found = find_windows(&[Step { seconds: 10.0, spans }], &exact()).unwrap();
    assert_eq!(times(&found), [(0.0, 1.0), (5.0, 2.0), (8.0, 2.0)]);
    let after = |name: &str| Anchor::After { name: name.into(), occurrence: 0 };
    let anchors: Vec<_> = found.of(Resource::Network).map(|(_, window)| window.anchor.clone()).collect();
    assert_eq!(anchors, [Anchor::Start, after("c"), after("d")]);
    let all = |resource| found.of(resource).map(|(_, window)| window.seconds).collect::<Vec<_>>();
    assert_eq!((all(Resource::Compute), all(Resource::HostLink)), (vec![10.0], vec![10.0]));
}

#[test]
fn the_same_name_again_is_another_anchor() {
    let spans = [0.0, 2.0, 5.0].map(|start| network("send", start, 1.0)).to_vec();
    let found = find_windows(&[Step { seconds: 6.0, spans }], &exact()).unwrap();
    let anchors: Vec<_> = found.of(Resource::Network).map(|(_, window)| window.anchor.to_string()).collect();
    assert_eq!(anchors, ["\"send\"", "\"send\" (2)"]);
}

#[test]
fn what_runs_over_closes_the_start_of_the_next_step() {
    let spans = vec![network("reduce", 8.0, 3.0)];
    let found = find_windows(&[Step { seconds: 10.0, spans }], &exact()).unwrap();
    let windows: Vec<_> = found.of(Resource::Network).map(|(_, window)| window.clone()).collect();
    assert_eq!((windows.len(), windows[0].anchor.clone(), windows[0].offset), (1, Anchor::Start, 1.0));
    assert_eq!(times(&found), [(1.0, 7.0)]);
}

#[test]
fn odd_steps_are_left_out_and_no_majority_gives_no_windows() {
    let like = Step { seconds: 4.0, spans: vec![network("a", 0.0, 1.0)] };
    let odd = Step { seconds: 9.0, spans: vec![network("evaluation", 0.0, 8.0)] };
    let steps = [like.clone(), odd.clone(), like.clone()];
    let found = find_windows(&steps, &exact()).unwrap();
    assert_eq!(found.evidence, Evidence::MostlySteady { steps: 2, left_out: 1 });
    assert_eq!((times(&found), found.step_seconds), (vec![(1.0, 3.0)], 4.0));
    let found = find_windows(&[like, odd], &exact()).unwrap();
    assert_eq!((found.evidence, found.windows.len()), (Evidence::Unsteady { steps: 2, alike: 1 }, 0));
}

#[test]
fn own_copies_are_not_traffic() {
    let spans = vec![network("a", 0.0, 1.0), network("evermoe.copy", 1.0, 2.0)];
    let options = WindowOptions { ignore: vec!["evermoe.copy".into()], ..exact() };
    assert_eq!(times(&find_windows(&[Step { seconds: 4.0, spans }], &options).unwrap()), [(1.0, 3.0)]);
}

#[test]
fn quantile_and_gamma_shorten() {
    let steps: Vec<Step> = (0..=10)
        .map(|more| Step { seconds: 10.0 + f64::from(more), spans: vec![network("a", 0.0, 5.0)] })
        .collect();
    let options = WindowOptions { quantile: 0.1, gamma: 0.5, ..Default::default() };
    let found = find_windows(&steps, &options).unwrap();
    let (_, window) = found.of(Resource::Network).next().unwrap();
    // 5, 6, … 15 seconds: one in ten is below 6, one above 14.
    assert_eq!((window.expected, window.jitter, window.seconds, found.step_seconds), (6.0, 8.0, 3.0, 15.0));
}

/// Steps of one sequence whose spans vary, overlap and nest, with distinct names so that the order may be told.
fn profile() -> impl Strategy<Value = Vec<Step>> {
    (1_usize..6, 1_usize..9).prop_flat_map(|(spans, steps)| {
        let step = prop::collection::vec((0_u32..12, 0_u32..20, 0_usize..3), spans).prop_map(|rows| {
            let mut start = 0.0;
            let spans = rows.iter().enumerate().map(|(number, &(gap, seconds, _))| {
                start += f64::from(gap);
                let resource = Resource::ALL[number % 2];
                span(&format!("s{}", number / 2 % 2), resource, start, f64::from(seconds))
            });
            let spans: Vec<Span> = spans.collect();
            Step { seconds: start + f64::from(rows[0].0) + 1.0, spans }
        });
        prop::collection::vec(step, steps)
    })
}

/// When a window opens in a step.
fn opening(window: &Window, step: &Step) -> f64 {
    let Anchor::After { name, occurrence } = &window.anchor else { return window.offset };
    let mut spans: Vec<&Span> =
        step.spans.iter().filter(|span| span.resource == window.resource && span.name == *name).collect();
    spans.sort_by(|a, b| (a.start, b.seconds).partial_cmp(&(b.start, a.seconds)).unwrap());
    spans[*occurrence].end().min(step.seconds) + window.offset
}

fn names(step: &Step) -> Vec<Vec<String>> {
    Resource::ALL
        .iter()
        .map(|&resource| {
            let mut spans: Vec<&Span> = step.spans.iter().filter(|span| span.resource == resource).collect();
            spans.sort_by(|a, b| {
                (a.start, b.seconds, &a.name).partial_cmp(&(b.start, a.seconds, &b.name)).unwrap()
            });
            spans.iter().map(|span| span.name.clone()).collect()
        })
        .collect()
}

proptest! {
    #[test]
    fn windows_are_idle_in_every_step_that_counts(steps in profile()) {
        let found = find_windows(&steps, &exact()).unwrap();
        let mut groups: BTreeMap<Vec<Vec<String>>, usize> = BTreeMap::new();
        steps.iter().for_each(|step| *groups.entry(names(step)).or_default() += 1);
        let (sequence, &alike) = groups.iter().max_by_key(|(_, count)| **count).unwrap();
        let left_out = steps.len() - alike;
        match found.evidence {
            Evidence::Steady { steps } => prop_assert_eq!((steps, left_out), (alike, 0)),
            Evidence::MostlySteady { steps, left_out: odd } => prop_assert_eq!((steps, odd), (alike, left_out)),
            Evidence::Unsteady { .. } => { prop_assert!(2 * alike <= steps.len() && found.windows.is_empty()); }
        }
        for window in &found.windows {
            prop_assert!(window.seconds > 0.0 && window.jitter >= 0.0 && window.offset >= 0.0);
            for step in steps.iter().filter(|step| names(step) == *sequence) {
                let open = opening(window, step);
                let close = open + window.expected;
                prop_assert!(close <= step.seconds + 1e-9, "{window:?} of {step:?}");
                for busy in step.spans.iter().filter(|span| span.resource == window.resource) {
                    let runs_over = (busy.end() - step.seconds).max(0.0);
                    prop_assert!(busy.end() <= open || busy.start >= close || busy.seconds == 0.0, "{window:?} {step:?}");
                    prop_assert!(runs_over <= open, "{window:?} {step:?}");
                }
            }
        }
        for pair in found.windows.windows(2).filter(|pair| pair[0].resource == pair[1].resource) {
            prop_assert!(pair[0].end() <= pair[1].start, "{pair:?}");
        }
        prop_assert_eq!(&Windows::from_json(&found.to_json()).unwrap(), &found);
        prop_assert_eq!(&find_windows(&steps, &exact()).unwrap(), &found);
    }

    #[test]
    fn one_step_has_exactly_the_idle_time_of_each_resource(steps in profile()) {
        let step = &steps[0];
        let found = find_windows(&steps[..1], &exact()).unwrap();
        for resource in Resource::ALL {
            // Whole seconds: a second is idle or busy.
            let busy = |second: f64| step.spans.iter().filter(|span| span.resource == resource).any(|span| {
                let over = span.end() - step.seconds;
                (span.start <= second && second < span.end()) || second < over
            });
            let idle = (0..step.seconds as usize).filter(|&second| !busy(second as f64)).count();
            let total: f64 = found.of(resource).map(|(_, window)| window.seconds).sum();
            prop_assert_eq!(total, idle as f64, "{} of {:?}", resource, step);
        }
    }
}

#[test]
fn changes_are_noticed_and_noise_is_not() {
    let step = |idle: f64, name: &str| Step {
        seconds: 20.0,
        spans: vec![network("a", 0.0, 1.0), network(name, 1.0 + idle, 1.0)],
    };
    let steps = [10.0, 10.5, 11.0].map(|idle| step(idle, "b"));
    let found = find_windows(&steps, &exact()).unwrap();
    let change = |steps: &[Step]| has_changed(&found, steps, 0.01).unwrap();
    assert_eq!(change(&steps), None);
    assert_eq!(change(&[step(9.9, "b")]), None, "within the jitter of 1 second");
    assert_eq!(change(&[step(11.1, "b"), step(8.95, "b")]), None, "with 1 % of a step of 20 seconds");
    let Some(Change::Window { before, now, resource, anchor }) = change(&[step(8.0, "b"), step(11.0, "b")])
    else {
        panic!("shorter by 2 seconds")
    };
    assert_eq!((before, now, resource), (10.0, 8.0, Resource::Network));
    assert_eq!(anchor, Anchor::After { name: "a".into(), occurrence: 0 });
    assert!(change(&[step(12.0, "b")]).is_some(), "longer by 2 seconds");
    assert_eq!(change(&[step(10.0, "b"), step(10.0, "b"), step(10.0, "c")]), None, "one odd step");
    let sequence = change(&[step(10.0, "b"), step(10.0, "c")]).unwrap();
    assert_eq!(sequence.to_string(), "1 of 2 steps have other spans: \"c\" on network, not \"b\"");
}

#[test]
fn many_small_windows_that_vanish_are_noticed_together() {
    let step = |busy: f64| {
        let spans = (0..1000).map(|number| network("a", f64::from(number) * 1.5, busy)).collect();
        Step { seconds: 1500.0, spans }
    };
    let found = find_windows(&[step(1.0)], &exact()).unwrap();
    let change = has_changed(&found, &[step(1.5)], 0.01).unwrap();
    assert_eq!(change, Some(Change::Total { resource: Resource::Network, before: 500.0, now: 0.0 }));
}

// ---- chunk plans ----

/// Start and seconds of each.
type Spans = Vec<(f64, f64)>;

/// A request whose parts are owned.
#[derive(Clone, Debug)]
struct Case {
    pieces: Vec<Piece>,
    own: Vec<(f64, f64)>,
    /// Rank, windows, clock offset.
    receivers: Vec<(usize, Spans, f64)>,
    link: Link,
    memory: Memory,
    max_steps: usize,
}

const STEP: f64 = 100.0;

impl Case {
    fn plan(&self, policy: Policy) -> ChunkPlan {
        let windows = idle(&self.own, STEP);
        let receivers = self.receivers();
        plan_chunks(&self.request(&windows, &receivers, policy)).unwrap()
    }

    fn receivers(&self) -> Vec<Receiver> {
        let receivers = self.receivers.iter();
        receivers
            .map(|(rank, at, clock_offset)| Receiver {
                rank: *rank,
                windows: idle(at, STEP),
                clock_offset: *clock_offset,
            })
            .collect()
    }

    fn request<'a>(&'a self, windows: &'a Windows, receivers: &'a [Receiver], policy: Policy) -> Request<'a> {
        let Self { pieces, link, memory, max_steps, .. } = self;
        let (link, memory, max_steps) = (*link, *memory, *max_steps);
        Request { pieces, windows, resource: Resource::Network, receivers, link, memory, policy, max_steps }
    }
}

/// Windows (start, seconds) in whole seconds, a second or more apart.
fn windows_at() -> impl Strategy<Value = Vec<(f64, f64)>> {
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

fn case() -> impl Strategy<Value = Case> {
    let pieces = prop::collection::vec((0_u64..60, 1_usize..4), 0..6);
    let drain = prop_oneof![2 => Just(None), 1 => (0_u32..3, 1_u32..9).prop_map(Some)];
    let receivers = prop::collection::vec((windows_at(), -30_i32..30), 3);
    let sizes = (1_u64..30, 1_u64..5, 1_usize..9);
    (pieces, windows_at(), receivers, (0_u32..4, 1_u32..9), drain, sizes, 0_usize..4).prop_map(
        |(pieces, own, receivers, (alpha, beta), drain, (size, buffers, max_steps), known)| {
            let link = |(alpha, beta)| Link { alpha: f64::from(alpha) / 2.0, beta: f64::from(beta) };
            let piece = |(unit, (bytes, copies)): (usize, (u64, usize))| Piece {
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

const EPSILON: f64 = 1e-9;

/// Everything that holds for every plan.
fn check_plan(case: &Case, plan: &ChunkPlan, policy: Policy) {
    let windows = idle(&case.own, STEP);
    let reason = &plan.reason;
    let steps = reason.steps_per_version;
    assert!((1..=if policy == Policy::Auto { case.max_steps } else { 1 }).contains(&steps));
    // Every byte goes to every destination exactly once.
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
    // Inside windows of both ends.
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
    // The reason counts right.
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
    assert_eq!(&ChunkPlan::from_json(&plan.to_json()).unwrap(), plan);
}

fn complete(mut case: Case) -> Case {
    for rank in case.receivers.len()..3 {
        case.receivers.push((rank, case.own.clone(), 0.0));
    }
    case
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_their_promises(case in case()) {
        for policy in [Policy::Gemini, Policy::Moetion, Policy::Auto] {
            let plan = case.plan(policy);
            check_plan(&case, &plan, policy);
            prop_assert_eq!(case.plan(policy), plan, "deterministic");
        }
        let case = complete(case);
        check_plan(&case, &case.plan(Policy::Baft), Policy::Baft);
    }

    #[test]
    fn auto_never_delays_more_than_the_papers(case in case()) {
        let case = complete(case);
        let auto = case.plan(Policy::Auto).reason;
        for policy in [Policy::Gemini, Policy::Baft] {
            let other = case.plan(policy).reason;
            prop_assert!(auto.delay_seconds <= other.delay_seconds, "{policy:?}: {auto:?} {other:?}");
        }
    }

    #[test]
    fn more_window_never_means_more_delay(case in case(), which in any::<prop::sample::Index>(), more in 1_u32..4) {
        let longer = |at: &[(f64, f64)], longer: usize| -> Vec<(f64, f64)> {
            let next = at.get(longer + 1).map_or(STEP, |next| next.0);
            let grow = |(number, &(start, length)): (usize, &(f64, f64))| {
                (start, if number == longer { (length + f64::from(more)).min(next - start - 0.5) } else { length })
            };
            at.iter().enumerate().map(grow).collect()
        };
        let mut wide = case.clone();
        if !case.own.is_empty() {
            wide.own = longer(&case.own, which.index(case.own.len()));
        }
        for (receiver, was) in wide.receivers.iter_mut().zip(&case.receivers).filter(|(_, was)| !was.1.is_empty()) {
            receiver.1 = longer(&was.1, which.index(was.1.len()));
        }
        let mut fewer = case.clone();
        if !case.own.is_empty() {
            fewer.own.remove(which.index(case.own.len()));
        }
        let [few, before, now] = [&fewer, &case, &wide].map(|case| case.plan(Policy::Auto).reason);
        for (from, less, more) in [(fewer, &few, &before), (case.clone(), &before, &now)] {
            // The exception that is documented: whole units happened to fit better than anything else.
            let lucky = || complete(from).plan(Policy::Baft).reason.delay_seconds == less.delay_seconds;
            prop_assert!(more.delay_seconds <= less.delay_seconds + EPSILON || lucky(), "{less:?} {more:?}");
            if more.delay_seconds == 0.0 && less.delay_seconds == 0.0 {
                prop_assert!(more.steps_per_version <= less.steps_per_version, "{less:?} {more:?}");
            }
        }
    }

    /// Gemini's loop as it is printed, chunk after chunk, for one destination.
    #[test]
    fn gemini_is_the_text(case in case()) {
        let mut case = case;
        case.receivers.clear();
        case.memory.drain = None;
        case.pieces.iter_mut().for_each(|piece| piece.destinations = vec![1]);
        let most = case.memory.bytes / case.memory.buffers;
        let Link { alpha, beta } = case.link;
        let mut loads: Vec<(usize, u64, u64)> =
            case.pieces.iter().enumerate().filter(|(_, piece)| piece.bytes > 0).map(|(unit, piece)| (unit, 0, piece.bytes)).rev().collect();
        let mut expected = Vec::new();
        let spans: Vec<Option<f64>> = case.own.iter().map(|&(_, length)| Some(length)).chain([None]).collect();
        for (number, span) in spans.into_iter().enumerate() {
            let mut left = span.unwrap_or(f64::INFINITY);
            while let Some((unit, offset, rest)) = loads.pop() {
                let fits = if left + 1e-9 >= alpha + most as f64 / beta { most } else { ((left - alpha) * beta + 1e-9).max(0.0) as u64 };
                let bytes = fits.min(rest);
                if bytes < rest {
                    loads.push((unit, offset + bytes, rest - bytes));
                }
                if bytes == 0 {
                    break;
                }
                expected.push((unit, offset, bytes, (number < case.own.len()).then_some(number)));
                left -= alpha + bytes as f64 / beta;
            }
        }
        let windows: Vec<usize> = idle(&case.own, STEP).of(Resource::Network).map(|(position, _)| position).collect();
        let plan = case.plan(Policy::Gemini);
        let found: Vec<_> = plan.chunks.iter().map(|chunk| {
            (chunk.unit, chunk.offset, chunk.bytes, chunk.window.map(|window| windows.iter().position(|&own| own == window).unwrap()))
        }).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn moetion_takes_the_part_of_the_chunks_that_the_bubble_has_time_for(
        bubble in 1_u32..40, count in 1_u64..30, size in 1_u64..9, alpha in 0_u32..3,
    ) {
        let link = Link { alpha: f64::from(alpha), beta: 4.0 };
        let case = Case {
            pieces: vec![Piece { unit: "all".into(), bytes: count * size, destinations: vec![1] }],
            own: vec![(0.0, f64::from(bubble))],
            receivers: Vec::new(),
            link,
            memory: Memory { bytes: size, buffers: 1, drain: None },
            max_steps: 1,
        };
        let plan = case.plan(Policy::Moetion);
        let whole = count as f64 * link.seconds(size);
        let formula = ((count as f64 * f64::from(bubble) / whole) as usize).min(count as usize);
        prop_assert_eq!(plan.chunks.iter().filter(|chunk| chunk.window.is_some()).count(), formula);
        let beside = (count as usize - formula) as f64 * link.seconds(size);
        let hidden = STEP - f64::from(bubble);
        prop_assert!((plan.reason.delay_seconds - (beside - hidden).max(0.0)).abs() < EPSILON);
    }

    #[test]
    fn the_knapsack_is_exact(
        items in prop::collection::vec((1_u32..20, 1_u64..30), 0..11), seconds in 0_u32..60,
    ) {
        let items: Vec<Item> =
            items.into_iter().map(|(seconds, bytes)| Item { seconds: f64::from(seconds) / 4.0, bytes }).collect();
        let seconds = f64::from(seconds) / 4.0;
        let sum = |chosen: &[usize]| {
            let seconds: f64 = chosen.iter().map(|&item| items[item].seconds).sum();
            (seconds, chosen.iter().map(|&item| items[item].bytes).sum::<u64>())
        };
        let subsets = (0_u32..1 << items.len()).map(|mask| {
            (0..items.len()).filter(|item| mask >> item & 1 == 1).collect::<Vec<_>>()
        });
        let most = subsets.map(|chosen| sum(&chosen)).filter(|(used, _)| *used <= seconds).map(|(_, bytes)| bytes).max();
        let chosen = best_subset(&items, seconds);
        prop_assert!(chosen.is_sorted_by(|a, b| a < b));
        let (used, bytes) = sum(&chosen);
        prop_assert!(used <= seconds, "{chosen:?}");
        prop_assert_eq!(bytes, most.unwrap());
    }
}

fn simple(pieces: &[(u64, &[usize])], own: &[(f64, f64)], alpha: f64) -> Case {
    let piece = |(unit, &(bytes, ranks)): (usize, &(u64, &[usize]))| Piece {
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
fn placed(case: &Case, plan: &ChunkPlan) -> Vec<(usize, Option<f64>, usize, u64, u64)> {
    let windows = idle(&case.own, STEP);
    let start = |window: usize| windows.windows[window].start;
    plan.chunks
        .iter()
        .map(|chunk| (chunk.step, chunk.window.map(start), chunk.unit, chunk.offset, chunk.bytes))
        .collect()
}

#[test]
fn baft_keeps_units_whole_and_fills_each_window_best() {
    // 9 seconds take 5 + 4, not 7; 8 take 7; the 12 are too large for any and are cut to 9 and 3.
    let mut case = complete(simple(&[(7, &[0]), (5, &[0]), (4, &[0])], &[(0.0, 9.0), (20.0, 8.0)], 0.0));
    let plan = case.plan(Policy::Baft);
    assert_eq!(
        placed(&case, &plan),
        [(0, Some(0.0), 1, 0, 5), (0, Some(0.0), 2, 0, 4), (0, Some(20.0), 0, 0, 7)]
    );
    case.pieces[0].bytes = 12;
    let plan = case.plan(Policy::Baft);
    assert_eq!(
        placed(&case, &plan),
        [(0, Some(0.0), 0, 0, 9), (0, Some(20.0), 1, 0, 5), (0, Some(20.0), 0, 9, 3), (0, None, 2, 0, 4)]
    );
    assert_eq!((plan.reason.delay_seconds, plan.reason.steps_in_windows), (4.0, Some(2)));
}

#[test]
fn auto_takes_whole_units_where_nothing_else_is_in_time() {
    // Cut into the windows in order, the first unit needs a second chunk, for which there is no time in one step.
    let mut case = complete(simple(&[(1, &[0]), (3, &[0])], &[(0.0, 5.0), (20.0, 3.0)], 2.0));
    assert_eq!(case.plan(Policy::Auto).reason.steps_per_version, 2);
    case.max_steps = 1;
    assert_eq!(case.plan(Policy::Gemini).reason.delay_seconds, 4.0);
    assert!(case.plan(Policy::Baft).reason.fits && case.plan(Policy::Auto).reason.fits);
}

#[test]
fn auto_serves_first_whoever_has_the_first_windows() {
    let mut case = simple(&[(4, &[0, 1])], &[(0.0, 10.0)], 0.0);
    case.receivers = vec![(0, vec![(5.0, 5.0)], 0.0), (1, vec![(0.0, 5.0)], 0.0)];
    let plan = case.plan(Policy::Auto);
    assert_eq!(plan.chunks.iter().map(|chunk| chunk.destination).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(
        (plan.reason.steps_per_version, case.plan(Policy::Gemini).reason.steps_in_windows),
        (1, Some(2))
    );
}

#[test]
fn without_windows_what_is_sent_is_spread_over_the_steps() {
    let mut case = simple(&[(40, &[0, 1])], &[], 0.0);
    case.memory.bytes = 10;
    let plan = case.plan(Policy::Auto);
    let steps: Vec<usize> = plan.chunks.iter().map(|chunk| chunk.step).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((plan.reason.delay_seconds, plan.reason.steps_in_windows), (10.0, None));
    assert_eq!(case.plan(Policy::Gemini).reason.delay_seconds, 80.0);
}

#[test]
fn small_chunks_use_windows_that_are_too_short_to_drain_large_ones() {
    // Two sub-buffers of 32 bytes: full ones leave 33 seconds from start to start, those of 2 bytes only 3.
    let mut case = simple(&[(6, &[0])], &[(0.0, 3.0), (50.0, 3.0)], 0.0);
    case.memory = Memory { bytes: 64, buffers: 2, drain: Some(Link { alpha: 1.0, beta: 1.0 }) };
    let plan = case.plan(Policy::Auto);
    check_plan(&case, &plan, Policy::Auto);
    assert_eq!((plan.reason.fits, plan.reason.steps_per_version), (true, 2));
    assert_eq!(case.plan(Policy::Gemini).reason.outside_bytes, 6);
}

#[test]
fn a_thousand_sizes_are_still_a_plan() {
    let bytes: Vec<u64> = (0..1000).map(|unit: u64| 1 + unit * 7919 % 1009).collect();
    let pieces: Vec<(u64, &[usize])> = bytes.iter().map(|&bytes| (bytes, &[0_usize][..])).collect();
    let mut case = complete(simple(&pieces, &[(0.0, 40.0), (45.0, 50.0)], 0.001));
    case.link.beta = 1000.0;
    case.memory.bytes = 5000;
    let plan = case.plan(Policy::Baft);
    check_plan(&case, &plan, Policy::Baft);
    assert!(plan.reason.used_seconds > 89.9, "{}", plan.reason);
}

#[test]
fn more_bytes_than_can_be_counted_are_refused() {
    let case = simple(&[(u64::MAX, &[0]), (1, &[0])], &[], 0.0);
    let windows = idle(&case.own, STEP);
    let error = plan_chunks(&case.request(&windows, &[], Policy::Auto)).unwrap_err().to_string();
    assert!(error.starts_with("pieces: expected fewer than 2^64 bytes"), "{error}");
}

#[test]
fn nothing_to_send_fits() {
    for policy in Policy::ALL {
        let plan = complete(simple(&[(0, &[0])], &[], 0.0)).plan(policy);
        assert_eq!((plan.chunks.len(), plan.reason.fits, plan.reason.steps_per_version), (0, true, 1));
    }
}

#[test]
fn numbers_of_any_size() {
    let mut case = complete(simple(&[(u64::MAX, &[0])], &[(0.0, 1.0)], 0.0));
    case.memory = Memory { bytes: u64::MAX, buffers: 4, drain: Some(Link { alpha: 0.0, beta: f64::MAX }) };
    for beta in [f64::MAX, 1.0] {
        case.link.beta = beta;
        for policy in Policy::ALL {
            let plan = case.plan(policy);
            assert_eq!(
                plan.chunks.iter().map(|chunk| u128::from(chunk.bytes)).sum::<u128>(),
                u128::from(u64::MAX)
            );
        }
    }
}

// ---- memory and shares ----

proptest! {
    #[test]
    fn snapshots_on_the_device_fit_and_no_other_would(
        nbytes in prop::collection::vec(0_u64..50, 0..9), free in 0_u64..150, reserve in 0_u64..60,
    ) {
        let places = snapshot_places(free, &nbytes, reserve);
        let of = |place: Place| (0..nbytes.len()).filter(|&unit| places[unit] == place).collect::<Vec<_>>();
        let used: u64 = of(Place::Device).iter().map(|&unit| nbytes[unit]).sum();
        let room = free.saturating_sub(reserve);
        prop_assert!(used <= room);
        prop_assert!(of(Place::Host).iter().all(|&unit| used + nbytes[unit] > room), "{places:?}");
    }

    #[test]
    fn shares_by_bytes_are_even_to_within_a_unit(nbytes in prop::collection::vec(0_u64..50, 0..20), ranks in 1_usize..6) {
        let mut loads = vec![0; ranks];
        for (unit, rank) in unit_shares(&nbytes, ranks, Share::Bytes).unwrap().into_iter().enumerate() {
            loads[rank] += nbytes[unit];
        }
        let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
        prop_assert!(spread <= nbytes.iter().copied().max().unwrap_or(0), "{loads:?}");
        let modulo: Vec<usize> = (0..nbytes.len()).map(|unit| unit % ranks).collect();
        prop_assert_eq!(unit_shares(&nbytes, ranks, Share::Modulo).unwrap(), modulo);
    }
}
