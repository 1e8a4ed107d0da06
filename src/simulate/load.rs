//! Load of the experts and its drift.

use super::scenario::{Load, Model};
use crate::random::Random;

/// Tokens of the experts of all classes at a step.
#[derive(Clone, Debug)]
pub(super) struct Loads<'a> {
    load: &'a Load,
    experts: usize,
    random: Random,
    drifts: u64,
    /// Index of the next change. Changes are not undone: a repeated step has the newest load.
    next: usize,
    /// `[classes, experts]` shares; each class sums to 1.
    shares: Vec<f64>,
    has_changed: bool,
}

impl<'a> Loads<'a> {
    pub(super) fn new(load: &'a Load, model: &Model, seed: u64) -> Self {
        let mut random = Random::of_part(seed, 1 << 32);
        let experts = model.experts;
        let mut shares = Vec::with_capacity(experts * model.classes);
        for _ in 0..model.classes {
            let mut row: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-load.zipf)).collect();
            shuffle(&mut row, &mut random);
            shares.extend(row);
        }
        let mut found = Self { load, experts, random, drifts: 0, next: 0, shares, has_changed: false };
        found.normalise();
        found.advance(0);
        found
    }

    /// Advances the load to a step.
    pub(super) fn advance(&mut self, step: u64) {
        while self.load.trace.get(self.next).is_some_and(|(from, _)| *from <= step) {
            self.shares.clone_from(&self.load.trace[self.next].1);
            self.next += 1;
            self.normalise();
        }
        let wanted = if self.load.drift > 0.0 { step / self.load.drift_interval } else { 0 };
        while self.drifts < wanted {
            self.drifts += 1;
            for share in &mut self.shares {
                *share *= (self.load.drift * self.random.normal()).exp();
            }
            self.normalise();
        }
    }

    /// Whether the load has changed since the previous call.
    pub(super) fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// Shares of the experts of all classes.
    pub(super) fn shares(&self) -> &[f64] {
        &self.shares
    }

    /// Shares of the experts of a class.
    pub(super) fn of_class(&self, class: usize) -> &[f64] {
        &self.shares[class * self.experts..][..self.experts]
    }

    /// A row without tokens is left unchanged: the planners then count all experts equally.
    fn normalise(&mut self) {
        self.has_changed = true;
        for row in self.shares.chunks_exact_mut(self.experts) {
            let sum: f64 = row.iter().sum();
            if sum > 0.0 {
                row.iter_mut().for_each(|share| *share /= sum);
            }
        }
    }
}

fn shuffle(row: &mut [f64], random: &mut Random) {
    for place in (1..row.len()).rev() {
        row.swap(place, random.below(place + 1));
    }
}
