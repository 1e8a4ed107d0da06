//! Monte Carlo: draws failed nodes until a holder set is complete.

use super::family::Family;
use crate::error::Result;
use crate::random::Random;

/// ln(2 / 0.001): Hoeffding's inequality at 99.9 %.
const CONFIDENCE: f64 = 7.600_902_459_542_082;

/// Number of nodes drawn between two calls of `proceed`, some milliseconds.
const DRAWN_AT_ONCE: usize = 1 << 18;

/// Number of draws, and the callback that may end them early.
#[derive(Clone, Copy)]
pub(crate) struct Draws<'a> {
    /// Number of draws; None for the exact result, if that is not too much work.
    pub(crate) samples: Option<u64>,
    /// Seed of the draws.
    pub(crate) seed: u64,
    /// Called every few milliseconds; an error ends the draws and is returned.
    pub(crate) proceed: &'a (dyn Fn() -> Result<()> + Sync),
}

impl Draws<'_> {
    /// Draws without early termination.
    pub(crate) fn new(samples: Option<u64>, seed: u64) -> Self {
        Self { samples, seed, proceed: &|| Ok(()) }
    }
}

/// Share of `samples` draws of `failures` nodes that complete no set of the family.
pub(super) fn sample(family: &Family<'_>, failures: usize, samples: u64, draws: Draws<'_>) -> Result<f64> {
    let sets_of = family.sets_of_nodes();
    let mut left: Vec<usize> = family.sets.iter().map(|set| set.len()).collect();
    // Each draw shuffles the front of the previous order: all subsets remain equally likely.
    let mut nodes: Vec<usize> = (0..family.vital.len()).collect();
    let mut random = Random::new(draws.seed);
    let (mut survived, mut since) = (0_u64, 0);
    for _ in 0..samples {
        let mut drawn = 0;
        let mut lost = false;
        while drawn < failures && !lost {
            let pick = drawn + random.below(nodes.len() - drawn);
            nodes.swap(drawn, pick);
            let node = nodes[drawn];
            lost = family.vital[node];
            for &set in &sets_of[node] {
                left[set] -= 1;
                lost |= left[set] == 0;
            }
            drawn += 1;
        }
        nodes[..drawn].iter().flat_map(|&node| &sets_of[node]).for_each(|&set| left[set] += 1);
        survived += u64::from(!lost);
        since += drawn;
        if since >= DRAWN_AT_ONCE {
            (draws.proceed)()?;
            since = 0;
        }
    }
    Ok(survived as f64 / samples as f64)
}

/// Maximum error of the share of `samples` samples, with a probability of 99.9 %.
pub(super) fn error(samples: u64) -> f64 {
    (CONFIDENCE / (2.0 * samples as f64)).sqrt()
}
