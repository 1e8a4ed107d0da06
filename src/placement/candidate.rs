//! A placement with its qualities: survival, evenness, spread, and moves.

use super::assign::Assignment;
use super::domains::nodes_of;
use super::layout::{Problem, fatal_sets};
use super::result::{Construction, Placement, Reason};
use super::rows::{Rows, holders_of, matrix_of};
use super::survival::{Share, weigh};
use std::cmp::Ordering;

/// Relative difference up to which loads count as equal.
pub(super) const NOISE: f64 = 1e-9;
/// Maximum steps of one exact survival, some milliseconds; beyond that it is sampled.
const MAX_WORK: usize = 1 << 23;

/// A placement with its qualities.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) construction: Construction,
    /// Replicas of each node.
    pub(super) rows: Rows,
    /// Survival at the losses of the problem.
    pub(super) survival: Share,
    pub(super) imbalance: f64,
}

impl Candidate {
    pub(super) fn new(problem: &Problem, construction: Construction, rows: Rows) -> Self {
        let survival = survival(problem, &rows, problem.failures);
        let imbalance = imbalance(problem, &rows);
        Self { construction, rows, survival, imbalance }
    }

    pub(super) fn into_placement(self, problem: &Problem) -> Placement {
        let reason = Reason {
            construction: self.construction,
            failures: problem.failures,
            survival: self.survival.probability(),
            spread: self.spread(problem),
            imbalance: self.imbalance,
            least_imbalance: least_imbalance(problem),
            moved: (!problem.previous.is_empty()).then(|| self.moved(problem)),
        };
        Placement { matrix: matrix_of(self.rows.iter().map(Vec::as_slice), problem.experts), reason }
    }

    /// Compares how evenly the nodes are loaded, ignoring rounding.
    pub(super) fn compare_imbalance(&self, other: &Self) -> Ordering {
        let near = (self.imbalance - other.imbalance).abs() <= NOISE * other.imbalance;
        if near { Ordering::Equal } else { self.imbalance.total_cmp(&other.imbalance) }
    }

    /// Survival of one more loss than the problem counts; none if no domain would be left.
    pub(super) fn survival_of_one_more(&self, problem: &Problem) -> Option<Share> {
        let failures = problem.failures + 1;
        (failures < problem.domains).then(|| survival(problem, &self.rows, failures))
    }

    /// (node, expert) pairs.
    pub(super) fn pairs(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// (node, expert) pairs that the node did not hold before.
    pub(super) fn moved(&self, problem: &Problem) -> usize {
        let new = |(node, row): (usize, &Vec<(usize, i64)>)| {
            row.iter().filter(|&&(expert, _)| !problem.held(node, expert)).count()
        };
        self.rows.iter().enumerate().map(new).sum()
    }

    /// Minimum number of distinct domains over the experts.
    pub(super) fn spread(&self, problem: &Problem) -> usize {
        let mut nodes: Vec<usize> = (0..problem.nodes).collect();
        nodes.sort_by_key(|&node| problem.domain[node]);
        // As domains follow each other, a domain is new to an expert if it is not the last one seen.
        let mut seen = vec![(0, usize::MAX); problem.experts];
        for node in nodes {
            let domain = problem.domain[node];
            for &(expert, _) in &self.rows[node] {
                let (distinct, last) = &mut seen[expert];
                *distinct += usize::from(std::mem::replace(last, domain) != domain);
            }
        }
        seen.into_iter().map(|(distinct, _)| distinct).min().unwrap_or(0)
    }

    /// Returns the placement with its rows assigned to the nodes that already have the most of them; rows of nodes that
    /// fail together stay together.
    pub(super) fn settled(mut self, problem: &Problem) -> Self {
        if problem.previous.is_empty() {
            return self;
        }
        let assignment = Assignment {
            nbytes: &vec![1; problem.experts],
            holders: &holders_of(&problem.previous, problem.experts),
            needers: &holders_of(&self.rows, problem.experts),
            nodes: problem.nodes,
            positions: problem.nodes,
            groups: &nodes_of(&problem.domain),
        };
        let node_map = assignment.solve();
        let mut rows = vec![Vec::new(); problem.nodes];
        for (row, node) in self.rows.into_iter().zip(node_map) {
            rows[node] = row;
        }
        self.rows = rows;
        self
    }
}

fn survival(problem: &Problem, rows: &Rows, failures: usize) -> Share {
    weigh(problem.domains, &fatal_sets(problem, rows, failures), failures, MAX_WORK)
}

/// Load of the busiest node over the mean.
fn imbalance(problem: &Problem, rows: &Rows) -> f64 {
    let load = |row: &Vec<(usize, i64)>| {
        row.iter().map(|&(expert, count)| count as f64 * problem.weight[expert]).sum::<f64>()
    };
    let busiest = rows.iter().map(load).fold(0.0, f64::max);
    let mean = problem.mean_load();
    if mean > 0.0 { busiest / mean } else { 1.0 }
}

/// Lower bound on imbalance over all placements of these replicas: load of the busiest node over the mean.
///
/// One node has `k + 1` of the heaviest `k · nodes + 1` replicas, each at least as heavy as the last of them, and the
/// rest of its slots filled, with the lightest replicas at best.
///
/// ```text
/// 3 nodes × 2 slots, mean load 4: replicas of 5 3 1 1 1 1 → one of 5 and one of 1 on a node: 6 / 4
/// ```
pub(super) fn least_imbalance(problem: &Problem) -> f64 {
    let mean = problem.mean_load();
    if mean <= 0.0 {
        return 1.0;
    }
    let replicas = |expert: usize| problem.each[expert] * problem.nodes + problem.wanted[expert];
    let of_expert = |expert: usize| std::iter::repeat_n(problem.weight[expert], replicas(expert));
    let mut descending: Vec<f64> = (0..problem.experts).flat_map(of_expert).collect();
    descending.sort_unstable_by(|a, b| b.total_cmp(a));
    let slots = descending.len() / problem.nodes;
    let mut lightest = vec![0.0];
    lightest.extend(descending.iter().rev().take(slots).scan(0.0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    }));
    let peak = |k: usize| (k + 1) as f64 * descending[k * problem.nodes] + lightest[slots - k - 1];
    (0..slots).map(peak).fold(mean, f64::max) / mean
}
