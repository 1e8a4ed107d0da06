//! Windows, chunk plans, traces: properties for all inputs, and exhaustive tests of small sizes.

mod case;
mod memory;
mod period;
mod plans;
mod policies;
mod windows;

use evermoe::schedule::*;

pub(crate) fn span(name: &str, resource: Resource, start: f64, seconds: f64) -> Span {
    Span { name: name.into(), kind: Kind::Collective, resource, start, seconds, bytes: 8, peers: vec![1] }
}

pub(crate) fn network(name: &str, start: f64, seconds: f64) -> Span {
    span(name, Resource::Network, start, seconds)
}

pub(crate) fn exact() -> WindowOptions {
    WindowOptions { quantile: 0.0, gamma: 1.0, ignore: Vec::new() }
}

/// Network windows (start, seconds) of a step, in order and disjoint: everything in between is busy.
pub(crate) fn idle(at: &[(f64, f64)], seconds: f64) -> Windows {
    let mut busy = Vec::new();
    let mut time = 0.0;
    for &(start, length) in at {
        busy.push(network("busy", time, start - time));
        time = start + length;
    }
    busy.push(network("busy", time, seconds - time));
    busy.retain(|span| span.seconds > 0.0);
    find_windows(&[StepProfile { seconds, spans: busy }], &exact()).unwrap()
}

pub(crate) fn times(windows: &Windows) -> Vec<(f64, f64)> {
    windows.of(Resource::Network).map(|(_, window)| (window.start, window.seconds)).collect()
}
