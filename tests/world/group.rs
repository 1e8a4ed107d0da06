//! Connected groups and the collectives in them.

use super::copies::{Holdings, Snapshot};
use super::node::{Life, Node, Task};
use evermoe::protocol::Passed;
use evermoe::recovery::Knowledge;
use std::collections::BTreeMap;

/// A member's input to a collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Connect,
    Compare(Option<u64>),
    Recall(Option<Passed>),
    Survey { knowledge: Knowledge, holdings: Holdings },
    Fetch,
    Copies { snapshot: Snapshot, waits: bool },
    Protect,
    Vote { is_whole: bool, leaves: bool, calls: bool },
    Settle { is_whole: bool },
    Farewell,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Group {
    /// By rank.
    pub members: Vec<usize>,
    /// By rank: number of collectives that the member has entered, and its parts of the last two.
    parts: Vec<(u8, Vec<Part>)>,
    /// By rank: whether it has closed its sockets.
    left: Vec<bool>,
    /// Distinguishes the states made in this group from those of all others.
    pub tag: u8,
}

/// All groups with at least one member, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Groups {
    by_epoch: BTreeMap<u64, Group>,
    made: u8,
}

impl Groups {
    /// Number of groups so far.
    pub(crate) fn made(&self) -> u8 {
        self.made
    }

    pub(crate) fn get(&self, epoch: u64) -> &Group {
        &self.by_epoch[&epoch]
    }

    /// Makes a member enter the next collective of a group, the first of which connects it.
    pub(crate) fn enter(&mut self, epoch: u64, number: usize, members: Vec<usize>, part: Part) {
        let made = &mut self.made;
        let group = self.by_epoch.entry(epoch).or_insert_with(|| {
            *made += 1;
            let size = members.len();
            Group { members, parts: vec![(0, Vec::new()); size], left: vec![false; size], tag: *made }
        });
        let rank = group.rank(number);
        let (entered, parts) = &mut group.parts[rank];
        *entered += 1;
        parts.push(part);
        if parts.len() > 2 {
            parts.remove(0);
        }
    }

    /// Whether all members have entered the collective in which this one waits.
    pub(crate) fn is_complete(&self, epoch: u64, number: usize) -> bool {
        let group = self.get(epoch);
        let at = group.parts[group.rank(number)].0;
        group.parts.iter().all(|(entered, _)| *entered >= at)
    }

    /// Whether a member waits for the first collective of a group.
    pub(crate) fn is_connecting(&self, epoch: u64, number: usize) -> bool {
        let group = self.get(epoch);
        group.parts[group.rank(number)].0 == 1
    }

    /// The inputs of all members to the collective in which this one waits, by rank.
    pub(crate) fn parts(&self, epoch: u64, number: usize) -> Vec<Part> {
        let group = self.get(epoch);
        let at = group.parts[group.rank(number)].0;
        // A member can be one collective ahead, not more: it waits in that one for this one.
        group
            .parts
            .iter()
            .map(|(entered, parts)| parts[parts.len() - 1 - usize::from(entered - at)].clone())
            .collect()
    }

    /// Whether another member's absence can end this member's wait.
    pub(crate) fn can_fail(&self, epoch: u64, number: usize, nodes: &[Node]) -> bool {
        let group = self.get(epoch);
        let is_absent = |rank: usize| {
            let node = &nodes[group.members[rank]];
            let is_elsewhere = node.epoch() != Some(epoch) && !matches!(node.task, Task::Answered { .. });
            group.left[rank] || node.life != Life::Up || is_elsewhere
        };
        (0..group.members.len()).any(|rank| group.members[rank] != number && is_absent(rank))
    }

    pub(crate) fn leave(&mut self, epoch: u64, number: usize) {
        if let Some(group) = self.by_epoch.get_mut(&epoch) {
            let rank = group.rank(number);
            group.left[rank] = true;
        }
    }

    pub(crate) fn leave_all(&mut self, number: usize) {
        for group in self.by_epoch.values_mut().filter(|group| group.members.contains(&number)) {
            let rank = group.rank(number);
            group.left[rank] = true;
        }
    }

    /// Removes groups in which no member waits: they make no difference to later states.
    pub(crate) fn forget_old(&mut self, nodes: &[Node]) {
        self.by_epoch
            .retain(|epoch, group| group.members.iter().any(|&number| nodes[number].epoch() == Some(*epoch)));
    }
}

impl Group {
    pub(crate) fn rank(&self, number: usize) -> usize {
        self.members.iter().position(|&member| member == number).expect("the member is of the group")
    }
}

impl Node {
    /// The group whose collective this member is in, or will enter.
    fn epoch(&self) -> Option<u64> {
        match self.task {
            Task::Copying { epoch, .. } | Task::Collective { epoch, .. } => Some(epoch),
            _ => self.group,
        }
    }
}
