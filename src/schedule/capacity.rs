//! Capacity for chunks to a destination: windows of both ends, and the loads to send.

use super::pace::Pace;
use super::request::{Receiver, Request};
use super::span::Resource;
use std::collections::HashMap;

/// A part of one of the sender's windows, in seconds from the sender's step's start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    /// Position in [`Windows::windows`](super::Windows).
    pub(super) window: usize,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// Bytes of one unit for one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) unit: usize,
    pub(super) destination: usize,
    /// Position in [`Work::intervals`].
    pub(super) intervals: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// A request, resolved.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// Intervals by start, disjoint. Destinations without windows of their own share the first list.
    pub(super) intervals: Vec<Vec<Interval>>,
    /// One list per destination, in the order in which the pieces name them: each copy is complete before the next
    /// begins.
    pub(super) loads: Vec<Vec<Load>>,
}

impl Work {
    pub(super) fn new(request: &Request<'_>) -> Self {
        let own: Vec<Interval> = request
            .windows
            .of(Resource::Network)
            .map(|(window, found)| Interval { window, start: found.start, end: found.end() })
            .collect();
        let mut intervals = vec![own];
        let mut of = HashMap::new();
        for receiver in request.receivers {
            of.insert(receiver.rank, intervals.len());
            intervals.push(intersect(&intervals[0], &theirs(receiver, request)));
        }
        let mut order: HashMap<usize, usize> = HashMap::new();
        let mut loads: Vec<Vec<Load>> = Vec::new();
        for (unit, piece) in request.pieces.iter().enumerate() {
            for &destination in &piece.destinations {
                let place = *order.entry(destination).or_insert(loads.len());
                loads.resize_with(loads.len().max(place + 1), Vec::new);
                let intervals = of.get(&destination).copied().unwrap_or(0);
                let load = Load { unit, destination, intervals, offset: 0, bytes: piece.bytes };
                loads[place].extend((piece.bytes > 0).then_some(load));
            }
        }
        Self { intervals, loads }
    }

    /// Number of chunks of all loads, before windows cut any.
    pub(super) fn chunks(&self, pace: &Pace) -> u64 {
        self.loads.iter().flatten().map(|load| pace.chunks(load.bytes)).fold(0, u64::saturating_add)
    }

    /// All loads, grouped by destination.
    pub(super) fn in_order(&self) -> Vec<Load> {
        self.loads.concat()
    }

    /// The orders of destinations that `auto` tries: all of up to three destinations; of more, the given order and its
    /// reverse.
    pub(super) fn orders(&self) -> Vec<Vec<Load>> {
        let count = self.loads.len();
        let turns: &[&[usize]] = match count {
            // Without receivers all destinations have the same intervals.
            _ if self.intervals.len() == 1 => &[],
            2 => &[&[1, 0]],
            3 => &[&[0, 2, 1], &[1, 0, 2], &[1, 2, 0], &[2, 0, 1], &[2, 1, 0]],
            _ => &[],
        };
        let mut orders = vec![self.in_order()];
        let in_turn =
            |turn: &&[usize]| turn.iter().flat_map(|&place| self.loads[place].iter().copied()).collect();
        orders.extend(turns.iter().map(in_turn));
        if count > 3 && self.intervals.len() > 1 {
            orders.push(self.loads.iter().rev().flatten().copied().collect());
        }
        orders
    }
}

/// The receiver's windows on the sender's clock; steps repeat, so those of the previous and the next step count, too.
fn theirs(receiver: &Receiver, request: &Request<'_>) -> Vec<(f64, f64)> {
    let period = request.windows.step_seconds;
    let offset = receiver.clock_offset.rem_euclid(period);
    let found: Vec<_> = receiver.windows.of(Resource::Network).map(|(_, window)| window).collect();
    let shifted = |shift: f64| found.iter().map(move |window| (window.start + shift, window.end() + shift));
    let mut all: Vec<(f64, f64)> = shifted(offset - period).chain(shifted(offset)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

fn intersect(own: &[Interval], theirs: &[(f64, f64)]) -> Vec<Interval> {
    let mut found: Vec<Interval> = Vec::new();
    let (mut mine, mut other) = (0, 0);
    while mine < own.len() && other < theirs.len() {
        let (interval, (start, end)) = (own[mine], theirs[other]);
        let part = Interval {
            window: interval.window,
            start: interval.start.max(start),
            end: interval.end.min(end),
        };
        if part.start < part.end {
            found.push(part);
        }
        if interval.end < end { mine += 1 } else { other += 1 }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_must_be_free() {
        let own =
            [Interval { window: 3, start: 0.0, end: 4.0 }, Interval { window: 4, start: 6.0, end: 9.0 }];
        let found = intersect(&own, &[(-2.0, 1.0), (3.0, 7.0), (8.0, 12.0)]);
        let parts: Vec<_> =
            found.iter().map(|interval| (interval.window, interval.start, interval.end)).collect();
        assert_eq!(parts, [(3, 0.0, 1.0), (3, 3.0, 4.0), (4, 6.0, 7.0), (4, 8.0, 9.0)]);
    }
}
