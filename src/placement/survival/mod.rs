//! Probability that a loss of any F nodes leaves at least one holder of each unit.
//!
//! ```text
//! holder sets ─ family ─ minimal sets, in components ─┬─ search    few failures of nodes that share many sets
//!                                                     ├─ frontier  rings and other long components
//!                                                     └─ sampling  what is too much work for both
//! ```
//!
//! The exact methods count: each component yields the number of choices of k failed nodes with which it loses nothing,
//! the components are convolved, and the coefficient of F is divided by the number of all choices of F nodes. If these
//! are too many to count, every node fails independently with probability p = F/N instead: sums of probabilities do not
//! overflow, and the quotient does not depend on p.

mod binomial;
mod family;
mod frontier;
mod recovery;
mod sampling;
mod search;
mod share;
mod weights;

use crate::ensure;
use crate::error::Result;
use binomial::Chance;
use family::{Component, Family};
use std::ops::{AddAssign, Mul};
use weights::{Counted, Weights};

pub use recovery::{copy_recovery_probability, recovery_probability};
#[cfg(feature = "python")]
pub(crate) use recovery::{copy_recovery_until, recovery_until};
pub(crate) use sampling::Draws;
pub(super) use share::Share;
pub(super) use weights::choose;

/// It bounds the memory and the precision of the sums.
const MAX_NODES: usize = 1 << 20;

/// Maximum multiplications for an exact result, about a second; beyond that samples are drawn.
const MAX_WORK: usize = 1 << 30;

/// Up to this cost the search is tried before the frontier: it takes less than a millisecond.
const CHEAP_SEARCH: f64 = (1 << 18) as f64;

/// Default number of samples if the exact result is too much work: accurate to 0.6 %.
const SAMPLES: u64 = 100_000;

/// Probability that nothing is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Survival {
    /// From 0 to 1.
    pub probability: f64,
    /// 0 if exact; otherwise the true value is within this of `probability` with at least 99.9 % confidence.
    pub error: f64,
    /// Number of samples; None if exact.
    pub samples: Option<u64>,
}

/// Returns the probability that none of the `holders`, sets of nodes, lies entirely within `failures` failed nodes of
/// `nodes`.
///
/// Every choice of `failures` nodes is equally likely. The result is exact if `samples` is None and the work allows it:
/// a quotient of two counts, rounded once, or accurate to about 10⁻¹² if there are more than 2^120 choices. Otherwise
/// it comes from `samples` samples, or from 100,000.
///
/// ```
/// use evermoe::placement::survival;
/// // 16 nodes in pairs, two fail: 1 − 8/120.
/// let pairs: Vec<Vec<usize>> = (0..8).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
/// let found = survival(16, &pairs, 2, None, 0)?;
/// assert_eq!(found.probability, 112.0 / 120.0);
/// assert_eq!((found.error, found.samples), (0.0, None));
/// // The same by 1000 samples.
/// let sampled = survival(16, &pairs, 2, Some(1000), 7)?;
/// assert!((sampled.probability - found.probability).abs() < sampled.error);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if there are more than 2^20 nodes or fewer than `failures`, a
/// holder is not a node, or `samples` is 0 or more than 2^32.
pub fn survival(
    nodes: usize,
    holders: &[Vec<usize>],
    failures: usize,
    samples: Option<u64>,
    seed: u64,
) -> Result<Survival> {
    survival_until(nodes, holders, failures, Draws::new(samples, seed))
}

/// [`survival`], with early termination.
fn survival_until(
    nodes: usize,
    holders: &[Vec<usize>],
    failures: usize,
    draws: Draws<'_>,
) -> Result<Survival> {
    check(nodes, holders, failures, draws.samples)?;
    let exact = draws.samples.is_none() || trivial(nodes, holders, failures).is_some();
    if exact && let Some(share) = counted(nodes, holders, failures, MAX_WORK) {
        return Ok(Survival { probability: share.probability(), error: 0.0, samples: None });
    }
    let samples = draws.samples.unwrap_or(SAMPLES);
    let probability = sampling::sample(&Family::new(nodes, holders, failures), failures, samples, draws)?;
    Ok(Survival { probability, error: sampling::error(samples), samples: Some(samples) })
}

/// Survival with a limit on the work of the exact methods, for planners that call it often; the arguments are valid.
pub(super) fn weigh(nodes: usize, holders: &[Vec<usize>], failures: usize, most_work: usize) -> Share {
    counted(nodes, holders, failures, most_work).unwrap_or_else(|| {
        let family = Family::new(nodes, holders, failures);
        match sampling::sample(&family, failures, SAMPLES, Draws::new(None, 0)) {
            Ok(probability) => Share::Estimated(probability),
            Err(_) => unreachable!("nothing ends these draws"),
        }
    })
}

/// Returns the answer if it is known without the sets: something survives any failures, or none.
fn trivial(nodes: usize, holders: &[Vec<usize>], failures: usize) -> Option<bool> {
    if holders.iter().any(Vec::is_empty) {
        return Some(false);
    }
    if holders.is_empty() || failures == 0 {
        return Some(true);
    }
    (failures == nodes).then_some(false)
}

fn check(nodes: usize, holders: &[Vec<usize>], failures: usize, samples: Option<u64>) -> Result<()> {
    ensure!(nodes <= MAX_NODES, "nodes: expected at most 2^20, got {nodes}");
    ensure!(
        failures <= nodes,
        "failures: expected 0 to {nodes}, the number of nodes or domains that can fail, got {failures}"
    );
    for (set, members) in holders.iter().enumerate() {
        if let Some(node) = members.iter().find(|&&node| node >= nodes) {
            ensure!(false, "holders: set {set} names node {node}; there are {nodes} nodes");
        }
    }
    let count = samples.unwrap_or(1);
    ensure!((1..=1 << 32).contains(&count), "samples: expected 1 to 2^32, got {count}");
    Ok(())
}

/// The exact survival, or None if it takes too much work.
fn counted(nodes: usize, holders: &[Vec<usize>], failures: usize, most_work: usize) -> Option<Share> {
    let all = choose(nodes, failures);
    let share = |survived, all| Share::Counted { survived, all };
    if let Some(survives) = trivial(nodes, holders, failures) {
        return Some(match all {
            Some(all) => share(if survives { all } else { 0 }, all),
            None => Share::Estimated(f64::from(u8::from(survives))),
        });
    }
    let family = Family::new(nodes, holders, failures);
    let Some(all) = all else {
        let chance = Chance::of(failures, nodes);
        let survived = survived(&family, failures, most_work, chance)?;
        return Some(Share::Estimated((survived / chance.exactly(failures, nodes)).min(1.0)));
    };
    Some(share(survived(&family, failures, most_work, Counted)?, all))
}

/// Choices of `failures` nodes that lose nothing, or None if they take too much work.
fn survived<W: Weights>(
    family: &Family<'_>,
    failures: usize,
    most_work: usize,
    weights: W,
) -> Option<W::Sum> {
    let nodes = family.vital.len();
    let vital = family.vital.iter().filter(|&&vital| vital).count();
    let mut work = most_work;
    let mut all = vec![weights.choices(1, 0, vital)];
    let mut free = nodes - vital;
    for component in family.components() {
        let part = one(&component, weights, failures, &mut work)?;
        work = work.checked_sub(all.len() * part.len())?;
        all = convolve(&all, &part, failures);
        free -= component.nodes;
    }
    let others = weights.up_to(failures, free);
    let pair = |(failed, &choices): (usize, &W::Sum)| {
        others.get(failures - failed).map_or(0.into(), |&other| choices * other)
    };
    Some(all.iter().enumerate().map(pair).sum())
}

/// Choices of 0, 1, …, `failures` nodes with which one component loses nothing.
fn one<W: Weights>(
    component: &Component,
    weights: W,
    failures: usize,
    work: &mut usize,
) -> Option<Vec<W::Sum>> {
    let cost = search::cost(component, failures);
    if cost > CHEAP_SEARCH {
        // If it fails, it may cost as much as the search, and half of the remaining work.
        let share = (cost as usize).min(*work / 2);
        let mut rest = share;
        let found = frontier::frontier(component, weights, failures, &mut rest);
        *work -= share - rest;
        if found.is_some() {
            return found;
        }
    }
    *work = work.checked_sub(cost as usize)?;
    Some(search::search(component, weights, failures))
}

/// The product of two polynomials up to degree `failures`.
fn convolve<S: Copy + From<u8> + AddAssign + Mul<Output = S>>(a: &[S], b: &[S], failures: usize) -> Vec<S> {
    let mut product = vec![0.into(); (a.len() + b.len() - 1).min(failures + 1)];
    for (degree, &factor) in b.iter().enumerate() {
        for (sum, &term) in product.iter_mut().skip(degree).zip(a) {
            *sum += factor * term;
        }
    }
    product
}
