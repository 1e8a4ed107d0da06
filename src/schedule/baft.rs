//! BAFT: each window takes the uncut units that together have the most bytes.

use super::capacity::{Interval, Load, Work};
use super::knapsack::{Class, Item, MAX_BRANCHES, denser, fill as choose};
use super::pace::{Pace, ROUNDING};
use super::stream::{Filled, Run};

/// Remaining loads for one destination, by size.
struct Pool {
    intervals: usize,
    /// Densest first.
    classes: Vec<Class>,
    /// Loads of each class, the next one last.
    members: Vec<Vec<Load>>,
    /// Number of exhausted classes.
    empty: usize,
}

/// Maximum number of parts of a unit; the rest is left over.
const MAX_PARTS: usize = 1 << 16;

/// Fills the intervals of up to `max_steps` equal steps. A unit that no interval can take is cut to the size that the
/// longest can.
pub(super) fn fill(work: &Work, pace: &Pace, max_steps: usize) -> Filled {
    let mut filled = Filled::default();
    let mut pools: Vec<Pool> = Vec::new();
    for loads in &work.loads {
        let Some(first) = loads.first() else { continue };
        let longest = work.intervals[first.intervals]
            .iter()
            .map(|interval| interval.end - interval.start)
            .fold(0.0, f64::max);
        // No window takes two parts of the size that the longest one can take.
        let most_parts = work.intervals[first.intervals].len().saturating_mul(max_steps).min(MAX_PARTS);
        pools.push(Pool::new(loads, longest, most_parts, pace));
    }
    let mut order: Vec<(usize, Interval)> = Vec::new();
    for (number, pool) in pools.iter().enumerate() {
        order.extend(work.intervals[pool.intervals].iter().map(|&interval| (number, interval)));
    }
    order.sort_by(|(a, first), (b, second)| first.start.total_cmp(&second.start).then(a.cmp(b)));
    // A few windows are searched thoroughly, a thousand of them less so.
    let branches = ((1 << 18) / order.len().max(1)).clamp(128, MAX_BRANCHES);
    for step in 0..max_steps {
        let before = filled.runs.len();
        let mut time = f64::NEG_INFINITY;
        for &(number, interval) in &order {
            let mut start = interval.start.max(time);
            for load in pools[number].take(interval.end - start + ROUNDING, branches) {
                filled.runs.push(Run { step, window: interval.window, start, load });
                start += pace.seconds(load.bytes);
                filled.steps = step + 1;
                time = start;
            }
        }
        if filled.runs.len() == before || pools.iter().all(Pool::is_empty) {
            break;
        }
    }
    filled.rest = pools.into_iter().flat_map(|pool| pool.members.into_iter().flatten()).collect();
    filled.rest.sort_by_key(|load| (load.unit, load.destination, load.offset));
    filled
}

impl Pool {
    fn new(loads: &[Load], longest: f64, most_parts: usize, pace: &Pace) -> Self {
        let mut parts: Vec<(Item, Load)> = Vec::new();
        for &load in loads {
            let most = if pace.seconds(load.bytes) > longest + ROUNDING {
                pace.fit(load.bytes, longest)
            } else {
                load.bytes
            };
            // If not a single byte fits, the load stays in one piece and is left over. So is the part that exceeds all
            // windows.
            let mut parts_left = if most > 0 && most < load.bytes { most_parts } else { 0 };
            let mut rest = load;
            while rest.bytes > 0 {
                let bytes = if parts_left > 0 { most.min(rest.bytes) } else { rest.bytes };
                parts_left = parts_left.saturating_sub(1);
                let (part, others) = rest.split(bytes);
                parts.push((Item { seconds: pace.seconds(part.bytes), bytes: part.bytes }, part));
                rest = others;
            }
        }
        // Within a class, later units come first, since loads are taken from its end.
        parts.sort_by(|(a, one), (b, other)| {
            denser(a, b).then((other.unit, other.offset).cmp(&(one.unit, one.offset)))
        });
        let mut pool =
            Self { intervals: loads[0].intervals, classes: Vec::new(), members: Vec::new(), empty: 0 };
        for class in parts.chunk_by(|(a, _), (b, _)| a == b) {
            pool.classes.push(Class { item: class[0].0, count: class.len() });
            pool.members.push(class.iter().map(|(_, load)| *load).collect());
        }
        pool
    }

    fn is_empty(&self) -> bool {
        self.members.iter().all(Vec::is_empty)
    }

    /// Removes the loads that together have the most bytes within `seconds`.
    fn take(&mut self, seconds: f64, branches: usize) -> Vec<Load> {
        let left = self.classes.iter().filter(|class| class.count > 0);
        let smallest = left.map(|class| class.item.seconds).fold(f64::INFINITY, f64::min);
        if smallest > seconds {
            return Vec::new();
        }
        let mut taken = Vec::new();
        for (place, count) in choose(&self.classes, seconds, smallest, branches) {
            self.classes[place].count -= count;
            self.empty += usize::from(self.classes[place].count == 0);
            let left = self.members[place].len() - count;
            taken.extend(self.members[place].drain(left..).rev());
        }
        // Compacting on each call would be slow: there may be thousands of classes and of windows.
        if 8 * self.empty >= self.classes.len() {
            self.empty = 0;
            self.members.retain(|members| !members.is_empty());
            self.classes.retain(|class| class.count > 0);
        }
        taken
    }
}
