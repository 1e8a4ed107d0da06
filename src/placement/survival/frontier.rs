//! Walks along a component and keeps, for each way that its open sets can stand, the probability of each number of
//! failures: polynomial where few sets are open at a time, as in rings and grids of any length.
//!
//! What matters of an open set of which all nodes have failed so far is what is left of it. Sets of which the same is
//! left are one, so a state is a bit set of such rests: after nodes 0 and 1 of `{0, 1, 4}` and `{1, 4}` of
//! `{1, 3, 4}`, … the rest `[4]` says that node 4 must stay.

use super::binomial::Chance;
use super::family::Component;
use std::collections::HashMap;

/// ln of the probability of numbers of failures that are left out, on each side and at each node: below 10⁻²⁵.
const NEGLIGIBLE: f64 = 58.0;

/// Probabilities kept at a time, at most: 128 MiB.
const MOST_KEPT: usize = 1 << 24;

/// Probability that the component loses nothing and 0, 1, …, `failures` of its nodes fail; None if that takes more
/// than `work` steps, which it is charged for.
pub(super) fn frontier(
    component: &Component,
    chance: Chance,
    failures: usize,
    work: &mut usize,
) -> Option<Vec<f64>> {
    let mut states = States { keys: vec![0], values: vec![1.0], window: Window { first: 0, size: 1 } };
    for (node, step) in steps(component)?.iter().enumerate() {
        let window = Window::after(node + 1, chance, failures);
        *work = work.checked_sub(states.keys.len() * (window.size + STATE_COST))?;
        states = states.advance(step, chance, window)?;
    }
    // All sets are closed: one state is left.
    let mut found = vec![0.0; states.window.first];
    found.extend(states.values);
    Some(found)
}

/// Looking up a state costs as much as this many multiplications.
const STATE_COST: usize = 200;

/// Effect of a node on a state. Bits stand for rests.
#[derive(Default)]
struct Step {
    /// Rests that consist of the node: it must not fail.
    last: u128,
    /// Rests that begin with the node.
    ending: u128,
    /// A rest that begins with the node, and what is left of it once the node has failed.
    moves: Vec<(u128, u128)>,
    /// Rests of the sets that begin with the node once it has failed.
    begun: u128,
}

impl Step {
    /// The state after the node has failed, or None if that completes a set.
    fn failed(&self, state: u128) -> Option<u128> {
        let moved = |next, &(from, to): &(u128, u128)| if state & from != 0 { next | to } else { next };
        (state & self.last == 0).then(|| self.moves.iter().fold(state & !self.ending | self.begun, moved))
    }
}

/// One step for each node, or None if more than 128 rests are open at a time.
fn steps(component: &Component) -> Option<Vec<Step>> {
    let mut begin: Vec<Vec<&[usize]>> = vec![Vec::new(); component.nodes];
    component.sets.iter().for_each(|set| begin[set[0]].push(set));
    let mut rests: Vec<Vec<(&[usize], u128)>> = vec![Vec::new(); component.nodes];
    let mut free = u128::MAX;
    let mut steps = Vec::with_capacity(component.nodes);
    for node in 0..component.nodes {
        let mut step = Step::default();
        let ending = std::mem::take(&mut rests[node]);
        ending.iter().for_each(|(_, bit)| step.ending |= bit);
        let mut bit_of = |rest| {
            let known: &mut Vec<(&[usize], u128)> = &mut rests[first(rest)];
            if let Some((_, bit)) = known.iter().find(|(other, _)| *other == rest) {
                return Some(*bit);
            }
            let bit = (free != 0).then(|| 1 << free.trailing_zeros())?;
            free &= !bit;
            known.push((rest, bit));
            Some(bit)
        };
        for &(rest, bit) in &ending {
            match &rest[1..] {
                [] => step.last |= bit,
                rest => step.moves.push((bit, bit_of(rest)?)),
            }
        }
        for set in &begin[node] {
            step.begun |= bit_of(&set[1..])?;
        }
        free |= step.ending;
        steps.push(step);
    }
    Some(steps)
}

fn first(rest: &[usize]) -> usize {
    rest[0]
}

/// The numbers of failures that are kept: `size` of them from `first` on.
#[derive(Clone, Copy)]
struct Window {
    first: usize,
    size: usize,
}

impl Window {
    /// Bernstein's inequality bounds how far from its mean the number of failures of `nodes` is.
    fn after(nodes: usize, chance: Chance, failures: usize) -> Self {
        let mean = nodes as f64 * chance.failed;
        let third = NEGLIGIBLE / 3.0;
        let reach = third + (third * third + 2.0 * NEGLIGIBLE * mean * chance.alive).sqrt();
        let first = ((mean - reach).max(0.0) as usize).min(failures);
        let last = (mean + reach) as usize + 1;
        Self { first, size: last.min(failures).min(nodes) + 1 - first }
    }
}

struct States {
    keys: Vec<u128>,
    /// `[states, window]`
    values: Vec<f64>,
    window: Window,
}

impl States {
    fn advance(&self, step: &Step, chance: Chance, window: Window) -> Option<Self> {
        let mut next = Self { keys: Vec::new(), values: Vec::new(), window };
        let mut index = HashMap::new();
        for (&key, values) in self.keys.iter().zip(self.values.chunks(self.window.size)) {
            next.add(&mut index, key & !step.ending, values, self.window.first, chance.alive);
            if let Some(key) = step.failed(key) {
                next.add(&mut index, key, values, self.window.first + 1, chance.failed);
            }
        }
        (next.values.len() <= MOST_KEPT).then_some(next)
    }

    /// Adds `values`, which begin at `first` failures, times `weight` to the state.
    fn add(
        &mut self,
        index: &mut HashMap<u128, usize>,
        key: u128,
        values: &[f64],
        first: usize,
        weight: f64,
    ) {
        let size = self.window.size;
        let state = *index.entry(key).or_insert_with(|| {
            self.keys.push(key);
            self.values.resize(self.values.len() + size, 0.0);
            self.keys.len() - 1
        });
        let row = &mut self.values[state * size..(state + 1) * size];
        let skipped = self.window.first.saturating_sub(first).min(values.len());
        let from = (first + skipped).saturating_sub(self.window.first).min(size);
        for (sum, value) in row[from..].iter_mut().zip(&values[skipped..]) {
            *sum += weight * value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::family::Family;
    use super::super::search::search;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frontier_and_search_agree(
            sets in prop::collection::vec(prop::collection::vec(0..16_usize, 2..6), 1..24), failures in 1..16_usize,
        ) {
            let chance = Chance::of(failures, 16);
            for component in Family::new(16, &sets, failures).components() {
                let found = frontier(&component, chance, failures, &mut (1 << 30)).unwrap();
                for (k, expected) in search(&component, chance, failures).into_iter().enumerate() {
                    let found = found.get(k).copied().unwrap_or(0.0);
                    prop_assert!((found - expected).abs() < 1e-13, "{} failures: {} or {}", k, found, expected);
                }
            }
        }
    }

    #[test]
    fn too_much_work_and_too_many_open_sets_are_refused() {
        let ring = Component { nodes: 9, sets: (0..8).map(|node| vec![node, node + 1]).collect() };
        let chance = Chance::of(3, 9);
        let mut work = 1 << 20;
        assert!(frontier(&ring, chance, 3, &mut work).is_some());
        let needed = (1 << 20) - work;
        assert!(frontier(&ring, chance, 3, &mut needed.clone()).is_some());
        assert!(frontier(&ring, chance, 3, &mut (needed - 1)).is_none());
        // one node in 129 pairs, each with another rest
        let star =
            |pairs| Component { nodes: pairs + 1, sets: (1..=pairs).map(|node| vec![0, node]).collect() };
        assert!(frontier(&star(128), chance, 3, &mut (1 << 20)).is_some());
        assert!(frontier(&star(129), chance, 3, &mut (1 << 20)).is_none());
    }
}
