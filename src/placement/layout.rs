//! A placement in construction: the experts of each node, with the nodes' loads kept up to date.

use super::rows::{Rows, renumbered};
use std::collections::BTreeSet;

/// Problem of a placement. Experts with more replicas than nodes are on every node the same number of times. `wanted`
/// and `slots` are the remainder, so that every expert wants at most one replica per node.
#[derive(Clone)]
pub(super) struct Problem {
    pub(super) nodes: usize,
    pub(super) experts: usize,
    /// Slots of each node for the wanted replicas.
    pub(super) slots: usize,
    /// Replicas of each expert that every node holds.
    pub(super) each: Vec<usize>,
    /// Replicas of each expert to be placed on distinct nodes.
    pub(super) wanted: Vec<usize>,
    /// Load of one replica of each expert, with an even split of its tokens.
    pub(super) weight: Vec<f64>,
    /// The failure domain of each node, numbered from 0.
    pub(super) domain: Vec<usize>,
    pub(super) domains: usize,
    /// Distinct domains that every expert must be on: the minimum number of replicas of an expert, or as many as have
    /// room.
    pub(super) spread: usize,
    /// Simultaneous losses of domains for which survival is computed.
    pub(super) failures: usize,
    /// Current replicas of each node; empty without a previous placement.
    pub(super) previous: Rows,
}

impl Problem {
    /// Whether each node is its own failure domain.
    pub(super) fn nodes_fail_alone(&self) -> bool {
        self.domains == self.nodes
    }

    /// Total slots of each node.
    pub(super) fn slots_of_node(&self) -> usize {
        self.slots + self.each.iter().sum::<usize>()
    }

    /// The problem without a previous placement.
    pub(super) fn without_previous(&self) -> Self {
        Self { previous: Vec::new(), ..self.clone() }
    }

    /// Replicas of each expert.
    pub(super) fn replicas(&self) -> Vec<i64> {
        let all = |(&each, &wanted): (&usize, &usize)| (each * self.nodes + wanted) as i64;
        self.each.iter().zip(&self.wanted).map(all).collect()
    }

    /// An order of the experts that does not depend on how they are numbered: ascending replicas, then load, then the
    /// nodes that hold them. Experts that are equal in all of these may be exchanged.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut nodes = vec![Vec::new(); self.experts];
        for (node, row) in self.previous.iter().enumerate() {
            row.iter().for_each(|&(expert, count)| nodes[expert].push((node, count)));
        }
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|&one, &two| {
            (self.each[one], self.wanted[one])
                .cmp(&(self.each[two], self.wanted[two]))
                .then_with(|| self.weight[one].total_cmp(&self.weight[two]))
                .then_with(|| nodes[one].cmp(&nodes[two]))
        });
        order
    }

    /// The problem with the experts in this order; `number` has the place of each in it.
    pub(super) fn numbered(&self, order: &[usize], number: &[usize]) -> Self {
        Self {
            each: order.iter().map(|&expert| self.each[expert]).collect(),
            wanted: order.iter().map(|&expert| self.wanted[expert]).collect(),
            weight: order.iter().map(|&expert| self.weight[expert]).collect(),
            previous: renumbered(&self.previous, number),
            domain: self.domain.clone(),
            ..*self
        }
    }

    pub(super) fn held(&self, node: usize, expert: usize) -> bool {
        let row = self.previous.get(node);
        row.is_some_and(|row| row.binary_search_by_key(&expert, |&(held, _)| held).is_ok())
    }

    /// Load of a node under perfect balance.
    pub(super) fn mean_load(&self) -> f64 {
        let replicas = |expert: usize| (self.each[expert] * self.nodes + self.wanted[expert]) as f64;
        (0..self.experts).map(|expert| replicas(expert) * self.weight[expert]).sum::<f64>()
            / self.nodes as f64
    }

    /// Load that the replicas in `each` put on every node.
    fn common_load(&self) -> f64 {
        self.each.iter().zip(&self.weight).map(|(&each, weight)| each as f64 * weight).sum()
    }
}

/// Distinct experts on each node, and derived quantities.
pub(super) struct Layout {
    experts: usize,
    slots: usize,
    /// `[nodes, experts]`.
    on: Vec<bool>,
    /// Experts of each node, unordered.
    pub(super) rows: Vec<Vec<usize>>,
    pub(super) load: Vec<f64>,
}

impl Layout {
    pub(super) fn new(problem: &Problem) -> Self {
        Self {
            experts: problem.experts,
            slots: problem.slots,
            on: vec![false; problem.nodes * problem.experts],
            rows: vec![Vec::with_capacity(problem.slots); problem.nodes],
            load: vec![problem.common_load(); problem.nodes],
        }
    }

    pub(super) fn holds(&self, node: usize, expert: usize) -> bool {
        self.on[node * self.experts + expert]
    }

    pub(super) fn room(&self, node: usize) -> usize {
        self.slots - self.rows[node].len()
    }

    pub(super) fn put(&mut self, problem: &Problem, node: usize, expert: usize) {
        self.on[node * self.experts + expert] = true;
        self.rows[node].push(expert);
        self.load[node] += problem.weight[expert];
    }

    pub(super) fn take(&mut self, problem: &Problem, node: usize, expert: usize) {
        self.on[node * self.experts + expert] = false;
        self.rows[node].retain(|&held| held != expert);
        self.load[node] -= problem.weight[expert];
    }

    /// Replicas of each node.
    pub(super) fn replicas(&self, problem: &Problem) -> Rows {
        let common: Vec<usize> = (0..self.experts).filter(|&expert| problem.each[expert] > 0).collect();
        let row = |node: usize| {
            let alone = self.rows[node].iter().copied().filter(|&expert| problem.each[expert] == 0);
            let mut held: Vec<usize> = common.iter().copied().chain(alone).collect();
            held.sort_unstable();
            let count = |expert| problem.each[expert] as i64 + i64::from(self.holds(node, expert));
            held.into_iter().map(|expert| (expert, count(expert))).collect()
        };
        (0..problem.nodes).map(row).collect()
    }
}

/// The sets of at most `failures` domains whose loss would lose an expert, each once.
pub(super) fn fatal_sets(problem: &Problem, rows: &Rows, failures: usize) -> Vec<Vec<usize>> {
    // The first domains of each expert; larger counts only say that there are more than `failures`.
    let mut domains = vec![0; problem.experts * failures];
    let mut counts = vec![0; problem.experts];
    let alone = problem.nodes_fail_alone();
    for (row, &domain) in rows.iter().zip(&problem.domain) {
        for &(expert, _) in row {
            let count = counts[expert];
            let found = &mut domains[expert * failures..][..failures];
            if count <= failures && (alone || !found[..count].contains(&domain)) {
                if let Some(next) = found.get_mut(count) {
                    *next = domain;
                }
                counts[expert] += 1;
            }
        }
    }
    let mut sets = BTreeSet::new();
    for (found, count) in domains.chunks_exact_mut(failures).zip(counts) {
        if count <= failures {
            found[..count].sort_unstable();
            sets.insert(found[..count].to_vec());
        }
    }
    sets.into_iter().collect()
}
