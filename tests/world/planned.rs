//! Copies after a recovery: complete before training resumes, or made during the next step and complete with its vote.

use super::copies::{Content, Snapshot, kept, previous};
use super::group::Part;
use super::node::{Life, units};
use super::pace::Pace;
use super::{Mistake, Setting, World};
use evermoe::protocol::{Event, step_of};

/// The copies that a member makes during its step, and their group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Planned {
    pub epoch: u64,
    generation: u64,
    members: Vec<usize>,
    /// Units that it trains, in the state that is copied.
    own: Snapshot,
}

impl World {
    /// All members plan the same copies; previous ones stay until those of the plan are complete on all members.
    pub(crate) fn copied(&mut self, number: usize, parts: &[Part], setting: &Setting) {
        let epoch = self.nodes[number].group.expect("in a group");
        let group = self.groups.get(epoch).clone();
        let (rank, size) = (group.rank(number), group.members.len());
        let Part::Copies { snapshot: own, waits } = parts[rank] else { unreachable!("of one kind") };
        let Part::Copies { snapshot: neighbour, waits: other } =
            parts[previous(rank, size, setting.island())]
        else {
            unreachable!("of one kind")
        };
        if own.version != neighbour.version || waits != other {
            self.break_rule("members protect different versions, or some of them wait");
        }
        let generation = self.nodes[number].protocol.generation();
        self.nodes[number].planned = Some(Planned { epoch, generation, members: group.members, own });
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

    /// Completes the copies that this member keeps for the previous one, and its own snapshots.
    pub(crate) fn receive_copies(&mut self, number: usize, setting: &Setting) {
        let node = &mut self.nodes[number];
        let Some(planned) = &node.planned else { unreachable!("it makes copies") };
        let (version, content) = (planned.own.version, planned.own.content);
        let kept = planned.kept(number, setting);
        node.copies.push(kept, version, content, usize::MAX);
        if setting.keeper.steps().is_some() {
            node.copies.push(planned.own.units, version, content, usize::MAX);
        }
    }

    /// Completes the copies of members that have waited for them.
    pub(crate) fn protected(&mut self, number: usize, setting: &Setting) {
        self.nodes[number].late = 0;
        self.settle_copies(number, setting);
        self.feed(number, Event::Protected { is_whole: true }, setting);
    }

    /// Completes the copies of the plan, if this member has made some: earlier ones are dropped.
    pub(crate) fn settle_copies(&mut self, number: usize, setting: &Setting) {
        if self.nodes[number].planned.is_some() {
            self.give_up_older(number, setting);
            let planned = self.nodes[number].planned.take().expect("it makes copies");
            self.nodes[number].pace = Pace::from(step_of(planned.own.version));
            self.promise_again(planned.generation, planned.own.content, planned.members);
        }
    }

    fn give_up_older(&mut self, number: usize, setting: &Setting) {
        let node = &mut self.nodes[number];
        let Some(planned) = &node.planned else { unreachable!("it makes copies") };
        let (own, kept) = (planned.own, planned.kept(number, setting));
        let is_new = |units: &u8, versions: &[(u64, Content)]| {
            let is_kept = *units == kept || (*units == own.units && setting.keeper.steps().is_some());
            is_kept && versions.iter().any(|&(known, _)| known == own.version)
        };
        node.copies.0.retain(|units, versions| is_new(units, versions));
        node.copies.0.values_mut().for_each(|versions| versions.retain(|&(known, _)| known == own.version));
    }

    /// All copies of a group are complete: from now on, fewer losses than copies undo nothing.
    ///
    /// A member that was frozen may learn this about a group that the others have left long ago.
    fn promise_again(&mut self, generation: u64, content: Content, members: Vec<usize>) {
        if generation < self.promise.generation {
            return;
        }
        if !self.promise.holds() {
            self.promise.committed = self.promise.committed.common(content);
        }
        let is_gone = |&&number: &&usize| self.nodes[number].life != Life::Up;
        let size = self.promise.island;
        self.promise.lost = members.iter().filter(is_gone).map(|number| number / size).collect();
        self.promise.members = members;
        self.promise.generation = generation;
    }
}

impl Planned {
    /// Units that the member keeps for others.
    fn kept(&self, number: usize, setting: &Setting) -> u8 {
        let rank = self.members.iter().position(|&member| member == number).expect("it is of the group");
        kept(rank, self.members.len(), units(setting), setting.island())
    }
}
