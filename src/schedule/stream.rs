//! Fills intervals in order with loads in order, as much as fits: Gemini's algorithm, over as many steps as allowed.
//!
//! The state is a position in the loads. Compare two streams, one of which starts at a later position, at an earlier
//! time, or with longer or more intervals: at every later moment that one is at least as far. The number of chunks
//! between two positions never grows when the first position advances, and a larger chunk never takes less time. So
//! longer windows never leave more over, which `auto` relies on.

use super::capacity::{Interval, Load};
use super::pace::Pace;

/// Bytes of one load in one interval, cut into consecutive chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) step: usize,
    pub(super) window: usize,
    /// Seconds from the step's start.
    pub(super) start: f64,
    pub(super) load: Load,
}

/// Loads that were placed, and the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Filled {
    pub(super) runs: Vec<Run>,
    /// Number of steps used, up to the last that carries something.
    pub(super) steps: usize,
    pub(super) rest: Vec<Load>,
}

impl Load {
    /// Splits off the first bytes.
    pub(super) fn split(self, bytes: u64) -> (Self, Self) {
        (Self { bytes, ..self }, Self { offset: self.offset + bytes, bytes: self.bytes - bytes, ..self })
    }
}

/// Fills the intervals of up to `max_steps` equal steps.
pub(super) fn stream(loads: &[Load], intervals: &[Vec<Interval>], pace: &Pace, max_steps: usize) -> Filled {
    let mut filled = Filled::default();
    let mut loads = loads.iter().copied();
    let mut current = loads.next();
    for step in 0..max_steps {
        let before = filled.runs.len();
        let mut time = f64::NEG_INFINITY;
        while let Some(load) = current {
            let of = &intervals[load.intervals];
            let Some(interval) = of.get(of.partition_point(|interval| interval.end <= time)) else { break };
            let start = interval.start.max(time);
            let (part, rest) = load.split(pace.fit(load.bytes, interval.end - start));
            if part.bytes == 0 {
                time = interval.end;
                continue;
            }
            filled.runs.push(Run { step, window: interval.window, start, load: part });
            filled.steps = step + 1;
            time = start + pace.seconds(part.bytes);
            current = if rest.bytes > 0 { Some(rest) } else { loads.next() };
        }
        // All steps are equal: a load that found no interval in this step finds none in the next.
        if current.is_none() || filled.runs.len() == before {
            break;
        }
    }
    filled.rest = current.into_iter().chain(loads).collect();
    filled
}
