//! Sums over choices of failed nodes: either counts, which are exact, or probabilities, which do not overflow.

use super::binomial::Chance;
use std::iter::Sum;
use std::ops::{AddAssign, Mul};

/// ln of the probability of the numbers of failures that are ignored, on each side and at each node: below 10⁻²⁵.
const NEGLIGIBLE: f64 = 58.0;

/// Bound on counts, so that small multiples of them do not overflow.
const MAX_COUNTED: u128 = 1 << 120;

/// The numbers of failures that are kept: `size` of them from `first` on.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) first: usize,
    pub(super) size: usize,
}

/// Factors by which a failed node and a surviving one multiply the weight of a choice.
pub(super) trait Weights: Copy {
    /// A sum of such products.
    type Sum: Copy + From<u8> + AddAssign + Mul<Output = Self::Sum> + Sum;

    fn failed(self) -> Self::Sum;
    fn alive(self) -> Self::Sum;

    /// `count` choices of `failed` nodes with `alive` others.
    fn choices(self, count: u64, failed: usize, alive: usize) -> Self::Sum;

    /// All choices of 0, 1, …, `most` of `nodes`.
    fn up_to(self, most: usize, nodes: usize) -> Vec<Self::Sum>;

    /// Relevant numbers of failures of `nodes`, at most `failures`.
    fn window(self, nodes: usize, failures: usize) -> Window;
}

/// Every choice counts one.
#[derive(Clone, Copy)]
pub(super) struct Counted;

impl Weights for Counted {
    type Sum = u128;

    fn failed(self) -> u128 {
        1
    }

    fn alive(self) -> u128 {
        1
    }

    fn choices(self, count: u64, _: usize, _: usize) -> u128 {
        u128::from(count)
    }

    fn up_to(self, most: usize, nodes: usize) -> Vec<u128> {
        let mut found = vec![1_u128];
        for k in 0..most.min(nodes) {
            found.push(found[k] * (nodes - k) as u128 / (k + 1) as u128);
        }
        found
    }

    fn window(self, nodes: usize, failures: usize) -> Window {
        Window { first: 0, size: failures.min(nodes) + 1 }
    }
}

impl Weights for Chance {
    type Sum = f64;

    fn failed(self) -> f64 {
        self.failed
    }

    fn alive(self) -> f64 {
        self.alive
    }

    fn choices(self, count: u64, failed: usize, alive: usize) -> f64 {
        count as f64 * self.weight(failed, alive)
    }

    fn up_to(self, most: usize, nodes: usize) -> Vec<f64> {
        self.probabilities(most, nodes)
    }

    /// Bernstein's inequality bounds how far from its mean the number of failures is.
    fn window(self, nodes: usize, failures: usize) -> Window {
        let mean = nodes as f64 * self.failed;
        let third = NEGLIGIBLE / 3.0;
        let reach = third + (third * third + 2.0 * NEGLIGIBLE * mean * self.alive).sqrt();
        let first = ((mean - reach).max(0.0) as usize).min(failures);
        let last = (mean + reach) as usize + 1;
        Window { first, size: last.min(failures).min(nodes) + 1 - first }
    }
}

/// Number of choices of `failures` of `nodes`; None if it, or that of fewer nodes, is too large to count.
pub(crate) fn choose(nodes: usize, failures: usize) -> Option<u128> {
    let mut found = 1_u128;
    for k in 0..failures.min(nodes) {
        // Exact at each step; a factor below 2^64 cannot take 2^120 beyond 2^128 unnoticed.
        found = found.checked_mul((nodes - k) as u128)? / (k + 1) as u128;
        if found >= MAX_COUNTED {
            return None;
        }
    }
    Some(if failures > nodes { 0 } else { found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_binomials() {
        assert_eq!(Counted.up_to(9, 4), [1, 4, 6, 4, 1]);
        assert_eq!((choose(5, 2), choose(2, 5), choose(7, 0)), (Some(10), Some(0), Some(1)));
        assert_eq!(choose(100, 4), Some(3_921_225));
        assert_eq!(choose(1000, 500), None);
        // The end of the row is small again, but a component has all of it.
        assert_eq!(choose(1000, 999), None);
    }
}
