//! Holder sets, reduced to the relevant ones and split into components that share no node.

use std::borrow::Cow;
use std::collections::VecDeque;

/// The minimal holder sets: without duplicates, supersets, and sets too large to fail.
pub(super) struct Family<'a> {
    /// Whether the node alone is a holder set, so that it must not fail.
    pub(super) vital: Vec<bool>,
    /// The sets of two nodes and more, each ascending; none has a vital node.
    pub(super) sets: Vec<Cow<'a, [usize]>>,
}

/// Sets that are connected by shared nodes, nodes numbered 0, 1, … along the component.
pub(super) struct Component {
    pub(super) nodes: usize,
    /// Each set ascending.
    pub(super) sets: Vec<Vec<usize>>,
}

impl<'a> Family<'a> {
    /// All of `holders` are non-empty and name nodes below `nodes`.
    pub(super) fn new(nodes: usize, holders: &'a [Vec<usize>], failures: usize) -> Self {
        let mut vital = vec![false; nodes];
        let mut sets: Vec<Cow<'a, [usize]>> = holders.iter().map(|set| ascending(set)).collect();
        for set in sets.iter().filter(|set| set.len() == 1) {
            vital[set[0]] = true;
        }
        sets.retain(|set| (2..=failures).contains(&set.len()) && !set.iter().any(|&node| vital[node]));
        sets.sort_unstable_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
        sets.dedup();
        if sets.first().map(|set| set.len()) != sets.last().map(|set| set.len()) {
            drop_supersets(nodes, &mut sets);
        }
        Self { vital, sets }
    }

    /// For each node, the sets that it is in.
    pub(super) fn sets_of_nodes(&self) -> Vec<Vec<usize>> {
        let mut found = vec![Vec::new(); self.vital.len()];
        for (index, set) in self.sets.iter().enumerate() {
            set.iter().for_each(|&node| found[node].push(index));
        }
        found
    }

    pub(super) fn components(&self) -> Vec<Component> {
        let mut walk = Walk::new(self);
        (0..self.vital.len()).filter_map(|node| walk.component(node)).collect()
    }
}

fn ascending(set: &[usize]) -> Cow<'_, [usize]> {
    if set.is_sorted_by(|a, b| a < b) {
        return set.into();
    }
    let mut sorted = set.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted.into()
}

/// `sets` ascend by size, so the subsets of a set have been kept before.
fn drop_supersets(nodes: usize, sets: &mut Vec<Cow<'_, [usize]>>) {
    let mut kept_by_first: Vec<Vec<Cow<'_, [usize]>>> = vec![Vec::new(); nodes];
    sets.retain(|set| {
        let inside = |other: &Cow<'_, [usize]>| other.iter().all(|node| set.binary_search(node).is_ok());
        let minimal = !set.iter().any(|&node| kept_by_first[node].iter().any(inside));
        if minimal {
            kept_by_first[set[0]].push(set.clone());
        }
        minimal
    });
}

/// Breadth-first walks over nodes that share a set.
struct Walk<'a> {
    family: &'a Family<'a>,
    sets_of: Vec<Vec<usize>>,
    /// The last walk that saw the node; walks are numbered from 1.
    seen: Vec<usize>,
    walks: usize,
    /// Index of the node within its component.
    number: Vec<usize>,
    done: Vec<bool>,
}

impl<'a> Walk<'a> {
    fn new(family: &'a Family<'a>) -> Self {
        let nodes = family.vital.len();
        let (seen, number, done) = (vec![0; nodes], vec![0; nodes], vec![false; nodes]);
        Self { family, sets_of: family.sets_of_nodes(), seen, walks: 0, number, done }
    }

    /// The component of a node that is in a set and in no component yet.
    fn component(&mut self, node: usize) -> Option<Component> {
        if self.done[node] || self.sets_of[node].is_empty() {
            return None;
        }
        // The node that is reached last lies at an end: a walk from that end has few open sets at a time.
        let order = self.from(node);
        let order = order.last().map_or_else(Vec::new, |&end| self.from(end));
        for (number, &node) in order.iter().enumerate() {
            (self.number[node], self.done[node]) = (number, true);
        }
        let mut indices: Vec<usize> = order.iter().flat_map(|&node| &self.sets_of[node]).copied().collect();
        indices.sort_unstable();
        indices.dedup();
        let renumbered = |&index: &usize| {
            let mut set: Vec<usize> = self.family.sets[index].iter().map(|&node| self.number[node]).collect();
            set.sort_unstable();
            set
        };
        Some(Component { nodes: order.len(), sets: indices.iter().map(renumbered).collect() })
    }

    /// All nodes that are connected to `start`, nearest first; of equally near ones those in the fewest sets first.
    fn from(&mut self, start: usize) -> Vec<usize> {
        self.walks += 1;
        self.seen[start] = self.walks;
        let (mut order, mut queue) = (Vec::new(), VecDeque::from([start]));
        while let Some(node) = queue.pop_front() {
            order.push(node);
            let first = queue.len();
            for &other in self.sets_of[node].iter().flat_map(|&index| self.family.sets[index].iter()) {
                if self.seen[other] != self.walks {
                    self.seen[other] = self.walks;
                    queue.push_back(other);
                }
            }
            queue.make_contiguous()[first..].sort_by_key(|&other| self.sets_of[other].len());
        }
        order
    }
}
