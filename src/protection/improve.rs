//! Exchanges between two units, where the greedy choice has no capacity left.

use super::choose::Chooser;
use super::options::Choice;
use std::cmp::Reverse;

/// Nodes that may be looked at in all: a fraction of a second.
const MOST_WORK: usize = 1 << 24;

impl Chooser<'_> {
    /// Exchanges as long as it helps: one unit gives way, another one takes a better choice, and the first what is left.
    pub(super) fn improve(&mut self) {
        let mut work = MOST_WORK;
        while self.improve_once(&mut work) {}
    }

    fn improve_once(&mut self, work: &mut usize) -> bool {
        let mut open: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !self.units[unit].covered()).collect();
        open.sort_by(|&a, &b| self.units[b].loss.total_cmp(&self.units[a].loss).then(a.cmp(&b)));
        let held: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !self.units[unit].holders.is_empty()).collect();
        let mut improved = false;
        for unit in open {
            for &other in held.iter().filter(|&&other| other != unit) {
                if *work == 0 {
                    return false;
                }
                if self.exchange(unit, other, work) {
                    improved = true;
                    break;
                }
            }
        }
        improved
    }

    /// Whether the two lose less together, or as little with more of them covered, after an exchange.
    fn exchange(&mut self, unit: usize, other: usize, work: &mut usize) -> bool {
        let before = (self.save(unit), self.save(other));
        let value = |chooser: &Self| {
            let pair = [&chooser.units[unit], &chooser.units[other]];
            (pair[0].loss + pair[1].loss, pair.iter().filter(|unit| unit.covered()).count())
        };
        let old = value(self);
        for choice in self.better(unit) {
            self.clear(other);
            *work = work.saturating_sub(self.domain.len());
            if self.choose(unit, choice).is_ok() {
                for rest in self.better(other) {
                    *work = work.saturating_sub(self.domain.len());
                    if self.choose(other, rest).is_ok() {
                        break;
                    }
                }
                let new = value(self);
                // More than rounding.
                let less = new.0 < old.0 * (1.0 - 1e-9);
                if less || (new.0 <= old.0 && Reverse(new.1) < Reverse(old.1)) {
                    return true;
                }
            }
            self.restore(unit, &before.0);
            self.restore(other, &before.1);
        }
        false
    }

    /// The choices of a unit that cover it or lose less than its present one, best first.
    pub(super) fn better(&self, unit: usize) -> Vec<Choice> {
        let Self { units, .. } = self;
        let better = |choice: &&Choice| choice.covers || choice.loss < units[unit].loss;
        let mut choices: Vec<Choice> = units[unit].choices.iter().filter(better).copied().collect();
        choices.sort_by(|a, b| b.covers.cmp(&a.covers).then(a.loss.total_cmp(&b.loss)));
        choices
    }
}
