//! Copies whose versions take several steps: the version in progress, and the vote with which it is complete.

use super::copies::{Content, Keeper};
use super::node::Node;
use super::{Mistake, Setting, World};
use evermoe::engine::VersionSchedule;
use evermoe::protocol::step_of;

/// Versions of copies that take several steps each, as the engine schedules them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pace {
    schedule: VersionSchedule,
    /// The version in progress.
    pub under_way: Option<(u64, Content)>,
}

impl Pace {
    /// Copies are complete after `step` steps.
    pub(crate) fn from(step: u64) -> Self {
        Self { schedule: VersionSchedule::new(step), under_way: None }
    }
}

impl Node {
    /// Whether the version in progress must be complete before the next vote.
    pub(crate) fn is_due(&self) -> bool {
        self.pace.schedule.is_due(step_of(self.protocol.version()) + 1)
    }
}

impl World {
    /// Steps by which the copies that the next vote completes lag behind.
    pub(crate) fn lag(&self, number: usize, setting: &Setting) -> u64 {
        let Node { pace, protocol, planned, .. } = &self.nodes[number];
        let taken = step_of(protocol.version());
        let is_late = setting.keeper == Keeper::SlowSnapshots && planned.is_none();
        if !is_late || setting.mistake == Some(Mistake::LagForgotten) {
            return 0;
        }
        pace.schedule.lag(taken + 1)
    }

    /// If a version was scheduled, it is now complete on all members: the next one begins, and replaces the previous
    /// one.
    pub(crate) fn copy_slowly(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let step = step_of(node.protocol.version());
        if node.pace.schedule.is_due(step) {
            node.copies.0.values_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
            node.pace.under_way = Some((node.protocol.version(), node.content));
            node.pace.schedule.begin_version(step, 2);
        }
    }
}
