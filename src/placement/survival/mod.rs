//! The probability that a loss of any F nodes leaves at least one holder of everything.
//!
//! ```text
//! holder sets ─ family ─ minimal sets, in components ─┬─ search    few failures of nodes that share many sets
//!                                                     ├─ frontier  rings and other long components
//!                                                     └─ sampling  what is too much work for both
//! ```
//!
//! The exact methods let every node fail on its own with probability p = F/N, so that nothing overflows: each component
//! gives the probability that it loses nothing and k of its nodes fail, the components are convolved, and the
//! coefficient of F is divided by the probability that F nodes fail at all. That quotient does not depend on p.

mod binomial;
mod family;
mod frontier;
mod recovery;
mod sampling;
mod search;

use crate::ensure;
use crate::error::Result;
use binomial::Chance;
use family::{Component, Family};

pub use recovery::{copy_recovery_probability, recovery_probability};

/// Memory and the precision of the sums are bounded by it.
const MOST_NODES: usize = 1 << 20;

/// Multiplications that an exact result may take, about a second of them; beyond that the samples are drawn.
const MOST_WORK: usize = 1 << 30;

/// Up to this cost the search comes before the frontier: it takes less than a millisecond.
const CHEAP_SEARCH: f64 = (1 << 18) as f64;

/// Samples where the caller does not say and the exact result is too much work: right to 0.6 %.
const SAMPLES: u64 = 100_000;

/// Probability that nothing is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Survival {
    /// From 0 to 1.
    pub probability: f64,
    /// 0 if exact; else the truth is within this of `probability` with a probability of at least 99.9 %.
    pub error: f64,
    /// Number of samples; None if exact.
    pub samples: Option<u64>,
}

/// The probability that none of the `holders`, sets of nodes, lies wholly within `failures` failed nodes of `nodes`.
///
/// Every choice of `failures` nodes is equally likely. The result is exact (up to rounding, about 10⁻¹²) if `samples`
/// is None and the work allows it; else it comes from that many samples, or from 100,000.
///
/// ```
/// use evermoe::placement::survival;
/// // 16 nodes in pairs, two fail: 1 − 8/120.
/// let pairs: Vec<Vec<usize>> = (0..8).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
/// let found = survival(16, &pairs, 2, None, 0)?;
/// assert!((found.probability - (1.0 - 8.0 / 120.0)).abs() < 1e-14);
/// assert_eq!((found.error, found.samples), (0.0, None));
/// // The same by 1000 samples.
/// let sampled = survival(16, &pairs, 2, Some(1000), 7)?;
/// assert!((sampled.probability - found.probability).abs() < sampled.error);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) when there are more than 2^20 nodes or fewer than `failures`, a
/// holder is not a node, or `samples` is 0 or more than 2^32.
pub fn survival(
    nodes: usize,
    holders: &[Vec<usize>],
    failures: usize,
    samples: Option<u64>,
    seed: u64,
) -> Result<Survival> {
    check(nodes, holders, failures, samples)?;
    Ok(weigh(nodes, holders, failures, samples, seed, MOST_WORK))
}

/// Survival with a limit on the work of the exact methods, for planners that ask often; the arguments are known to fit.
pub(super) fn weigh(
    nodes: usize,
    holders: &[Vec<usize>],
    failures: usize,
    samples: Option<u64>,
    seed: u64,
    most_work: usize,
) -> Survival {
    let exactly = |probability| Survival { probability, error: 0.0, samples: None };
    if holders.iter().any(Vec::is_empty) {
        return exactly(0.0);
    }
    if holders.is_empty() || failures == 0 {
        return exactly(1.0);
    }
    if failures == nodes {
        return exactly(0.0);
    }
    let family = Family::new(nodes, holders, failures);
    if samples.is_none()
        && let Some(probability) = exact(&family, failures, most_work)
    {
        return exactly(probability);
    }
    let samples = samples.unwrap_or(SAMPLES);
    let probability = sampling::sample(&family, failures, samples, seed);
    Survival { probability, error: sampling::error(samples), samples: Some(samples) }
}

fn check(nodes: usize, holders: &[Vec<usize>], failures: usize, samples: Option<u64>) -> Result<()> {
    ensure!(nodes <= MOST_NODES, "nodes: expected at most 2^20, got {nodes}");
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

/// The probability itself, or None if it takes too much work.
fn exact(family: &Family<'_>, failures: usize, most_work: usize) -> Option<f64> {
    let nodes = family.vital.len();
    let vital = family.vital.iter().filter(|&&vital| vital).count();
    if vital == 0 && family.sets.is_empty() {
        return Some(1.0);
    }
    let chance = Chance::of(failures, nodes);
    let mut work = most_work;
    let mut all = vec![chance.weight(0, vital)];
    let mut free = nodes - vital;
    for component in family.components() {
        let part = one(&component, chance, failures, &mut work)?;
        work = work.checked_sub(all.len() * part.len())?;
        all = convolve(&all, &part, failures);
        free -= component.nodes;
    }
    let others = chance.up_to(failures, free);
    let pair =
        |(failed, weight): (usize, &f64)| others.get(failures - failed).map_or(0.0, |other| weight * other);
    let survived: f64 = all.iter().enumerate().map(pair).sum();
    Some((survived / chance.exactly(failures, nodes)).min(1.0))
}

/// Probability that one component loses nothing and 0, 1, …, `failures` of its nodes fail.
fn one(component: &Component, chance: Chance, failures: usize, work: &mut usize) -> Option<Vec<f64>> {
    let cost = search::cost(component, failures);
    if cost > CHEAP_SEARCH {
        // In vain it may cost as much again as the search, and half of what is left.
        let share = (cost as usize).min(*work / 2);
        let mut rest = share;
        let found = frontier::frontier(component, chance, failures, &mut rest);
        *work -= share - rest;
        if found.is_some() {
            return found;
        }
    }
    *work = work.checked_sub(cost as usize)?;
    Some(search::search(component, chance, failures))
}

/// The product of two polynomials up to degree `failures`.
fn convolve(a: &[f64], b: &[f64], failures: usize) -> Vec<f64> {
    let mut product = vec![0.0; (a.len() + b.len() - 1).min(failures + 1)];
    for (degree, &factor) in b.iter().enumerate() {
        for (sum, &term) in product.iter_mut().skip(degree).zip(a) {
            *sum += factor * term;
        }
    }
    product
}
