//! Idle windows of profiles, and changes that invalidate them.

use super::{exact, network, span, times};
use evermoe::schedule::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[test]
fn busy_spans_overlap_and_nest() {
    // Busy from 1 to 5 (a, in it b, then c that overlaps a) and from 7 to 8; the windows follow c and d.
    let spans =
        vec![network("d", 7.0, 1.0), network("b", 2.0, 1.0), network("a", 1.0, 3.0), network("c", 3.0, 2.0)];
    let found = find_windows(&[StepProfile { seconds: 10.0, spans }], &exact()).unwrap();
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
    let found = find_windows(&[StepProfile { seconds: 6.0, spans }], &exact()).unwrap();
    let anchors: Vec<_> = found.of(Resource::Network).map(|(_, window)| window.anchor.to_string()).collect();
    assert_eq!(anchors, ["\"send\"", "\"send\" (2)"]);
}

#[test]
fn what_runs_over_closes_the_start_of_the_next_step() {
    let spans = vec![network("reduce", 8.0, 3.0)];
    let found = find_windows(&[StepProfile { seconds: 10.0, spans }], &exact()).unwrap();
    let windows: Vec<_> = found.of(Resource::Network).map(|(_, window)| window.clone()).collect();
    assert_eq!((windows.len(), windows[0].anchor.clone(), windows[0].offset), (1, Anchor::Start, 1.0));
    assert_eq!(times(&found), [(1.0, 7.0)]);
}

#[test]
fn odd_steps_are_left_out_and_no_majority_gives_no_windows() {
    let like = StepProfile { seconds: 4.0, spans: vec![network("a", 0.0, 1.0)] };
    let odd = StepProfile { seconds: 9.0, spans: vec![network("evaluation", 0.0, 8.0)] };
    let steps = [like.clone(), odd.clone(), like.clone()];
    let found = find_windows(&steps, &exact()).unwrap();
    assert_eq!(found.evidence, Evidence::MostlySteady { steps: 2, left_out: 1 });
    assert_eq!((times(&found), found.step_seconds), (vec![(1.0, 3.0)], 4.0));
    let found = find_windows(&[like, odd], &exact()).unwrap();
    assert_eq!((found.evidence, found.windows.len()), (Evidence::Unsteady { steps: 2, largest: 1 }, 0));
}

#[test]
fn own_copies_are_not_traffic() {
    let spans = vec![network("a", 0.0, 1.0), network("evermoe.copy", 1.0, 2.0)];
    let options = WindowOptions { ignore: vec!["evermoe.copy".into()], ..exact() };
    assert_eq!(times(&find_windows(&[StepProfile { seconds: 4.0, spans }], &options).unwrap()), [(1.0, 3.0)]);
}

#[test]
fn quantile_and_gamma_shorten() {
    let steps: Vec<StepProfile> = (0..=10)
        .map(|more| StepProfile { seconds: 10.0 + f64::from(more), spans: vec![network("a", 0.0, 5.0)] })
        .collect();
    let options = WindowOptions { quantile: 0.1, gamma: 0.5, ..Default::default() };
    let found = find_windows(&steps, &options).unwrap();
    let (_, window) = found.of(Resource::Network).next().unwrap();
    // 5, 6, … 15 seconds: one in ten is below 6, one above 14.
    assert_eq!((window.expected, window.jitter, window.seconds, found.step_seconds), (6.0, 8.0, 3.0, 15.0));
}

/// Steps of one sequence whose spans vary, overlap and nest, with distinct names so that the order is recognisable.
fn profile() -> impl Strategy<Value = Vec<StepProfile>> {
    (1_usize..6, 1_usize..9).prop_flat_map(|(spans, steps)| {
        let step = prop::collection::vec((0_u32..12, 0_u32..20, 0_usize..3), spans).prop_map(|rows| {
            let mut start = 0.0;
            let spans = rows.iter().enumerate().map(|(number, &(gap, seconds, _))| {
                start += f64::from(gap);
                let resource = Resource::ALL[number % 2];
                span(&format!("s{}", number / 2 % 2), resource, start, f64::from(seconds))
            });
            let spans: Vec<Span> = spans.collect();
            StepProfile { seconds: start + f64::from(rows[0].0) + 1.0, spans }
        });
        prop::collection::vec(step, steps)
    })
}

/// The opening of a window in a step.
fn opening(window: &Window, step: &StepProfile) -> f64 {
    let Anchor::After { name, occurrence } = &window.anchor else { return window.offset };
    let mut spans: Vec<&Span> =
        step.spans.iter().filter(|span| span.resource == window.resource && span.name == *name).collect();
    spans.sort_by(|a, b| (a.start, b.seconds).partial_cmp(&(b.start, a.seconds)).unwrap());
    spans[*occurrence].end().min(step.seconds) + window.offset
}

fn names(step: &StepProfile) -> Vec<Vec<String>> {
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
        let (sequence, &equal) = groups.iter().max_by_key(|(_, count)| **count).unwrap();
        let left_out = steps.len() - equal;
        match found.evidence {
            Evidence::Steady { steps } => prop_assert_eq!((steps, left_out), (equal, 0)),
            Evidence::MostlySteady { steps, left_out: odd } => prop_assert_eq!((steps, odd), (equal, left_out)),
            Evidence::Unsteady { .. } => { prop_assert!(2 * equal <= steps.len() && found.windows.is_empty()); }
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
            // Integer seconds: each second is idle or busy.
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
    let step = |idle: f64, name: &str| StepProfile {
        seconds: 20.0,
        spans: vec![network("a", 0.0, 1.0), network(name, 1.0 + idle, 1.0)],
    };
    let steps = [10.0, 10.5, 11.0].map(|idle| step(idle, "b"));
    let found = find_windows(&steps, &exact()).unwrap();
    let change = |steps: &[StepProfile]| has_changed(&found, steps, 0.01).unwrap();
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
        StepProfile { seconds: 1500.0, spans }
    };
    let found = find_windows(&[step(1.0)], &exact()).unwrap();
    let change = has_changed(&found, &[step(1.5)], 0.01).unwrap();
    assert_eq!(change, Some(Change::Total { resource: Resource::Network, before: 500.0, now: 0.0 }));
}
