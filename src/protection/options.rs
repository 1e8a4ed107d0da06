//! The possible protections of a unit, each with its cost and its expected loss.

use super::capacity::Cost;
use super::plan::CopyKind;
use super::request::{CopyRequest, CopyUnit};

/// One way to protect a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) kind: CopyKind,
    /// Number of nodes that keep a copy.
    pub(super) holders: usize,
    /// Seconds of links that it takes in a step.
    pub(super) seconds: f64,
    /// Expected tokens lost in a step.
    pub(super) loss: f64,
    /// Enough domains hold the unit without a lost step.
    pub(super) covers: bool,
}

/// Probabilities and lags from which losses are computed.
pub(super) struct Risk<'a> {
    pub(super) request: &'a CopyRequest<'a>,
    /// Probability that each domain fails in a step.
    pub(super) failure: Vec<f64>,
}

impl Risk<'_> {
    /// Expected tokens lost in a step, if the unit is active on some domains and copied to others.
    ///
    /// A failure may occur at any time, so with versions n steps apart (n − 1) ÷ 2 steps are lost on average.
    pub(super) fn loss(&self, unit: &CopyUnit, kind: CopyKind, active: &[usize], copied: &[usize]) -> f64 {
        let all_fail =
            |domains: &[usize]| domains.iter().map(|&domain| self.failure[domain]).product::<f64>();
        let mean = |period: usize| (period - 1) as f64 / 2.0;
        let (copies_fail, stored) = (all_fail(copied), mean(self.request.persist_period));
        let steps = copies_fail * stored + (1.0 - copies_fail) * mean(kind.period()).min(stored);
        all_fail(active) * steps * unit.tokens
    }

    /// All copies that a unit can have if `missing` more domains should hold it; `fresh` are those that probably would.
    pub(super) fn choices(
        &self,
        unit: &CopyUnit,
        active: &[usize],
        missing: usize,
        fresh: &[usize],
    ) -> Vec<Choice> {
        let periods = periods(self.request.max_period.min(self.request.persist_period.saturating_sub(1)));
        let snapshots = periods.into_iter().map(|period| CopyKind::Snapshot { period });
        let kinds: Vec<CopyKind> = snapshots.chain(unit.replayable.then_some(CopyKind::Replayed)).collect();
        let mut found = Vec::new();
        for holders in 1..=missing.min(fresh.len()) {
            for &kind in &kinds {
                found.push(Choice {
                    kind,
                    holders,
                    seconds: Cost::new(self.request, unit, kind).seconds(self.request, holders),
                    loss: self.loss(unit, kind, active, &fresh[..holders]),
                    covers: holders == missing && kind.period() == 1,
                });
            }
        }
        found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        found
    }
}

/// 1, 2, 3, 4, 6, 8, 12, … up to `most`; 1 always.
fn periods(most: usize) -> Vec<usize> {
    let powers = (0..13).map(|power| 1 << power);
    let mut found: Vec<usize> = powers.flat_map(|power| [power, power + power / 2]).collect();
    found.retain(|&period| period == 1 || period <= most);
    found.dedup();
    found
}

/// The choices on the lower convex hull of cost and loss: each step along it saves less per second than the last.
///
/// Each comes with the tokens that its step saves per second of links.
pub(super) fn hull(choices: &[Choice], nothing: f64) -> Vec<(f64, Choice)> {
    let (mut seconds, mut loss) = (0.0, nothing);
    let mut found: Vec<(f64, Choice)> = Vec::new();
    loop {
        let saves = |choice: &Choice| match choice.seconds - seconds {
            extra if extra <= 0.0 => f64::INFINITY,
            extra => (loss - choice.loss) / extra,
        };
        // Among equal ones the first, which is the last maximum in reverse.
        let better = choices.iter().rev().filter(|choice| choice.loss < loss && choice.seconds >= seconds);
        let best = better.max_by(|a, b| saves(a).total_cmp(&saves(b)).then(b.loss.total_cmp(&a.loss)));
        let Some(best) = best else { return found };
        found.push((saves(best), *best));
        (seconds, loss) = (best.seconds, best.loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_grow_by_half_and_a_third() {
        assert_eq!(periods(13), [1, 2, 3, 4, 6, 8, 12]);
        assert_eq!(periods(0), [1]);
        assert_eq!(periods(4096).last(), Some(&4096));
    }

    #[test]
    fn the_hull_leaves_out_what_saves_less_than_a_dearer_choice() {
        let kind = CopyKind::Replayed;
        let choice = |seconds, loss| Choice { kind, holders: 1, seconds, loss, covers: false };
        // 6 tokens for the first second; then 1 in two seconds is skipped for 3 in three.
        let choices = [choice(1.0, 4.0), choice(3.0, 3.0), choice(4.0, 1.0), choice(5.0, 2.0)];
        let found: Vec<(f64, f64)> =
            hull(&choices, 10.0).iter().map(|(saves, at)| (*saves, at.seconds)).collect();
        assert_eq!(found, [(6.0, 1.0), (1.0, 4.0)]);
        assert!(hull(&[choice(0.0, 1.0)], 1.0).is_empty());
        assert_eq!(hull(&[choice(0.0, 0.0)], 1.0)[0].0, f64::INFINITY);
    }
}
