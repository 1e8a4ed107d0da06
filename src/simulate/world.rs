//! Simulated time and the present nodes.

use super::account::{Cause, Spent, nanoseconds};
use super::failures::{Change, What};
use crate::error::Result;
use std::collections::{BTreeMap, BTreeSet};

/// Callback with the elapsed share of the simulated time, from 0 to 1; an error ends the simulation and is returned.
pub type Progress<'a> = dyn FnMut(f64) -> Result<()> + 'a;

/// Number of changes between two reports of progress.
const REPORT_EVERY: usize = 16;

/// How an activity ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// It is complete.
    Done,
    /// A member was lost meanwhile.
    Lost,
    /// The simulated time is over.
    Over,
}

/// The clock and the nodes.
pub(super) struct World<'a> {
    changes: &'a [Change],
    next: usize,
    /// Nanoseconds since the start.
    pub(super) now: u64,
    end: u64,
    pub(super) spent: Spent,
    /// Nodes that are present.
    pub(super) up: BTreeSet<usize>,
    /// Nodes of the job.
    pub(super) members: Vec<bool>,
    /// Members that have received notice.
    pub(super) leaving: BTreeSet<usize>,
    slow: BTreeMap<usize, f64>,
    /// Nodes that will be lost in the middle of steps, by step.
    pub(super) step_losses: BTreeMap<u64, Vec<usize>>,
    /// Members that were lost.
    pub(super) losses: u64,
    /// Node-nanoseconds of the members.
    pub(super) member_time: u128,
    pub(super) member_count: usize,
    progress: &'a mut Progress<'a>,
}

impl<'a> World<'a> {
    pub(super) fn new(
        changes: &'a [Change],
        up: BTreeSet<usize>,
        nodes: usize,
        seconds: f64,
        progress: &'a mut Progress<'a>,
    ) -> Self {
        Self {
            changes,
            next: 0,
            now: 0,
            end: nanoseconds(seconds),
            spent: Spent::default(),
            up,
            members: vec![false; nodes],
            leaving: BTreeSet::new(),
            slow: BTreeMap::new(),
            step_losses: BTreeMap::new(),
            losses: 0,
            member_time: 0,
            member_count: 0,
            progress,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.now >= self.end
    }

    /// Ends the job.
    pub(super) fn finish(&mut self) {
        self.end = self.now;
    }

    /// Sets the nodes of the job.
    pub(super) fn set_members(&mut self, nodes: &[usize]) {
        self.members.fill(false);
        nodes.iter().for_each(|&node| self.members[node] = true);
        self.member_count = nodes.len();
        self.leaving.retain(|&node| self.members[node]);
    }

    /// Spends time until it is over or a member is lost.
    pub(super) fn spend(&mut self, cause: Cause, nanoseconds: u64) -> Result<Flow> {
        let until = self.now.saturating_add(nanoseconds).min(self.end);
        while let Some(change) = self.changes.get(self.next).filter(|change| change.at <= until) {
            self.pass(cause, change.at);
            if self.apply_all(change.at)? {
                return Ok(if self.is_over() { Flow::Over } else { Flow::Lost });
            }
        }
        self.pass(cause, until);
        Ok(if self.is_over() { Flow::Over } else { Flow::Done })
    }

    /// Spends the time of a step; some nodes may be lost while it computes.
    pub(super) fn spend_step(&mut self, cause: Cause, nanoseconds: u64, step: u64) -> Result<Flow> {
        if cause != Cause::Train || !self.step_losses.contains_key(&step) {
            return self.spend(cause, nanoseconds);
        }
        match self.spend(cause, nanoseconds / 2)? {
            Flow::Done if self.lose_in(step) => Ok(Flow::Lost),
            Flow::Done => self.spend(cause, nanoseconds - nanoseconds / 2),
            flow => Ok(flow),
        }
    }

    /// Waits until something changes.
    pub(super) fn await_change(&mut self, cause: Cause) -> Result<Flow> {
        let at = self.changes.get(self.next).map_or(self.end, |change| change.at.min(self.end));
        let flow = self.spend(cause, at - self.now)?;
        Ok(if flow == Flow::Over { Flow::Over } else { Flow::Done })
    }

    fn pass(&mut self, cause: Cause, until: u64) {
        let passed = until.saturating_sub(self.now);
        self.spent.add(cause, passed);
        self.member_time += u128::from(passed) * self.member_count as u128;
        self.now = self.now.max(until);
    }

    /// Applies all changes at a time; returns whether a member is lost.
    fn apply_all(&mut self, at: u64) -> Result<bool> {
        let mut is_lost = false;
        while let Some(change) = self.changes.get(self.next).filter(|change| change.at <= at) {
            is_lost |= self.apply(change);
            self.next += 1;
            if self.next.is_multiple_of(REPORT_EVERY) {
                (self.progress)(self.now as f64 / self.end.max(1) as f64)?;
            }
        }
        Ok(is_lost)
    }

    fn apply(&mut self, change: &Change) -> bool {
        let mut is_lost = false;
        for &node in &change.nodes {
            match change.what {
                What::Back => {
                    self.up.insert(node);
                    self.leaving.remove(&node); // the maintenance ended before it left
                }
                What::Gone => {
                    is_lost |= self.lose(node);
                }
                What::Leaving if self.members[node] => {
                    self.leaving.insert(node);
                }
                What::Leaving => {
                    self.up.remove(&node);
                }
                What::Slow(factor) if factor > 1.0 => {
                    self.slow.insert(node, factor);
                }
                What::Slow(_) => {
                    self.slow.remove(&node);
                }
            }
        }
        is_lost
    }

    /// Removes the nodes that are lost in the middle of this step; returns whether a member was among them.
    pub(super) fn lose_in(&mut self, step: u64) -> bool {
        let lost = self.step_losses.remove(&step).unwrap_or_default();
        lost.into_iter().fold(false, |is_lost, node| self.lose(node) | is_lost)
    }

    fn lose(&mut self, node: usize) -> bool {
        let was_member = self.up.remove(&node) && self.members[node];
        self.members[node] = false; // its memory is empty if it returns
        self.losses += u64::from(was_member);
        self.leaving.remove(&node);
        was_member
    }

    /// Removes members that have received notice.
    pub(super) fn let_go(&mut self) {
        for node in std::mem::take(&mut self.leaving) {
            self.up.remove(&node);
            self.members[node] = false;
        }
    }

    /// Factor by which the slowest member lengthens a step.
    pub(super) fn slowness(&self) -> f64 {
        let members = self.slow.iter().filter(|(node, _)| self.members[**node]);
        members.map(|(_, &factor)| factor).fold(1.0, f64::max)
    }
}
