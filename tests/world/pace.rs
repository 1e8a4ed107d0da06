//! Copies whose versions take several steps: which version is under way, and with which vote it is whole.

use super::copies::{Content, Keeper};
use super::node::Node;
use super::{Mistake, Setting, World};
use evermoe::protocol::step_of;

/// The versions of a keeper that takes several steps for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pace {
    /// Steps taken in the newest version that is whole on all members.
    whole: u64,
    /// The version that is under way.
    pub under_way: Option<(u64, Content)>,
    /// Steps taken with the vote before which it must be whole.
    due: u64,
}

impl Pace {
    /// Copies are whole after so many steps.
    pub(crate) fn from(step: u64) -> Self {
        Self { whole: step, under_way: None, due: step + 1 }
    }
}

impl Node {
    /// Whether the version under way must be whole before the next vote.
    pub(crate) fn is_due(&self) -> bool {
        step_of(self.protocol.version()) + 1 >= self.pace.due
    }
}

impl World {
    /// Steps by which the copies that are whole with the next vote are behind.
    pub(crate) fn lag(&self, number: usize, setting: &Setting) -> u64 {
        let Node { pace, protocol, arranged, .. } = &self.nodes[number];
        let taken = step_of(protocol.version());
        let is_late = setting.keeper == Keeper::SlowSnapshots && arranged.is_none();
        if !is_late || setting.mistake == Some(Mistake::LagForgotten) {
            return 0;
        }
        let whole =
            pace.under_way.filter(|_| self.nodes[number].is_due()).map_or(pace.whole, |each| step_of(each.0));
        taken - whole
    }

    /// A version is whole everywhere, if one was due: the next one begins, in place of the one before.
    pub(crate) fn copy_slowly(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let step = step_of(node.protocol.version());
        if step >= node.pace.due {
            node.copies.0.values_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
            let whole = node.pace.under_way.map_or(node.pace.whole, |(version, _)| step_of(version));
            node.pace =
                Pace { whole, under_way: Some((node.protocol.version(), node.content)), due: step + 2 };
        }
    }
}
