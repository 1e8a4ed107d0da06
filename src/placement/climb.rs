//! Exchanges of two replicas, as long as one makes a placement safer.

use super::candidate::Candidate;
use super::layout::Problem;
use super::result::Construction;

/// Pairs of replicas times choices of failures up to which all exchanges are tried.
const MOST_CLIMBED: f64 = (1 << 17) as f64;

/// Whether there are few enough exchanges, and losses to weigh each for, to try them all.
pub(super) fn climbs(problem: &Problem) -> bool {
    let replicas = (problem.nodes * problem.slots_of_node()) as f64;
    let losses = (0..problem.failures).map(|lost| (problem.domains - lost) as f64 / (lost + 1) as f64);
    problem.domains <= 64
        && problem.failures < problem.domains
        && replicas * replicas * losses.product::<f64>() <= MOST_CLIMBED
}

/// The placement after exchanges of two replicas, as long as one makes it safer; for problems that [`climbs`].
pub(super) fn climbed(problem: &Problem, mut candidate: Candidate) -> Candidate {
    let (experts, cells) = (problem.experts, problem.nodes * problem.experts);
    let mut losses = Losses::new(problem, &candidate.matrix);
    let (mut found, mut exchanged) = (true, false);
    while found {
        found = false;
        for (one, two) in (0..cells).flat_map(|one| (one + 1..cells).map(move |two| (one, two))) {
            let crossed = (one / experts * experts + two % experts, two / experts * experts + one % experts);
            let held = |cell: usize| candidate.matrix[cell] > 0;
            if !held(one) || !held(two) || held(crossed.0) || held(crossed.1) {
                continue;
            }
            for (from, to) in [(one, crossed.1), (two, crossed.0)] {
                candidate.matrix[from] -= 1;
                candidate.matrix[to] += 1;
            }
            if losses.improve(problem, &candidate.matrix, [one % experts, two % experts]) {
                (found, exchanged) = (true, true);
                continue;
            }
            for (from, to) in [(one, crossed.1), (two, crossed.0)] {
                candidate.matrix[from] += 1;
                candidate.matrix[to] -= 1;
            }
        }
    }
    if exchanged { Candidate::new(problem, Construction::Exchanged, candidate.matrix) } else { candidate }
}

/// What each choice of failed domains takes.
struct Losses {
    /// Bit d of each: domain d has failed.
    failed: Vec<u64>,
    /// Experts that each choice takes.
    lost: Vec<usize>,
    /// Bit d of each expert: it is in domain d.
    domains: Vec<u64>,
}

impl Losses {
    fn new(problem: &Problem, matrix: &[i64]) -> Self {
        let domains: Vec<u64> =
            (0..problem.experts).map(|expert| domains_of(problem, matrix, expert)).collect();
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
        Self { failed, lost, domains }
    }

    /// Takes two experts' new places over if fewer choices of failures take any expert then; whether that is so.
    fn improve(&mut self, problem: &Problem, matrix: &[i64], experts: [usize; 2]) -> bool {
        let before = experts.map(|expert| self.domains[expert]);
        if before.iter().all(|on| on.count_ones() as usize > problem.failures) {
            return false;
        }
        let after = experts.map(|expert| domains_of(problem, matrix, expert));
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
        for (expert, on) in experts.into_iter().zip(after) {
            self.domains[expert] = on;
        }
        true
    }
}

/// The domains that hold an expert, as bits.
fn domains_of(problem: &Problem, matrix: &[i64], expert: usize) -> u64 {
    let held = (0..problem.nodes).filter(|node| matrix[node * problem.experts + expert] > 0);
    held.fold(0, |on, node| on | 1 << problem.domain[node])
}
