//! Copies of units on other nodes, with the version of each.

use super::units::Units;
use super::version_schedule::VersionSchedule;
use crate::protection::{CopyKind, ProtectionPlan};
use crate::protocol::{generation_of, step_of, version_of};
use crate::recovery::Kind;

/// Copies of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitCopies {
    /// Kind of the copies.
    pub kind: CopyKind,
    /// The node that sends.
    pub primary: usize,
    /// The nodes that keep copies.
    pub holders: Vec<usize>,
    /// The nodes that keep snapshots of units that they train.
    pub own: Vec<usize>,
    /// The version of a copy that is updated when it is selected; none if the copies follow every step.
    pub version: Option<u64>,
}

impl UnitCopies {
    /// Nodes other than the trained ones that have the unit's bytes: its holders and, for a snapshot, its sender.
    pub fn keepers(&self) -> impl Iterator<Item = usize> + '_ {
        let sender = matches!(self.kind, CopyKind::Snapshot { .. }).then_some(self.primary);
        self.holders.iter().copied().chain(sender)
    }
}

/// Copies of all units.
#[derive(Clone, Debug, PartialEq)]
pub struct Copies {
    /// By unit.
    pub units: Vec<UnitCopies>,
    /// Version of the first copies.
    pub begun: u64,
    /// Steps over which a version of all snapshots is copied; complete with the vote on the last step.
    pub steps: u64,
    schedule: VersionSchedule,
    is_late: bool,
}

impl Copies {
    /// The copies of a plan for these nodes, by rank; copies that take turns begin with the current state.
    pub fn new(plan: &ProtectionPlan, nodes: &[usize], begun: u64, takes_turns: bool, units: &Units) -> Self {
        let copies = plan.units.iter().enumerate().map(|(unit, kept)| UnitCopies {
            kind: kept.kind,
            primary: nodes[kept.primary],
            holders: kept.holders.iter().map(|&rank| nodes[rank]).collect(),
            own: kept.own.iter().map(|&rank| nodes[rank]).collect(),
            version: (takes_turns && unit < units.num_experts()).then_some(begun),
        });
        Self::of(copies.collect(), begun)
    }

    pub(super) fn of(units: Vec<UnitCopies>, begun: u64) -> Self {
        let is_late = units.iter().any(|each| each.kind == CopyKind::Snapshot { period: 1 });
        Self { units, begun, steps: 1, schedule: VersionSchedule::new(step_of(begun)), is_late }
    }

    /// Whether a version of all snapshots is copied during the next steps. If so, each snapshot has every version, and all
    /// members can return to it.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    /// Advances to the state after `step` steps, with which the next version may begin.
    pub(super) fn advance(&mut self, step: u64) {
        if self.schedule.is_due(step) {
            self.schedule.begin_version(step, self.steps);
        }
    }

    /// Freezes the copies: they follow no further steps.
    pub(super) fn frozen(mut self, history: &History) -> Self {
        let versions: Vec<u64> = (0..self.units.len()).map(|unit| self.version(unit, history)).collect();
        self.units.iter_mut().zip(versions).for_each(|(copies, version)| copies.version = Some(version));
        self
    }

    /// Version to which all must be able to return while copies of some units are made during the next step.
    pub fn late(&self, history: &History) -> Option<u64> {
        let is_late = |each: &UnitCopies| each.kind == CopyKind::Snapshot { period: 1 };
        self.units.iter().position(is_late).map(|unit| self.version(unit, history))
    }

    /// All copies: unit, node, version and kind, as [`held_of`](Self::held_of).
    pub fn held(&self, history: &History) -> Vec<(usize, usize, u64, Kind)> {
        self.held_of(0..self.units.len(), history)
    }

    /// Copies of these units: unit, node, version and kind.
    ///
    /// If some are one step late, the members that train the other units have snapshots of that version, too, and replicas can
    /// be brought to it.
    pub fn held_of(
        &self,
        units: impl IntoIterator<Item = usize>,
        history: &History,
    ) -> Vec<(usize, usize, u64, Kind)> {
        let late = self.late(history);
        let mut found = Vec::new();
        for (unit, each) in units.into_iter().map(|unit| (unit, &self.units[unit])) {
            if let Some(late) = late {
                found.extend(each.own.iter().map(|&node| (unit, node, late, Kind::Snapshot)));
            }
            let kind = match each.kind {
                CopyKind::Active | CopyKind::Uncovered => continue,
                CopyKind::Replayed => Kind::Replayed,
                CopyKind::Snapshot { .. } => Kind::Snapshot,
            };
            let version = self.version(unit, history);
            for node in each.keepers() {
                found.push((unit, node, version, kind));
                if let Some(late) = late.filter(|_| kind == Kind::Replayed) {
                    found.push((unit, node, late, kind));
                }
            }
        }
        found
    }

    /// Version of the copies of a unit, if the state is the newest of `history`.
    pub fn version(&self, unit: usize, history: &History) -> u64 {
        let copies = &self.units[unit];
        if let Some(version) = copies.version {
            return version;
        }
        let complete = match copies.kind {
            CopyKind::Snapshot { .. } if self.is_late => self.schedule.complete(),
            CopyKind::Snapshot { period } => {
                step_of(history.newest).saturating_sub(1) / period as u64 * period as u64
            }
            _ => return history.newest,
        };
        if complete <= step_of(self.begun) { self.begun } else { history.version_at(complete) }
    }

    /// Bytes that each copy of a unit gets with a version of all snapshots, or in a step if each unit has versions of its own.
    pub fn version_bytes(&self, unit: usize, units: &Units) -> u64 {
        match self.units[unit].kind {
            CopyKind::Replayed => units.step_bytes(unit),
            CopyKind::Snapshot { .. } if self.is_late => units.bytes[unit],
            CopyKind::Snapshot { period } => units.bytes[unit] / period as u64,
            CopyKind::Active | CopyKind::Uncovered => 0,
        }
    }
}

/// Versions of the steps in the job's current history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Version of the current state.
    pub newest: u64,
    /// First step of each generation.
    generations: Vec<(u64, u64)>,
}

impl History {
    /// Records a new version of the state.
    pub fn record(&mut self, version: u64) {
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
    pub fn version_at(&self, step: u64) -> u64 {
        let generation =
            self.generations.iter().rev().find(|&&(first, _)| first <= step).map_or(0, |found| found.1);
        version_of(generation, step)
    }
}
