//! Binomial probabilities that neither overflow nor lose digits: Loader, *Fast and Accurate Computation of Binomial
//! Probabilities* (2000).

use std::f64::consts::PI;

/// Each node fails with probability `failed` on its own.
#[derive(Clone, Copy)]
pub(super) struct Chance {
    pub(super) failed: f64,
    pub(super) alive: f64,
}

impl Chance {
    /// The chance at which `failures` of `nodes` are the most likely number; there is at least one of each kind.
    pub(super) fn of(failures: usize, nodes: usize) -> Self {
        Self { failed: failures as f64 / nodes as f64, alive: (nodes - failures) as f64 / nodes as f64 }
    }

    /// Probability that given nodes fail and others stay.
    pub(super) fn weight(self, failed: usize, alive: usize) -> f64 {
        (failed as f64 * ln(self.failed, self.alive) + alive as f64 * ln(self.alive, self.failed)).exp()
    }

    /// Probability that exactly `failed` of `nodes` fail.
    pub(super) fn exactly(self, failed: usize, nodes: usize) -> f64 {
        if failed == 0 || failed == nodes {
            return self.weight(failed, nodes - failed);
        }
        let (x, y, n) = (failed as f64, (nodes - failed) as f64, nodes as f64);
        let deviance = deviance(x, n * self.failed) + deviance(y, n * self.alive);
        let exponent =
            stirling_error(nodes) - stirling_error(failed) - stirling_error(nodes - failed) - deviance;
        (n / (2.0 * PI * x * y)).sqrt() * exponent.exp()
    }

    /// Probability of 0, 1, … failures of `nodes`, at most `most` of them.
    pub(super) fn probabilities(self, most: usize, nodes: usize) -> Vec<f64> {
        let most = most.min(nodes);
        let mode = (((nodes + 1) as f64 * self.failed) as usize).min(most);
        let mut found = vec![0.0; most + 1];
        found[mode] = self.exactly(mode, nodes);
        let odds = self.failed / self.alive;
        for k in mode..most {
            found[k + 1] = found[k] * odds * (nodes - k) as f64 / (k + 1) as f64;
        }
        for k in (0..mode).rev() {
            found[k] = found[k + 1] / odds * (k + 1) as f64 / (nodes - k) as f64;
        }
        found
    }
}

/// ln x for x + rest = 1, also where x rounds to almost 1.
fn ln(x: f64, rest: f64) -> f64 {
    if rest < 0.5 { (-rest).ln_1p() } else { x.ln() }
}

/// ln n! less Stirling's formula.
fn stirling_error(n: usize) -> f64 {
    let x = n as f64;
    if n < 16 {
        let factorial: f64 = (1..=n).map(|factor| factor as f64).product();
        return factorial.ln() - 0.5 * (2.0 * PI * x).ln() - x * (x.ln() - 1.0);
    }
    let square = x * x;
    (1.0 / 12.0
        - (1.0 / 360.0 - (1.0 / 1260.0 - (1.0 / 1680.0 - 1.0 / 1188.0 / square) / square) / square) / square)
        / x
}

/// x ln(x / mean) + mean − x, by its series where the terms would cancel.
fn deviance(x: f64, mean: f64) -> f64 {
    if (x - mean).abs() >= 0.1 * (x + mean) {
        return x * (x / mean).ln() + mean - x;
    }
    let ratio = (x - mean) / (x + mean);
    let (mut sum, mut term) = ((x - mean) * ratio, 2.0 * x * ratio);
    for odd in (3..).step_by(2) {
        term *= ratio * ratio;
        let next = sum + term / f64::from(odd);
        if next == sum {
            break;
        }
        sum = next;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_probabilities_of_small_sizes() {
        for nodes in 2..60 {
            for failures in 1..nodes {
                let chance = Chance::of(failures, nodes);
                let all = chance.probabilities(nodes, nodes);
                let mut choose = 1.0;
                for (k, &found) in all.iter().enumerate() {
                    let p = chance.failed.powi(k as i32) * chance.alive.powi((nodes - k) as i32);
                    assert!((found - choose * p).abs() < 1e-14, "{k} of {nodes} at {failures}: {found}");
                    assert!((found - chance.exactly(k, nodes)).abs() < 1e-14, "{k} of {nodes} at {failures}");
                    choose = choose * (nodes - k) as f64 / (k + 1) as f64;
                }
            }
        }
    }

    #[test]
    fn probabilities_of_large_sizes_sum_to_one() {
        for failures in [1, 300, 50_000, 99_999] {
            let sum: f64 = Chance::of(failures, 100_000).probabilities(100_000, 100_000).iter().sum();
            assert!((sum - 1.0).abs() < 1e-12, "{failures}: {sum}");
        }
    }
}
