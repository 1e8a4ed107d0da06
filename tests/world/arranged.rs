//! Copies after a recovery: whole before training goes on, or made beside the next step and whole at its vote.

use super::copies::{Content, Snapshot, kept};
use super::group::Part;
use super::node::{Life, units};
use super::pace::Pace;
use super::{Mistake, Setting, World};
use evermoe::protocol::{Event, step_of};

/// The copies that a member makes beside its step, and of which group they are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Arranged {
    pub epoch: u64,
    generation: u64,
    members: Vec<usize>,
    /// Units that it trains, as of the state that is copied.
    own: Snapshot,
}

impl World {
    /// All members plan alike; copies of before stay until those of the plan are whole everywhere.
    pub(crate) fn copied(&mut self, number: usize, parts: &[Part], setting: &Setting) {
        let epoch = self.nodes[number].group.expect("in a group");
        let group = self.groups.get(epoch).clone();
        let (rank, size) = (group.rank(number), group.members.len());
        let Part::Copies { snapshot: own, waits } = parts[rank] else { unreachable!("of one kind") };
        let Part::Copies { snapshot: neighbour, waits: other } = parts[(rank + size - 1) % size] else {
            unreachable!("of one kind")
        };
        if own.version != neighbour.version || waits != other {
            self.break_rule("members protect different versions, or some of them wait");
        }
        let generation = self.nodes[number].protocol.generation();
        self.nodes[number].arranged = Some(Arranged { epoch, generation, members: group.members, own });
        if setting.mistake == Some(Mistake::GivenUpEarly) && !waits {
            self.give_up_older(number, setting);
        }
        if waits {
            self.receive_copies(number, setting);
            self.enter_now(number, Part::Protect);
        } else {
            self.feed(number, Event::Protected { is_whole: false }, setting);
        }
    }

    /// The copies that this member keeps for the one before it, and its own snapshots, are whole.
    pub(crate) fn receive_copies(&mut self, number: usize, setting: &Setting) {
        let node = &mut self.nodes[number];
        let Some(arranged) = &node.arranged else { unreachable!("it makes copies") };
        let (version, content) = (arranged.own.version, arranged.own.content);
        let kept = arranged.kept(number, setting);
        node.copies.push(kept, version, content, usize::MAX);
        if setting.keeper.steps().is_some() {
            node.copies.push(arranged.own.units, version, content, usize::MAX);
        }
    }

    /// All members have waited for their copies.
    pub(crate) fn protected(&mut self, number: usize, setting: &Setting) {
        self.nodes[number].late = 0;
        self.settle_copies(number, setting);
        self.feed(number, Event::Protected { is_whole: true }, setting);
    }

    /// The copies of the plan are whole everywhere, if this member has made some: earlier ones are given up.
    pub(crate) fn settle_copies(&mut self, number: usize, setting: &Setting) {
        if self.nodes[number].arranged.is_some() {
            self.give_up_older(number, setting);
            let arranged = self.nodes[number].arranged.take().expect("it makes copies");
            self.nodes[number].pace = Pace::from(step_of(arranged.own.version));
            self.promise_again(arranged.generation, arranged.own.content, arranged.members);
        }
    }

    fn give_up_older(&mut self, number: usize, setting: &Setting) {
        let node = &mut self.nodes[number];
        let Some(arranged) = &node.arranged else { unreachable!("it makes copies") };
        let (own, kept) = (arranged.own, arranged.kept(number, setting));
        let is_new = |units: &u8, versions: &[(u64, Content)]| {
            let is_kept = *units == kept || (*units == own.units && setting.keeper.steps().is_some());
            is_kept && versions.iter().any(|&(known, _)| known == own.version)
        };
        node.copies.0.retain(|units, versions| is_new(units, versions));
        node.copies.0.values_mut().for_each(|versions| versions.retain(|&(known, _)| known == own.version));
    }

    /// All copies of a group are whole: from now on, fewer losses than copies undo nothing.
    ///
    /// A member that was frozen may learn this of a group that the others have left long since.
    fn promise_again(&mut self, generation: u64, content: Content, members: Vec<usize>) {
        if generation < self.promise.generation {
            return;
        }
        if !self.promise.holds() {
            self.promise.committed = self.promise.committed.common(content);
        }
        let is_gone = |&&number: &&usize| self.nodes[number].life != Life::Up;
        self.promise.lost = members.iter().filter(is_gone).count();
        self.promise.members = members;
        self.promise.generation = generation;
    }
}

impl Arranged {
    /// Units that the member keeps for others.
    fn kept(&self, number: usize, setting: &Setting) -> u8 {
        let rank = self.members.iter().position(|&member| member == number).expect("it is of the group");
        kept(rank, self.members.len(), units(setting))
    }
}
