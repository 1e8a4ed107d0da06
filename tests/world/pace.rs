//! Copies whose versions take several steps: the version in progress, and the vote with which it is complete.

use super::copies::{Content, Keeper};
use super::node::Node;
use super::{Mistake, Setting, World};
use evermoe::protocol::step_of;

/// Versions of copies that take several steps each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pace {
    /// Steps of the newest version that is complete on all members.
    complete: u64,
    /// The version in progress.
    pub under_way: Option<(u64, Content)>,
    /// Number of steps with the vote before which it must be complete.
    due: u64,
}

impl Pace {
    /// Copies are complete after `step` steps.
    pub(crate) fn from(step: u64) -> Self {
        Self { complete: step, under_way: None, due: step + 1 }
    }
}

impl Node {
    /// Whether the version in progress must be complete before the next vote.
    pub(crate) fn is_due(&self) -> bool {
        step_of(self.protocol.version()) + 1 >= self.pace.due
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
        let complete = pace
            .under_way
            .filter(|_| self.nodes[number].is_due())
            .map_or(pace.complete, |each| step_of(each.0));
        taken - complete
    }

    /// If a version was scheduled, it is now complete on all members: the next one begins, and replaces the previous
    /// one.
    pub(crate) fn copy_slowly(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let step = step_of(node.protocol.version());
        if step >= node.pace.due {
            node.copies.0.values_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
            let complete = node.pace.under_way.map_or(node.pace.complete, |(version, _)| step_of(version));
            node.pace =
                Pace { complete, under_way: Some((node.protocol.version(), node.content)), due: step + 2 };
        }
    }
}
