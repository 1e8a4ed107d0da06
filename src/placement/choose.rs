//! The choice between placements of different constructions: `safest` and `balanced`.

use super::candidate::{Candidate, NOISE, least_imbalance};
use super::cells::{build, cells, fewest_cells, is_fragile};
use super::classic::{compact, mro, spread};
use super::climb::{climbed, climbs};
use super::improve::improve;
use super::layout::Problem;
use super::respread::respread;
use super::result::Construction;
use super::rows::renumbered;
use super::survival::{Share, choose};

/// Load of the busiest node over the mean that `balanced` accepts for more safety or fewer moves.
const IMBALANCE: f64 = 1.05;
/// Load of the busiest node over the mean at which a new placement is even enough.
const FINE_IMBALANCE: f64 = 1.005;
/// Inverse of the share of all losses that `balanced` may give up for balance.
const POINTS: u32 = 20;
/// Maximum (node, expert) pairs for which a placement that is even enough is compared with those of all policies;
/// beyond, a percent of evenness is not worth the time.
const MAX_COMPARED: usize = 1 << 12;
/// Factor on the minimum imbalance of the replicas, up to which no further replicas move.
const SLACK: f64 = 1.02;
/// Factor by which a new placement must be more even than one that keeps most of the previous to be worth the moves.
const WORTH_MOVING: f64 = 1.05;
/// Percentage of all replicas that may always move for a placement that is even enough.
const MAX_MOVED_PERCENT: usize = 15;
/// Factor by which the placement must be more even than the previous if more replicas would move. Loads that each drift
/// by 5 % up or down differ by that factor.
const WORTH_CHANGING: f64 = 1.05 / 0.95;

/// Upper bound on survival over all placements of these replicas: experts with a single replica are on some nodes, each
/// of which must survive.
fn most_survival(problem: &Problem) -> Share {
    let single = |&expert: &usize| problem.each[expert] == 0 && problem.wanted[expert] == 1;
    let needed = if problem.nodes_fail_alone() {
        (0..problem.experts).filter(single).count().div_ceil(problem.slots_of_node())
    } else {
        0
    };
    let (nodes, failures) = (problem.domains, problem.failures);
    match (choose(nodes - needed, failures), choose(nodes, failures)) {
        (Some(survived), Some(all)) => Share::Counted { survived, all },
        _ => {
            let lives = |lost: usize| (nodes - needed).saturating_sub(lost) as f64 / (nodes - lost) as f64;
            Share::Estimated((0..failures).map(lives).product())
        }
    }
}

/// The placement of a construction that ignores the previous one.
pub(super) fn classic(problem: &Problem, construction: Construction) -> Candidate {
    let replicas = problem.replicas();
    let rows = match construction {
        Construction::Mro => mro(problem, &replicas),
        Construction::Spread => spread(problem, &replicas),
        _ => compact(&replicas, problem.nodes, problem.slots_of_node()),
    };
    Candidate::new(problem, construction, rows)
}

/// Chooses the most even placement within 5 points of the safer of `mro` and `spread`, if that survives half of the
/// losses. It keeps the previous placement if possible, safe and even enough. If cells cannot be that safe, the safest
/// placement is taken. If a policy's placement is better on both counts, that one is taken.
///
/// `unchanged` is the previous placement with the minimum number of exchanged replicas for the wanted counts.
pub(super) fn balanced(problem: &Problem, unchanged: Option<Candidate>) -> Candidate {
    let classic = |construction| classic(problem, construction);
    let (mut reference, mut compared) = (most_survival(problem), false);
    let mut is_safe = |candidate: &Candidate| {
        let near = |most: Share| most.is_minor() || candidate.survival.is_near(most, POINTS);
        // A placement that is safe compared with the upper bound needs no comparison with a reference.
        if !near(reference) && !compared {
            let [mro, spread] =
                [Construction::Mro, Construction::Spread].map(|construction| classic(construction).survival);
            reference = if mro.compare(spread).is_gt() { mro } else { spread };
            compared = true;
        }
        near(reference)
    };
    let least = least_imbalance(problem);
    let even_enough = IMBALANCE.max(least * SLACK) + NOISE;
    let mut kept: Vec<(f64, Candidate)> = Vec::new();
    if !problem.previous.is_empty() {
        let cells = cells(problem, true);
        let count =
            former_fragile_cells(problem, &cells).clamp(fewest_cells(problem).min(cells.len()), cells.len());
        let mut keeps = |candidate: &Candidate, limit: f64| {
            candidate.imbalance <= limit && is_safe(candidate) && candidate.spread(problem) >= problem.spread
        };
        if let Some(same) = unchanged.as_ref().filter(|same| keeps(same, even_enough)) {
            return same.clone();
        }
        let built = made(problem, &cells, count, even_enough);
        let few = problem.nodes * problem.slots_of_node() * MAX_MOVED_PERCENT / 100;
        let (is_even, moves_little) = (keeps(&built, even_enough), built.moved(problem) <= few);
        if is_even && moves_little {
            return built;
        }
        if let Some(same) = unchanged.as_ref().filter(|same| keeps(same, even_enough * WORTH_CHANGING)) {
            return same.clone();
        }
        if is_even {
            return built;
        }
        kept.extend(unchanged.map(|same| (WORTH_CHANGING, same)));
        kept.push((WORTH_MOVING, built));
    }
    let fresh = problem.without_previous();
    let cells = cells(&fresh, true);
    let fine = FINE_IMBALANCE.max(least + NOISE);
    let mut best = made(&fresh, &cells, cells.len(), fine);
    let mut best_is_safe = is_safe(&best);
    // Fewer cells for fragile experts are safer and less even: bisection finds the most cells that are safe enough.
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
    if !best_is_safe
        || best.imbalance > fine * FINE_IMBALANCE
        || problem.nodes * problem.experts <= MAX_COMPARED
    {
        let safest_at = |failures: usize| {
            let problem = Problem { failures, ..fresh.clone() };
            let found = safest(&problem, None);
            Candidate::new(&fresh, found.construction, found.rows)
        };
        let mut rivals = vec![safest_at(problem.failures)];
        if !best_is_safe && rivals[0].spread(problem) >= best.spread(problem) {
            (best_is_safe, best) = (true, rivals[0].clone());
        }
        // If no number of losses was requested, `safest` weighs another one.
        if problem.spread != problem.failures {
            rivals.push(safest_at(problem.spread));
        }
        if problem.failures + 1 < problem.domains {
            rivals.push(safest_at(problem.failures + 1));
        }
        rivals.extend([Construction::Mro, Construction::Spread, Construction::Compact].map(classic));
        if let Some(better) = better(problem, &best, rivals, &mut is_safe) {
            (best_is_safe, best) = (is_safe(&better), better);
        }
    }
    let best = best.settled(problem);
    let spread = problem.spread.min(best.spread(problem));
    let is_kept = |(worth, candidate): &(f64, Candidate)| {
        candidate.imbalance <= best.imbalance.max(even_enough) * worth
            && candidate.spread(problem) >= spread
            && is_safe(candidate) >= best_is_safe
    };
    kept.into_iter().find(is_kept).map_or(best, |(_, candidate)| candidate)
}

/// Returns the rival to take instead, if one is better in evenness or survival and not worse in the other, or better in
/// both at one loss more. Safe ones come first, then the most even. Never one that has an expert on fewer domains than
/// all can have.
fn better(
    problem: &Problem,
    best: &Candidate,
    rivals: Vec<Candidate>,
    mut is_safe: impl FnMut(&Candidate) -> bool,
) -> Option<Candidate> {
    // Fewer losses than the minimum number of replicas are always survived.
    let spread = problem.spread.min(best.spread(problem));
    let with_one_more = |one: Candidate| (one.survival_of_one_more(problem), one);
    let is_wide = |one: &Candidate| one.spread(problem) >= spread;
    if !rivals.iter().any(|rival| rival.compare_imbalance(best).is_le()) {
        return None;
    }
    let mut field: Vec<(Option<Share>, Candidate)> = rivals.into_iter().map(with_one_more).collect();
    field.sort_by(|(_, one), (_, two)| {
        one.imbalance.total_cmp(&two.imbalance).then(two.survival.compare(one.survival))
    });
    let beats = |(rival_more, rival): &(Option<Share>, Candidate),
                 (more, one): &(Option<Share>, Candidate)| {
        let (even, safe) = (rival.compare_imbalance(one), rival.survival.compare(one.survival));
        // More holders of an expert can divide its tokens more freely.
        let safer = safe.is_gt() && rival.pairs() >= one.pairs();
        let safe_at_more = rival_more.zip(*more).is_some_and(|(rival, own)| rival.compare(own).is_gt());
        is_wide(rival) && even.is_le() && safe.is_ge() && (even.is_lt() || safer)
            || even.is_lt() && (safe.is_gt() || safe_at_more)
    };
    let is_beaten = |one: &(Option<Share>, Candidate)| field.iter().any(|rival| beats(rival, one));
    if !is_beaten(&with_one_more(best.clone())) {
        return None;
    }
    let unbeaten: Vec<&Candidate> = field
        .iter()
        .filter(|one| is_wide(&one.1) && !is_beaten(one))
        .map(|(_, candidate)| candidate)
        .collect();
    unbeaten.iter().find(|one| is_safe(one)).or(unbeaten.first()).map(|one| (*one).clone())
}

/// A placement with its fragile experts in the first `count` cells, improved until it is as even as `target` times the
/// mean.
fn made(problem: &Problem, cells: &[Vec<usize>], count: usize, target: f64) -> Candidate {
    let (mut layout, mut frame) = build(problem, cells, count);
    if !problem.nodes_fail_alone() {
        respread(problem, &mut layout, &mut frame);
    }
    improve(problem, &mut layout, &mut frame, target * problem.mean_load());
    let construction =
        if problem.previous.is_empty() { Construction::Cells(count) } else { Construction::Retained(count) };
    Candidate::new(problem, construction, layout.replicas(problem)).settled(problem)
}

/// Number of cells that hold fragile experts now; they come first among the cells.
fn former_fragile_cells(problem: &Problem, cells: &[Vec<usize>]) -> usize {
    let is_home = |cell: &&Vec<usize>| {
        (0..problem.experts)
            .any(|expert| is_fragile(problem, expert) && cell.iter().all(|&node| problem.held(node, expert)))
    };
    cells.iter().filter(is_home).count()
}

/// The placement with the most survival among those that have every expert on as many domains as all can have. Ties go
/// to the one that spreads experts most, then to the one with the fewest new replicas, then to the most even.
///
/// The constructions depend on the order of the experts, so one order is used for all.
pub(super) fn safest(problem: &Problem, unchanged: Option<Candidate>) -> Candidate {
    let order = problem.order();
    let mut number = vec![0; order.len()];
    order.iter().enumerate().for_each(|(new, &old)| number[old] = new);
    let unchanged = unchanged.map(|one| Candidate { rows: renumbered(&one.rows, &number), ..one });
    let best = safest_in_order(&problem.numbered(&order, &number), unchanged);
    Candidate { rows: renumbered(&best.rows, &order), ..best }
}

fn safest_in_order(problem: &Problem, unchanged: Option<Candidate>) -> Candidate {
    let fresh = problem.without_previous();
    let classics = [Construction::Mro, Construction::Spread, Construction::Compact];
    let mut candidates = Vec::from(classics.map(|construction| classic(problem, construction)));
    let fine = FINE_IMBALANCE.max(least_imbalance(problem) + NOISE);
    let rings = [cells(&fresh, false), cells(&fresh, true)];
    for cells in if rings[0] == rings[1] { &rings[..1] } else { &rings[..] } {
        let fewest = fewest_cells(problem).min(cells.len());
        candidates.push(made(&fresh, cells, fewest, fine));
        if fewest < cells.len() {
            candidates.push(made(&fresh, cells, cells.len(), fine));
        }
    }
    if climbs(problem) {
        let climbed: Vec<Candidate> =
            candidates.iter().map(|candidate| climbed(&fresh, candidate.clone())).collect();
        candidates.extend(climbed);
    }
    let settled = candidates.into_iter().map(|candidate| candidate.settled(problem)).chain(unchanged);
    let compare = |one: &Candidate, two: &Candidate| {
        let moved = |candidate: &Candidate| candidate.moved(problem);
        let spreads = [one, two].map(|candidate| candidate.spread(problem));
        let kept = spreads.map(|spread| spread.min(problem.spread));
        kept[0]
            .cmp(&kept[1])
            .then_with(|| one.survival.compare(two.survival))
            .then_with(|| spreads[0].cmp(&spreads[1]))
            .then_with(|| moved(two).cmp(&moved(one)))
            .then_with(|| two.compare_imbalance(one))
    };
    match settled.reduce(|one, two| if compare(&two, &one).is_gt() { two } else { one }) {
        Some(best) => best,
        None => unreachable!("there is at least the one built above"),
    }
}
