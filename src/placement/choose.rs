//! The choice between placements that were made in different ways: `safest` and `balanced`.

use super::assign::Assignment;
use super::cells::{build, cells, fewest_cells, is_fragile};
use super::improve::improve;
use super::layout::{Problem, fatal_sets};
use super::respread::respread;
use super::result::{Construction, Placement, Reason};
use super::survival::weigh;

/// The busiest node's load over the mean that `balanced` accepts where that makes the job safer or moves less.
const IMBALANCE: f64 = 1.05;
/// The busiest node's load over the mean at which a new placement is even enough.
const FINE_IMBALANCE: f64 = 1.005;
/// Where less than this survives, no placement protects, and `balanced` does not trade balance for the rest.
const HOPELESS: f64 = 0.5;
/// Survival that `balanced` may give up for balance.
const POINTS: f64 = 0.05;
/// Steps that one exact survival may take, some milliseconds of them; beyond that it is sampled.
const MOST_WORK: usize = 1 << 23;
/// `safest` tries exchanges where pairs of replicas times choices of failures are at most this many.
const MOST_CLIMBED: f64 = (1 << 17) as f64;
/// Factor on the least imbalance that the replicas allow up to which no more replicas move.
const SLACK: f64 = 1.02;
/// A new placement must be this much more even than one that keeps the previous to be worth the moves.
const WORTH_MOVING: f64 = 1.05;
/// Probabilities and loads that differ by less are the same.
const NOISE: f64 = 1e-9;

/// A placement with what it is worth.
pub(super) struct Candidate {
    construction: Construction,
    matrix: Vec<i64>,
    survival: f64,
    imbalance: f64,
}

impl Candidate {
    pub(super) fn new(problem: &Problem, construction: Construction, matrix: Vec<i64>) -> Self {
        let sets = fatal_sets(problem, &matrix);
        let survival = weigh(problem.domains, &sets, problem.failures, None, 0, MOST_WORK).probability;
        let imbalance = imbalance(problem, &matrix);
        Self { construction, matrix, survival, imbalance }
    }

    pub(super) fn into_placement(self, problem: &Problem) -> Placement {
        let reason = Reason {
            construction: self.construction,
            failures: problem.failures,
            survival: self.survival,
            spread: least_spread(problem, &self.matrix),
            imbalance: self.imbalance,
            least_imbalance: least_imbalance(problem),
            moved: (!problem.previous.is_empty()).then(|| moved(problem, &self.matrix)),
        };
        Placement { matrix: self.matrix, reason }
    }

    /// The placement with its rows given to the nodes that have the most of them already, within the nodes that fail
    /// together.
    pub(super) fn settled(mut self, problem: &Problem) -> Self {
        if problem.previous.is_empty() {
            return self;
        }
        let group =
            |domain: usize| (0..problem.nodes).filter(move |&node| problem.domain[node] == domain).collect();
        let groups: Vec<Vec<usize>> = if problem.nodes_fail_alone() {
            vec![(0..problem.nodes).collect()]
        } else {
            (0..problem.domains).map(group).collect()
        };
        let experts = problem.experts;
        let mut matrix = vec![0; self.matrix.len()];
        for nodes in groups {
            let rows = |holds: &dyn Fn(usize, usize) -> bool| -> Vec<Vec<usize>> {
                let holders =
                    |expert| (0..nodes.len()).filter(|&index| holds(nodes[index], expert)).collect();
                (0..experts).map(holders).collect()
            };
            let assignment = Assignment {
                nbytes: &vec![1; experts],
                holders: &rows(&|node, expert| problem.held(node, expert)),
                needers: &rows(&|node, expert| self.matrix[node * experts + expert] > 0),
                nodes: nodes.len(),
                positions: nodes.len(),
            };
            for (position, node) in assignment.solve().into_iter().enumerate() {
                let (from, to) = (nodes[position] * experts, nodes[node] * experts);
                matrix[to..to + experts].copy_from_slice(&self.matrix[from..from + experts]);
            }
        }
        self.matrix = matrix;
        self
    }
}

/// (node, expert) pairs that the node did not hold before.
fn moved(problem: &Problem, matrix: &[i64]) -> usize {
    let new =
        |cell: &usize| matrix[*cell] > 0 && !problem.held(cell / problem.experts, cell % problem.experts);
    (0..matrix.len()).filter(new).count()
}

/// Upper bound on survival over all placements of these replicas: experts with one replica are on some nodes, each of
/// which must live.
fn most_survival(problem: &Problem) -> f64 {
    let single = |&expert: &usize| problem.each[expert] == 0 && problem.wanted[expert] == 1;
    if !problem.nodes_fail_alone() {
        return 1.0;
    }
    let slots = problem.slots + problem.each.iter().sum::<usize>();
    let needed = (0..problem.experts).filter(single).count().div_ceil(slots);
    let lives =
        |lost: usize| (problem.nodes - needed).saturating_sub(lost) as f64 / (problem.nodes - lost) as f64;
    (0..problem.failures).map(lives).product()
}

/// Lower bound on imbalance over all placements of these replicas: load of the busiest node over the mean.
///
/// One node has `k + 1` of the heaviest `k · nodes + 1` replicas, each at least as heavy as the last of them, and the
/// rest of its slots filled, with the lightest replicas at best.
///
/// ```text
/// 3 nodes × 2 slots, mean load 4: replicas of 5 3 1 1 1 1 → one of 5 and one of 1 on a node: 6 / 4
/// ```
fn least_imbalance(problem: &Problem) -> f64 {
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

/// The fewest distinct domains of an expert.
fn least_spread(problem: &Problem, matrix: &[i64]) -> usize {
    let mut nodes: Vec<usize> = (0..problem.nodes).collect();
    nodes.sort_by_key(|&node| problem.domain[node]);
    // As domain follows domain, a domain is new to an expert if it is not the last one that it was seen in.
    let mut seen = vec![(0, usize::MAX); problem.experts];
    for node in nodes {
        let (row, domain) = (&matrix[node * problem.experts..][..problem.experts], problem.domain[node]);
        for ((distinct, last), _) in seen.iter_mut().zip(row).filter(|(_, count)| **count > 0) {
            *distinct += usize::from(std::mem::replace(last, domain) != domain);
        }
    }
    seen.into_iter().map(|(distinct, _)| distinct).min().unwrap_or(0)
}

/// The most even within 5 points of the safest of `others`, where that survives half of the losses; one that keeps the
/// previous placement where it can, if it is that safe and even enough. Where cells cannot be that safe, the safest.
pub(super) fn balanced(problem: &Problem, others: impl Fn() -> Vec<Candidate>) -> Candidate {
    let floor_under = |survival: f64| if survival < HOPELESS { 0.0 } else { survival - POINTS - NOISE };
    let mut floor = floor_under(most_survival(problem));
    let mut compared = false;
    let mut is_safe = |candidate: &Candidate| {
        // What is safe against the most that any placement can have need not be compared with one.
        if candidate.survival < floor && !compared {
            floor = floor_under(others().iter().map(|other| other.survival).fold(0.0, f64::max));
            compared = true;
        }
        candidate.survival >= floor
    };
    let least = least_imbalance(problem);
    let even_enough = IMBALANCE.max(least * SLACK) + NOISE;
    let mut kept: Option<(bool, Candidate)> = None;
    if !problem.previous.is_empty() {
        let cells = cells(problem, true);
        let count =
            former_fragile_cells(problem, &cells).clamp(fewest_cells(problem).min(cells.len()), cells.len());
        let built = std::iter::once_with(|| made(problem, &cells, count, even_enough));
        for candidate in unchanged(problem).into_iter().chain(built) {
            let safe = is_safe(&candidate) && least_spread(problem, &candidate.matrix) >= problem.spread;
            if safe && candidate.imbalance <= even_enough {
                return candidate;
            }
            kept = Some((safe, candidate));
        }
    }
    let fresh = problem.without_previous();
    let cells = cells(&fresh, true);
    let fine = FINE_IMBALANCE.max(least + NOISE);
    let mut best = made(&fresh, &cells, cells.len(), fine);
    let mut best_is_safe = is_safe(&best);
    // Fewer cells for the fragile are safer and less even: the most cells that are safe enough, by halving.
    let (mut low, mut high) = (fewest_cells(problem), if best_is_safe { 0 } else { cells.len() });
    while low < high {
        let count = (low + high) / 2;
        let candidate = made(&fresh, &cells, count, fine);
        let safe = is_safe(&candidate);
        (low, high) = if safe { (count + 1, high) } else { (low, count) };
        if (safe, -candidate.imbalance) > (best_is_safe, -best.imbalance) {
            (best_is_safe, best) = (safe, candidate);
        }
    }
    if !best_is_safe {
        let safest = safest(problem, others());
        if least_spread(problem, &safest.matrix) >= least_spread(problem, &best.matrix) {
            (best_is_safe, best) = (true, safest);
        }
    }
    let best = best.settled(problem);
    match kept {
        Some((safe, kept))
            if safe >= best_is_safe && kept.imbalance <= best.imbalance.max(even_enough) * WORTH_MOVING =>
        {
            kept
        }
        _ => best,
    }
}

/// The previous placement, if it has just the replicas that are wanted.
fn unchanged(problem: &Problem) -> Option<Candidate> {
    let experts = problem.experts;
    let rows = problem.previous.chunks_exact(experts);
    let fits = problem.each.iter().all(|&each| each == 0)
        && rows.clone().all(|row| row.iter().filter(|&&held| held).count() == problem.slots)
        && (0..experts).all(|e| rows.clone().filter(|row| row[e]).count() == problem.wanted[e]);
    let matrix = || problem.previous.iter().map(|&held| i64::from(held)).collect();
    fits.then(|| Candidate::new(problem, Construction::Previous, matrix()))
}

/// A placement with its fragile experts in the first `count` cells, made as even as `target` times the mean.
fn made(problem: &Problem, cells: &[Vec<usize>], count: usize, target: f64) -> Candidate {
    let (mut layout, mut frame) = build(problem, cells, count);
    if !problem.nodes_fail_alone() {
        respread(problem, &mut layout, &mut frame);
    }
    improve(problem, &mut layout, &mut frame, target * problem.mean_load());
    let construction =
        if problem.previous.is_empty() { Construction::Cells(count) } else { Construction::Kept(count) };
    Candidate::new(problem, construction, layout.matrix(problem))
}

/// Cells that hold fragile experts now; they come first among the cells.
fn former_fragile_cells(problem: &Problem, cells: &[Vec<usize>]) -> usize {
    let is_home = |cell: &&Vec<usize>| {
        (0..problem.experts)
            .any(|expert| is_fragile(problem, expert) && cell.iter().all(|&node| problem.held(node, expert)))
    };
    cells.iter().filter(is_home).count()
}

/// The most survival; of equals the one that spreads experts most, then the one with the fewest new replicas, then the
/// most even.
pub(super) fn safest(problem: &Problem, others: Vec<Candidate>) -> Candidate {
    let fresh = problem.without_previous();
    let mut candidates = others;
    let fine = FINE_IMBALANCE.max(least_imbalance(problem) + NOISE);
    for ring in [false, true] {
        let cells = cells(&fresh, ring);
        let fewest = fewest_cells(problem).min(cells.len());
        candidates.push(made(&fresh, &cells, fewest, fine));
        candidates.push(made(&fresh, &cells, cells.len(), fine));
    }
    if climbs(problem) {
        candidates = candidates.into_iter().map(|candidate| climbed(&fresh, candidate)).collect();
    }
    let settled =
        candidates.into_iter().map(|candidate| candidate.settled(problem)).chain(unchanged(problem));
    let better = |one: Candidate, two: Candidate| {
        let key = |c: &Candidate| {
            let spread = least_spread(problem, &c.matrix) as f64;
            ((c.survival / NOISE).round(), spread, -(moved(problem, &c.matrix) as f64), -c.imbalance)
        };
        if key(&two) > key(&one) { two } else { one }
    };
    match settled.reduce(better) {
        Some(best) => best,
        None => unreachable!("there is at least the one built above"),
    }
}

/// Whether there are few enough exchanges, and losses to weigh each for, to try them all.
fn climbs(problem: &Problem) -> bool {
    let slots = problem.slots + problem.each.iter().sum::<usize>();
    let replicas = (problem.nodes * slots) as f64;
    let losses = (0..problem.failures).map(|lost| (problem.domains - lost) as f64 / (lost + 1) as f64);
    replicas * replicas * losses.product::<f64>() <= MOST_CLIMBED
}

/// The placement after exchanges of two replicas, as long as one makes it safer.
fn climbed(problem: &Problem, mut candidate: Candidate) -> Candidate {
    let (experts, cells) = (problem.experts, problem.nodes * problem.experts);
    let mut found = true;
    while found {
        found = false;
        for (one, two) in (0..cells).flat_map(|one| (one + 1..cells).map(move |two| (one, two))) {
            let crossed = (one / experts * experts + two % experts, two / experts * experts + one % experts);
            let held = |cell: usize| candidate.matrix[cell] > 0;
            if !held(one) || !held(two) || held(crossed.0) || held(crossed.1) {
                continue;
            }
            let mut matrix = candidate.matrix.clone();
            for (from, to) in [(one, crossed.1), (two, crossed.0)] {
                matrix[from] -= 1;
                matrix[to] += 1;
            }
            let exchanged = Candidate::new(problem, Construction::Exchanged, matrix);
            if exchanged.survival > candidate.survival + NOISE {
                (candidate, found) = (exchanged, true);
            }
        }
    }
    candidate
}
