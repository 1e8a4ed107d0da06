//! Exchanges of capacity between two units, where the greedy choice has none left.

use super::choose::{Chooser, Unit};
use super::options::Choice;
use super::plan::{CopyKind, Holder};
use super::request::CopyUnit;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;

/// Maximum number of nodes and pairs that are examined: some tens of milliseconds, for which members wait.
const MAX_WORK: usize = 1 << 21;
/// Relative amount by which a loss must decrease to count as more than rounding.
const LESS: f64 = 1e-9;
/// Relative difference up to which losses count as equal; less than `LESS`, or units would exchange for ever.
const ROUNDING: f64 = 1e-12;

/// Result of an exchange for its two units.
struct Outcome {
    kept: [(CopyKind, Vec<Holder>); 2],
    /// Loss per token of each of the two.
    loss: [f64; 2],
    /// Number of the two that are covered.
    covered: usize,
}

/// Cache of the results of exchanges. Units that differ only in their tokens, such as most experts, share them.
struct Exchanges {
    /// Number of nodes and pairs that may still be examined.
    work: usize,
    /// Group of each unit: units that are equal except for their tokens.
    groups: Vec<usize>,
    /// Class of each unit: its group and its current copies.
    classes: Vec<usize>,
    numbers: HashMap<(usize, CopyKind, Vec<Holder>), usize>,
    /// Results by the classes of the two units; valid until capacity changes.
    outcomes: HashMap<(usize, usize), Rc<[Outcome]>>,
}

impl Exchanges {
    fn new(units: &[Unit], given: &[CopyUnit]) -> Self {
        let mut known = HashMap::new();
        let mut group = |(unit, given): (&Unit, &CopyUnit)| {
            let CopyUnit { state_bytes, gradient_bytes, replayable, tokens, .. } = *given;
            let bytes = (state_bytes, gradient_bytes, replayable, tokens > 0.0);
            let next = known.len();
            let places = (unit.sender, unit.active.clone(), unit.preferred.clone(), unit.missing);
            *known.entry((bytes, places)).or_insert(next)
        };
        let groups = units.iter().zip(given).map(&mut group).collect();
        let classes = vec![0; units.len()];
        let mut made =
            Self { work: MAX_WORK, groups, classes, numbers: HashMap::new(), outcomes: HashMap::new() };
        (0..units.len()).for_each(|index| made.classify(index, &units[index]));
        made
    }

    fn classify(&mut self, index: usize, unit: &Unit) {
        let next = self.numbers.len();
        let key = (self.groups[index], unit.kind, unit.holders.clone());
        self.classes[index] = *self.numbers.entry(key).or_insert(next);
    }
}

impl Chooser<'_> {
    /// Exchanges while it helps: one unit gives up its copies, another takes a better choice, and the first takes what
    /// is left.
    pub(super) fn improve(&mut self) {
        let mut exchanges = Exchanges::new(&self.units, self.request.units);
        while self.improve_once(&mut exchanges) {}
    }

    fn improve_once(&mut self, exchanges: &mut Exchanges) -> bool {
        let mut open: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !self.units[unit].covered()).collect();
        open.sort_by(|&a, &b| self.units[b].loss.total_cmp(&self.units[a].loss).then(a.cmp(&b)));
        let held: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !self.units[unit].holders.is_empty()).collect();
        let mut improved = false;
        for unit in open {
            for &other in held.iter().filter(|&&other| other != unit) {
                if exchanges.work == 0 {
                    return false;
                }
                if self.exchange(unit, other, exchanges) {
                    improved = true;
                    break;
                }
            }
        }
        improved
    }

    /// Exchanges, and returns whether the two then lose less together, or the same with more of them covered.
    fn exchange(&mut self, unit: usize, other: usize, exchanges: &mut Exchanges) -> bool {
        exchanges.work = exchanges.work.saturating_sub(1);
        let pair = [&self.units[unit], &self.units[other]];
        let old = (pair[0].loss + pair[1].loss, pair.iter().filter(|unit| unit.covered()).count());
        let tokens = [unit, other].map(|index| self.request.units[index].tokens);
        let helps = |found: &&Outcome| {
            let loss = found.loss[0] * tokens[0] + found.loss[1] * tokens[1];
            let is_less = loss < old.0 * (1.0 - LESS);
            is_less || (loss <= old.0 * (1.0 + ROUNDING) && Reverse(found.covered) < Reverse(old.1))
        };
        let outcomes = self.outcomes(unit, other, exchanges);
        let Some(found) = outcomes.iter().find(helps) else {
            return false;
        };
        for (index, (kind, holders)) in [unit, other].into_iter().zip(&found.kept) {
            let domains: Vec<usize> = holders.iter().map(|holder| self.domain[holder.node]).collect();
            let (given, active) = (&self.request.units[index], &self.units[index].active);
            let loss = self.risk.loss(given, *kind, active, &domains);
            self.restore(index, &(*kind, holders.clone(), loss));
            exchanges.classify(index, &self.units[index]);
        }
        exchanges.outcomes.clear();
        true
    }

    /// Choices of the unit if the other one gives up its copies, best first.
    fn outcomes(&mut self, unit: usize, other: usize, exchanges: &mut Exchanges) -> Rc<[Outcome]> {
        let Exchanges { work, classes, outcomes, .. } = exchanges;
        match outcomes.entry((classes[unit], classes[other])) {
            Entry::Occupied(known) => Rc::clone(known.get()),
            Entry::Vacant(free) => Rc::clone(free.insert(self.try_exchanges(unit, other, work).into())),
        }
    }

    fn try_exchanges(&mut self, unit: usize, other: usize, work: &mut usize) -> Vec<Outcome> {
        let before = (self.save(unit), self.save(other));
        let mut found = Vec::new();
        for choice in self.better(unit) {
            self.clear(other);
            *work = work.saturating_sub(self.domain.len());
            if self.choose(unit, choice).is_ok() {
                let _ = self.better(other).into_iter().any(|rest| {
                    *work = work.saturating_sub(self.domain.len());
                    self.choose(other, rest).is_ok()
                });
                let pair = [unit, other];
                let kept = pair.map(|index| (self.units[index].kind, self.units[index].holders.clone()));
                let loss = pair.map(|index| {
                    self.units[index].loss / self.request.units[index].tokens.max(f64::MIN_POSITIVE)
                });
                let covered = pair.iter().filter(|&&index| self.units[index].covered()).count();
                found.push(Outcome { kept, loss, covered });
            }
            self.restore(unit, &before.0);
            self.restore(other, &before.1);
        }
        found
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
