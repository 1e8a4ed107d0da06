//! Copies of units on other nodes, with the version of each.

use super::units::Units;
use crate::protection::{CopyKind, ProtectionPlan};
use crate::protocol::{generation_of, step_of, version_of};

/// Copies of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnitCopies {
    pub(super) kind: CopyKind,
    /// The node that sends.
    pub(super) primary: usize,
    /// The nodes that keep copies.
    pub(super) holders: Vec<usize>,
    /// The nodes that keep snapshots of units that they train.
    pub(super) own: Vec<usize>,
    /// The version of a copy that is updated when it is selected; none if the copies follow every step.
    pub(super) version: Option<u64>,
}

/// Copies of all units.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Copies {
    pub(super) units: Vec<UnitCopies>,
    /// Version of the first copies.
    pub(super) begun: u64,
    /// Steps over which a version of all snapshots is copied, 1 until they are paced; complete with the vote on the
    /// last step.
    pub(super) steps: u64,
}

impl Copies {
    /// The copies of a plan for these nodes, by rank; copies that take turns begin with the current state.
    pub(super) fn new(
        plan: &ProtectionPlan,
        nodes: &[usize],
        begun: u64,
        takes_turns: bool,
        units: &Units,
    ) -> Self {
        let copies = plan.units.iter().enumerate().map(|(unit, kept)| UnitCopies {
            kind: kept.kind,
            primary: nodes[kept.primary],
            holders: kept.holders.iter().map(|&rank| nodes[rank]).collect(),
            own: kept.own.iter().map(|&rank| nodes[rank]).collect(),
            version: (takes_turns && unit < units.num_experts()).then_some(begun),
        });
        Self { units: copies.collect(), begun, steps: 1 }
    }

    /// Freezes the copies: they follow no further steps.
    pub(super) fn frozen(mut self, line: &Line) -> Self {
        let versions: Vec<u64> = (0..self.units.len()).map(|unit| self.version(unit, line)).collect();
        self.units.iter_mut().zip(versions).for_each(|(copies, version)| copies.version = Some(version));
        self
    }

    /// Version to which all must be able to return while copies of some units are made during the next step.
    pub(super) fn late(&self, line: &Line) -> Option<u64> {
        let is_late = |each: &UnitCopies| each.kind == CopyKind::Snapshot { period: 1 };
        self.units.iter().position(is_late).map(|unit| self.version(unit, line))
    }

    /// Version of the copies of a unit, if the state is `line`'s newest.
    pub(super) fn version(&self, unit: usize, line: &Line) -> u64 {
        let copies = &self.units[unit];
        if let Some(version) = copies.version {
            return version;
        }
        match copies.kind {
            CopyKind::Snapshot { period } => {
                let (step, first) = (step_of(line.newest), step_of(self.begun));
                let complete = if self.steps > 1 {
                    let versions = step.saturating_sub(first + 1) / self.steps;
                    first + u64::from(versions > 0) + versions.saturating_sub(1) * self.steps
                } else {
                    step.saturating_sub(1) / period as u64 * period as u64
                };
                if complete <= first { self.begun } else { line.version_at(complete) }
            }
            _ => line.newest,
        }
    }
}

/// Versions of the steps in the job's current history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) newest: u64,
    /// First step of each generation.
    generations: Vec<(u64, u64)>,
}

impl Line {
    /// Records a new version of the state.
    pub(super) fn note(&mut self, version: u64) {
        let (step, generation) = (step_of(version), generation_of(version));
        self.generations.retain(|&(first, _)| first < step);
        if self.generations.last().is_none_or(|&(_, last)| last != generation) {
            self.generations.push((step, generation));
        }
        self.newest = version;
        if self.generations.len() > 64 {
            self.generations.drain(..32);
        }
    }

    /// Version after this number of steps.
    pub(super) fn version_at(&self, step: u64) -> u64 {
        let generation =
            self.generations.iter().rev().find(|&&(first, _)| first <= step).map_or(0, |found| found.1);
        version_of(generation, step)
    }
}
