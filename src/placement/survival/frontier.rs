//! Walks along a component and keeps, for each state of its open sets, the number of choices for each number of failed
//! nodes. Polynomial if few sets are open at a time, as in rings and grids of any length.
//!
//! An open set whose nodes have all failed so far is represented by its remaining nodes. Sets with equal remainders are
//! merged, so a state is a bit set of remainders: after nodes 0 and 1 of `{0, 1, 4}` and `{1, 4}` of `{1, 3, 4}`, … the
//! remainder `[4]` says that node 4 must survive.

use super::family::Component;
use super::weights::{Weights, Window};
use std::collections::HashMap;

/// Maximum bytes of the sums kept at a time.
const MAX_KEPT_BYTES: usize = 128 << 20;

/// Choices of 0, 1, …, `failures` nodes with which the component loses nothing; None if that takes more than `work`
/// steps, which are deducted from `work`.
pub(super) fn frontier<W: Weights>(
    component: &Component,
    weights: W,
    failures: usize,
    work: &mut usize,
) -> Option<Vec<W::Sum>> {
    let mut states: States<W> =
        States { keys: vec![0], values: vec![1.into()], window: Window { first: 0, size: 1 } };
    for (node, step) in steps(component)?.iter().enumerate() {
        let window = weights.window(node + 1, failures);
        *work = work.checked_sub(states.keys.len() * (window.size + STATE_COST))?;
        states = states.advance(step, weights, window)?;
    }
    // All sets are closed: one state is left.
    let mut found = vec![0.into(); states.window.first];
    found.extend(states.values);
    Some(found)
}

/// Looking up a state costs as much as this many multiplications.
const STATE_COST: usize = 200;

/// Effect of a node on a state. Bits stand for remainders.
#[derive(Default)]
struct Step {
    /// Remainders that consist of the node alone: it must not fail.
    last: u128,
    /// Remainders that begin with the node.
    ending: u128,
    /// A remainder that begins with the node, and its successor once the node has failed.
    moves: Vec<(u128, u128)>,
    /// Remainders of the sets that begin with the node, once it has failed.
    begun: u128,
}

impl Step {
    /// The state after the node has failed, or None if that completes a set.
    fn failed(&self, state: u128) -> Option<u128> {
        let moved = |next, &(from, to): &(u128, u128)| if state & from != 0 { next | to } else { next };
        (state & self.last == 0).then(|| self.moves.iter().fold(state & !self.ending | self.begun, moved))
    }
}

/// One step per node, or None if more than 128 remainders are open at a time.
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

struct States<W: Weights> {
    keys: Vec<u128>,
    /// `[states, window]`
    values: Vec<W::Sum>,
    window: Window,
}

impl<W: Weights> States<W> {
    fn advance(&self, step: &Step, weights: W, window: Window) -> Option<Self> {
        let mut next = Self { keys: Vec::new(), values: Vec::new(), window };
        let mut index = HashMap::new();
        for (&key, values) in self.keys.iter().zip(self.values.chunks(self.window.size)) {
            next.add(&mut index, key & !step.ending, values, self.window.first, weights.alive());
            if let Some(key) = step.failed(key) {
                next.add(&mut index, key, values, self.window.first + 1, weights.failed());
            }
        }
        (size_of_val(&next.values[..]) <= MAX_KEPT_BYTES).then_some(next)
    }

    /// Adds `values`, which begin at `first` failures, times `weight` to the state.
    fn add(
        &mut self,
        index: &mut HashMap<u128, usize>,
        key: u128,
        values: &[W::Sum],
        first: usize,
        weight: W::Sum,
    ) {
        let size = self.window.size;
        let state = *index.entry(key).or_insert_with(|| {
            self.keys.push(key);
            self.values.resize(self.values.len() + size, 0.into());
            self.keys.len() - 1
        });
        let row = &mut self.values[state * size..(state + 1) * size];
        let skipped = self.window.first.saturating_sub(first).min(values.len());
        let from = (first + skipped).saturating_sub(self.window.first).min(size);
        for (sum, value) in row[from..].iter_mut().zip(&values[skipped..]) {
            *sum += weight * *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::binomial::Chance;
    use super::super::family::Family;
    use super::super::search::search;
    use super::super::weights::Counted;
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
                let mut counted = search(&component, Counted, failures);
                counted.truncate(failures.min(component.nodes) + 1);
                prop_assert_eq!(frontier(&component, Counted, failures, &mut (1 << 30)).unwrap(), counted);
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
        // one node in 129 pairs, each with another remainder
        let star =
            |pairs| Component { nodes: pairs + 1, sets: (1..=pairs).map(|node| vec![0, node]).collect() };
        assert!(frontier(&star(128), chance, 3, &mut (1 << 20)).is_some());
        assert!(frontier(&star(129), chance, 3, &mut (1 << 20)).is_none());
    }
}
