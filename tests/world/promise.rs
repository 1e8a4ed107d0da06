//! The promise of the preset: the losses that undo no committed step.

use super::{Content, World};
use std::collections::BTreeSet;

/// The promise of the preset, and what has happened since.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Promise {
    /// Members of the group whose copies were last complete.
    pub members: Vec<usize>,
    pub generation: u64,
    /// Number of processes in an island, which has one node; 1 if there are none.
    pub island: usize,
    /// Islands of these members that have members which are gone or out of reach.
    pub lost: BTreeSet<usize>,
    /// Whether a member has left because all steps are done.
    pub(crate) is_over: bool,
    /// The longest state that was reported as committed.
    pub committed: Content,
}

impl Promise {
    /// Whether fewer nodes were lost than there are copies.
    pub(crate) fn holds(&self) -> bool {
        self.lost.len() <= usize::from(self.members.len() > self.island)
    }
}

impl World {
    pub(crate) fn count_loss(&mut self, number: usize) {
        if self.promise.members.contains(&number) {
            self.promise.lost.insert(number / self.promise.island);
        }
    }

    /// Whether the job can continue: a step was committed, more than half of the members whose copies were last
    /// complete remain and can reach each other, and nothing that was promised to them is lost. Of islands one is enough
    /// that was never away: then no others have continued without it.
    pub(crate) fn can_continue(&self) -> bool {
        let members = &self.promise.members;
        let is_up = |number: usize| self.is_island_up(number);
        let in_reach = |number: usize| {
            members.iter().filter(|&&other| is_up(other) && !self.are_cut(number, other)).count()
        };
        let is_intact = |&number: &usize| is_up(number) && self.mates(number).all(|mate| !mate.was_away);
        let is_one = self.promise.island > 1 && self.lighthouses.len() == 1 && members.iter().any(is_intact);
        let is_most = members.iter().any(|&number| is_up(number) && 2 * in_reach(number) > members.len());
        self.promise.holds() && self.committed_steps() > 0 && (is_most || is_one)
    }
}
