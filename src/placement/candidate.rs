//! A placement with what it is worth: survival, evenness, spread, and what moves.

use super::assign::Assignment;
use super::domains::nodes_of;
use super::layout::{Problem, fatal_sets};
use super::result::{Construction, Placement, Reason};
use super::survival::{Share, weigh};
use std::cmp::Ordering;

/// Loads that differ by less, relatively, are the same.
pub(super) const NOISE: f64 = 1e-9;
/// Steps that one exact survival may take, some milliseconds of them; beyond that it is sampled.
const MOST_WORK: usize = 1 << 23;

/// A placement with what it is worth.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) construction: Construction,
    /// `[nodes, experts]` replicas.
    pub(super) matrix: Vec<i64>,
    /// At the losses of the problem.
    pub(super) survival: Share,
    pub(super) imbalance: f64,
}

impl Candidate {
    pub(super) fn new(problem: &Problem, construction: Construction, matrix: Vec<i64>) -> Self {
        let survival = survival(problem, &matrix, problem.failures);
        let imbalance = imbalance(problem, &matrix);
        Self { construction, matrix, survival, imbalance }
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
        Placement { matrix: self.matrix, reason }
    }

    /// Whether nodes are as evenly loaded as in the other, less, or more, but for rounding.
    pub(super) fn compare_imbalance(&self, other: &Self) -> Ordering {
        let near = (self.imbalance - other.imbalance).abs() <= NOISE * other.imbalance;
        if near { Ordering::Equal } else { self.imbalance.total_cmp(&other.imbalance) }
    }

    /// Survival of one more loss than the problem counts; none where no domain would be left.
    pub(super) fn survival_of_one_more(&self, problem: &Problem) -> Option<Share> {
        let failures = problem.failures + 1;
        (failures < problem.domains).then(|| survival(problem, &self.matrix, failures))
    }

    /// (node, expert) pairs.
    pub(super) fn pairs(&self) -> usize {
        self.matrix.iter().filter(|&&count| count > 0).count()
    }

    /// (node, expert) pairs that the node did not hold before.
    pub(super) fn moved(&self, problem: &Problem) -> usize {
        let new = |cell: &usize| {
            self.matrix[*cell] > 0 && !problem.held(cell / problem.experts, cell % problem.experts)
        };
        (0..self.matrix.len()).filter(new).count()
    }

    /// The fewest distinct domains of an expert.
    pub(super) fn spread(&self, problem: &Problem) -> usize {
        let mut nodes: Vec<usize> = (0..problem.nodes).collect();
        nodes.sort_by_key(|&node| problem.domain[node]);
        // As domain follows domain, a domain is new to an expert if it is not the last one that it was seen in.
        let mut seen = vec![(0, usize::MAX); problem.experts];
        for node in nodes {
            let (row, domain) =
                (&self.matrix[node * problem.experts..][..problem.experts], problem.domain[node]);
            for ((distinct, last), _) in seen.iter_mut().zip(row).filter(|(_, count)| **count > 0) {
                *distinct += usize::from(std::mem::replace(last, domain) != domain);
            }
        }
        seen.into_iter().map(|(distinct, _)| distinct).min().unwrap_or(0)
    }

    /// The placement with its rows given to the nodes that have the most of them already; rows of nodes that fail together
    /// stay together.
    pub(super) fn settled(mut self, problem: &Problem) -> Self {
        if problem.previous.is_empty() {
            return self;
        }
        let experts = problem.experts;
        let rows = |holds: &dyn Fn(usize) -> bool| -> Vec<Vec<usize>> {
            let holders =
                |expert: usize| (0..problem.nodes).filter(|node| holds(node * experts + expert)).collect();
            (0..experts).map(holders).collect()
        };
        let assignment = Assignment {
            nbytes: &vec![1; experts],
            holders: &rows(&|cell| problem.previous[cell]),
            needers: &rows(&|cell| self.matrix[cell] > 0),
            nodes: problem.nodes,
            positions: problem.nodes,
            groups: &nodes_of(&problem.domain),
        };
        let mut matrix = vec![0; self.matrix.len()];
        for (row, node) in self.matrix.chunks_exact(experts).zip(assignment.solve()) {
            matrix[node * experts..][..experts].copy_from_slice(row);
        }
        self.matrix = matrix;
        self
    }
}

fn survival(problem: &Problem, matrix: &[i64], failures: usize) -> Share {
    weigh(problem.domains, &fatal_sets(problem, matrix, failures), failures, MOST_WORK)
}

/// Load of the busiest node over the mean.
fn imbalance(problem: &Problem, matrix: &[i64]) -> f64 {
    let load = |row: &[i64]| {
        let held = row.iter().zip(&problem.weight).filter(|(count, _)| **count > 0);
        held.map(|(&count, weight)| count as f64 * weight).sum::<f64>()
    };
    let busiest = matrix.chunks_exact(problem.experts).map(load).fold(0.0, f64::max);
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
