//! Exchanges of two replicas, as long as one makes a placement safer.

use super::candidate::Candidate;
use super::layout::Problem;
use super::result::Construction;
use super::rows::{matrix_of, rows_of};
use std::collections::BTreeSet;

/// Maximum pairs of replicas × sets of failures for which all exchanges are tried.
const MAX_CLIMBED: f64 = (1 << 17) as f64;

/// Whether there are few enough exchanges, with few enough losses each, to try them all.
pub(super) fn climbs(problem: &Problem) -> bool {
    let replicas = (problem.nodes * problem.slots_of_node()) as f64;
    let losses = (0..problem.failures).map(|lost| (problem.domains - lost) as f64 / (lost + 1) as f64);
    problem.domains <= 64
        && problem.failures < problem.domains
        && replicas * replicas * losses.product::<f64>() <= MAX_CLIMBED
}

/// The placement after exchanges of two replicas, as long as one makes it safer; for problems that [`climbs`].
pub(super) fn climbed(problem: &Problem, candidate: Candidate) -> Candidate {
    let experts = problem.experts;
    let mut matrix = matrix_of(candidate.rows.iter().map(Vec::as_slice), experts);
    let mut losses = Losses::new(problem, &matrix);
    let mut held: BTreeSet<usize> = (0..matrix.len()).filter(|&cell| matrix[cell] > 0).collect();
    let (mut found, mut exchanged) = (true, false);
    while found {
        found = false;
        let mut from = 0;
        while let Some(&one) = held.range(from..).next() {
            from = one + 1;
            let mut beyond = from;
            while let Some(&two) = held.range(beyond..).next() {
                beyond = two + 1;
                let crossed =
                    [one / experts * experts + two % experts, two / experts * experts + one % experts];
                if crossed.iter().any(|cell| held.contains(cell)) || !losses.improve(problem, [one, two]) {
                    continue;
                }
                (found, exchanged) = (true, true);
                for (left, taken) in [(one, crossed[1]), (two, crossed[0])] {
                    matrix[left] -= 1;
                    matrix[taken] += 1;
                    held.insert(taken);
                    if matrix[left] == 0 {
                        held.remove(&left);
                    }
                }
                if !held.contains(&one) {
                    break;
                }
            }
        }
    }
    match exchanged {
        true => Candidate::new(problem, Construction::Exchanged, rows_of(&matrix, experts)),
        false => candidate,
    }
}

/// Experts lost by each set of failed domains.
struct Losses {
    /// Each set as bits: bit d is set if domain d has failed.
    failed: Vec<u64>,
    /// Number of experts that each set takes.
    lost: Vec<usize>,
    /// Each expert's domains as bits.
    domains: Vec<u64>,
    /// `[experts, domains]`: replicas of an expert in a domain.
    replicas: Vec<i64>,
}

impl Losses {
    fn new(problem: &Problem, matrix: &[i64]) -> Self {
        let mut replicas = vec![0; problem.experts * problem.domains];
        for (node, row) in matrix.chunks_exact(problem.experts).enumerate() {
            for (expert, count) in row.iter().enumerate() {
                replicas[expert * problem.domains + problem.domain[node]] += count;
            }
        }
        let bits = |on: &[i64]| {
            on.iter().enumerate().filter(|(_, count)| **count > 0).fold(0, |on, (domain, _)| on | 1 << domain)
        };
        let domains: Vec<u64> = replicas.chunks_exact(problem.domains).map(bits).collect();
        let mut failed = vec![0_u64];
        for _ in 0..problem.failures {
            let next = |set: &u64| {
                let first = (u64::BITS - set.leading_zeros()) as usize;
                let set = *set;
                (first..problem.domains).map(move |domain| set | 1 << domain)
            };
            failed = failed.iter().flat_map(next).collect();
        }
        let lost = failed.iter().map(|set| domains.iter().filter(|on| *on & !set == 0).count()).collect();
        Self { failed, lost, domains, replicas }
    }

    /// Exchanges two replicas if fewer sets of failures then take any expert; returns whether it did.
    ///
    /// `cells` are their positions in the matrix; a node has at most one replica of each expert.
    fn improve(&mut self, problem: &Problem, cells: [usize; 2]) -> bool {
        let experts = cells.map(|cell| cell % problem.experts);
        let [one, two] = cells.map(|cell| problem.domain[cell / problem.experts]);
        let before = experts.map(|expert| self.domains[expert]);
        if one == two || before.iter().all(|on| on.count_ones() as usize > problem.failures) {
            return false;
        }
        let moves = [(experts[0], one, two), (experts[1], two, one)];
        let after = moves.map(|(expert, from, to)| {
            let is_last = self.replicas[expert * problem.domains + from] == 1;
            (self.domains[expert] & !(u64::from(is_last) << from)) | 1 << to
        });
        if after == before {
            return false;
        }
        let takes = |set: u64, on: [u64; 2]| on.iter().filter(|on| *on & !set == 0).count();
        let (mut survived, mut survives) = (0_usize, 0_usize);
        for (&set, &lost) in self.failed.iter().zip(&self.lost) {
            survived += usize::from(lost == 0);
            survives += usize::from(lost == takes(set, before) && takes(set, after) == 0);
        }
        if survives <= survived {
            return false;
        }
        for (&set, lost) in self.failed.iter().zip(&mut self.lost) {
            *lost = *lost - takes(set, before) + takes(set, after);
        }
        for ((expert, from, to), on) in moves.into_iter().zip(after) {
            self.replicas[expert * problem.domains + from] -= 1;
            self.replicas[expert * problem.domains + to] += 1;
            self.domains[expert] = on;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::Candidate;
    use super::super::layout::Problem;
    use super::super::result::Construction;
    use super::super::rows::{matrix_of, rows_of};
    use super::{climbed, climbs};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_single_exchange_makes_the_result_safer(
            (nodes, experts, together, failures) in (2_usize..7, 2_usize..6, 1_usize..3, 1_usize..3),
            cells in prop::collection::vec(any::<bool>(), 36),
        ) {
            let domain: Vec<usize> = (0..nodes).map(|node| node / together).collect();
            let domains = nodes.div_ceil(together);
            let matrix: Vec<i64> = (0..nodes * experts).map(|cell| i64::from(cells[cell])).collect();
            let replicas = |of: &[i64]| -> Vec<i64> {
                (0..experts).map(|expert| of.iter().skip(expert).step_by(experts).sum()).collect()
            };
            prop_assume!(replicas(&matrix).iter().all(|&count| count > 0));
            let problem = Problem {
                nodes,
                experts,
                slots: experts,
                each: vec![0; experts],
                wanted: replicas(&matrix).iter().map(|&count| count as usize).collect(),
                weight: vec![1.0; experts],
                domain,
                domains,
                spread: 1,
                failures,
                previous: Vec::new(),
            };
            prop_assume!(climbs(&problem));
            let made = |matrix: &[i64]| Candidate::new(&problem, Construction::Spread, rows_of(matrix, experts));
            let found = climbed(&problem, made(&matrix));
            let climbed = matrix_of(found.rows.iter().map(Vec::as_slice), experts);
            prop_assert_eq!(replicas(&climbed), replicas(&matrix));
            prop_assert!(found.survival.compare(made(&matrix).survival).is_ge());
            for (one, two) in (0..nodes * experts).flat_map(|one| (0..one).map(move |two| (one, two))) {
                let crossed = (one / experts * experts + two % experts, two / experts * experts + one % experts);
                let mut other = climbed.clone();
                if other[one] > 0 && other[two] > 0 && other[crossed.0] == 0 && other[crossed.1] == 0 {
                    for (left, taken) in [(one, crossed.1), (two, crossed.0)] {
                        (other[left], other[taken]) = (0, 1);
                    }
                    prop_assert!(made(&other).survival.compare(found.survival).is_le());
                }
            }
        }
    }
}
