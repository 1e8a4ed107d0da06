//! Counts the subsets of a component that lose nothing by choosing one failed node after the other.
//!
//! The nodes that may still fail are a bit set, so the last choice is a popcount and no choice fails. Exponential only
//! in the number of failures: the method for few failures of nodes that share many sets.

use super::family::Component;
use super::weights::Weights;

/// Maximum words of the table of pairs: 128 MiB.
const MAX_WORDS: usize = 1 << 24;

/// An upper bound on the words and sets that [`search`] touches; infinite if it would keep too many.
pub(super) fn cost(component: &Component, failures: usize) -> f64 {
    let (nodes, words) = (component.nodes as f64, component.nodes.div_ceil(64));
    if component.nodes * words > MAX_WORDS {
        return f64::INFINITY;
    }
    let incidences: usize = component.sets.iter().map(Vec::len).filter(|&size| size > 2).sum();
    let (mut sum, mut choices) = (0.0, 1.0);
    for chosen in 0..failures.min(component.nodes) {
        sum += choices;
        choices *= (nodes - chosen as f64) / (chosen + 1) as f64;
    }
    // Choosing a node examines all sets that contain it.
    sum * (words as f64 + incidences as f64 / nodes.max(1.0))
}

/// Choices of 0, 1, …, `failures` nodes with which the component loses nothing.
pub(super) fn search<W: Weights>(component: &Component, weights: W, failures: usize) -> Vec<W::Sum> {
    let nodes = component.nodes;
    let mut search = Search::new(component, failures.min(nodes));
    search.choose(0);
    let weigh = |(failed, &count): (usize, &u64)| weights.choices(count, failed, nodes - failed);
    search.counts.iter().enumerate().map(weigh).collect()
}

struct Search<'a> {
    component: &'a Component,
    words: usize,
    failures: usize,
    /// `[nodes, words]`: the partners of each node in pairs.
    partners: Vec<u64>,
    /// For each node, its sets of three or more nodes.
    larger: Vec<Vec<usize>>,
    /// For each set, the number of its nodes that have not been chosen.
    left: Vec<usize>,
    chosen: Vec<bool>,
    /// `[failures, words]`: nodes that may be chosen next after a number of choices.
    open: Vec<u64>,
    /// Subsets of each size.
    counts: Vec<u64>,
}

impl<'a> Search<'a> {
    fn new(component: &'a Component, failures: usize) -> Self {
        let (nodes, words) = (component.nodes, component.nodes.div_ceil(64));
        let (mut partners, mut larger) = (vec![0; nodes * words], vec![Vec::new(); nodes]);
        for (index, set) in component.sets.iter().enumerate() {
            if let &[a, b] = &set[..] {
                partners[a * words + b / 64] |= 1 << (b % 64);
                partners[b * words + a / 64] |= 1 << (a % 64);
            } else {
                set.iter().for_each(|&node| larger[node].push(index));
            }
        }
        let left = component.sets.iter().map(Vec::len).collect();
        let mut open = vec![0; failures * words];
        (0..nodes).for_each(|node| open[node / 64] |= 1 << (node % 64));
        let mut counts = vec![0; failures + 1];
        counts[0] = 1;
        Self { component, words, failures, partners, larger, left, chosen: vec![false; nodes], open, counts }
    }

    /// Counts the extensions of the current `depth` choices by larger and larger nodes.
    fn choose(&mut self, depth: usize) {
        let row = depth * self.words;
        let count: u32 = self.open[row..row + self.words].iter().map(|word| word.count_ones()).sum();
        self.counts[depth + 1] += u64::from(count);
        if depth + 1 == self.failures {
            return;
        }
        for word in 0..self.words {
            while self.open[row + word] != 0 {
                let node = word * 64 + self.open[row + word].trailing_zeros() as usize;
                self.open[row + word] &= self.open[row + word] - 1;
                self.take(node, row);
                self.choose(depth + 1);
                self.put_back(node);
            }
        }
    }

    /// Computes the next row: the nodes of this row, without those that would complete a set with `node`.
    fn take(&mut self, node: usize, row: usize) {
        let next = row + self.words;
        for word in 0..self.words {
            self.open[next + word] = self.open[row + word] & !self.partners[node * self.words + word];
        }
        self.chosen[node] = true;
        for &index in &self.larger[node] {
            self.left[index] -= 1;
            if self.left[index] == 1 {
                let set = &self.component.sets[index];
                let last = set.iter().find(|&&other| !self.chosen[other]).map_or(0, |&last| last);
                self.open[next + last / 64] &= !(1 << (last % 64));
            }
        }
    }

    fn put_back(&mut self, node: usize) {
        self.chosen[node] = false;
        for &index in &self.larger[node] {
            self.left[index] += 1;
        }
    }
}
