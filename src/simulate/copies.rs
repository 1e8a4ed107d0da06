//! Copies of units on other nodes, and the version that each of them has.

use super::units::Units;
use crate::protection::{Arrangement, CopyKind};
use crate::protocol::{generation_of, step_of, version_of};

/// Copies of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnitCopies {
    pub(super) kind: CopyKind,
    /// The node that sends.
    pub(super) primary: usize,
    /// The nodes that keep copies.
    pub(super) holders: Vec<usize>,
    /// The nodes that keep snapshots of what they train themselves.
    pub(super) own: Vec<usize>,
    /// The version of a copy that follows when it is its turn; else the copies follow every step.
    pub(super) version: Option<u64>,
}

/// Copies of all units.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Copies {
    pub(super) units: Vec<UnitCopies>,
    /// The version that the first of them have.
    pub(super) begun: u64,
    /// Steps over which a version of all snapshots is copied, 1 until they are paced; it is whole with the vote on the last.
    pub(super) steps: u64,
}

impl Copies {
    /// The copies of an arrangement of these nodes, by rank; those that take turns begin with the state as it is.
    pub(super) fn new(
        arrangement: &Arrangement,
        nodes: &[usize],
        begun: u64,
        takes_turns: bool,
        units: &Units,
    ) -> Self {
        let copies = arrangement.units.iter().enumerate().map(|(unit, kept)| UnitCopies {
            kind: kept.kind,
            primary: nodes[kept.primary],
            holders: kept.holders.iter().map(|&rank| nodes[rank]).collect(),
            own: kept.own.iter().map(|&rank| nodes[rank]).collect(),
            version: (takes_turns && unit < units.num_experts()).then_some(begun),
        });
        Self { units: copies.collect(), begun, steps: 1 }
    }

    /// The same copies, which follow no step any more.
    pub(super) fn frozen(mut self, line: &Line) -> Self {
        let versions: Vec<u64> = (0..self.units.len()).map(|unit| self.version(unit, line)).collect();
        self.units.iter_mut().zip(versions).for_each(|(copies, version)| copies.version = Some(version));
        self
    }

    /// The version to which all must be able to go back, where copies of some units are made during the next step.
    pub(super) fn late(&self, line: &Line) -> Option<u64> {
        let is_late = |each: &UnitCopies| each.kind == CopyKind::Snapshot { period: 1 };
        self.units.iter().position(is_late).map(|unit| self.version(unit, line))
    }

    /// The version of the copies of a unit, where the state is that of `line`'s newest.
    pub(super) fn version(&self, unit: usize, line: &Line) -> u64 {
        let copies = &self.units[unit];
        if let Some(version) = copies.version {
            return version;
        }
        match copies.kind {
            CopyKind::Snapshot { period } => {
                let (step, first) = (step_of(line.newest), step_of(self.begun));
                let whole = if self.steps > 1 {
                    let versions = step.saturating_sub(first + 1) / self.steps;
                    first + u64::from(versions > 0) + versions.saturating_sub(1) * self.steps
                } else {
                    step.saturating_sub(1) / period as u64 * period as u64
                };
                if whole <= first { self.begun } else { line.version_at(whole) }
            }
            _ => line.newest,
        }
    }
}

/// The versions of the steps of the job as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) newest: u64,
    /// Steps from which on versions carry a generation.
    generations: Vec<(u64, u64)>,
}

impl Line {
    /// The state has another version.
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

    /// The version after so many steps.
    pub(super) fn version_at(&self, step: u64) -> u64 {
        let generation =
            self.generations.iter().rev().find(|&&(first, _)| first <= step).map_or(0, |found| found.1);
        version_of(generation, step)
    }
}
