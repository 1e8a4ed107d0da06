//! Islands: the places of processes in them, and the rules that hold for them.

use super::node::{Life, Node};
use super::{Mistake, Setting, World};
use evermoe::protocol::Island;

impl Setting {
    /// Number of processes in each island; 1 if there are none.
    pub(crate) fn island(&self) -> usize {
        self.island_size.unwrap_or(1)
    }

    /// The place of a process in its island; the names are in the order of the numbers.
    pub(crate) fn island_of(&self, number: usize) -> Option<Island> {
        let size = self.island_size.filter(|_| self.mistake != Some(Mistake::HalfIslands))?;
        Some(Island { name: (number / size).to_string(), position: number % size, size })
    }
}

impl World {
    pub(crate) fn mates(&self, number: usize) -> impl Iterator<Item = &Node> {
        let size = self.promise.island;
        self.nodes[number / size * size..].iter().take(size)
    }

    /// Checks that each island is complete in a new group, or absent.
    pub(crate) fn check_islands(&mut self, members: &[usize], setting: &Setting) {
        let size = setting.island();
        let is_here = |number| members.contains(&number);
        if members.iter().any(|number| !(number / size * size..).take(size).all(is_here)) {
            self.break_rule("an island is half in a group");
        }
    }

    /// A member ends, as its island has lost a process.
    pub(crate) fn lose_island(&mut self, number: usize) {
        let was_lost = |node: &Node| node.was_away || matches!(node.life, Life::Dead | Life::Frozen);
        if !self.nodes.iter().any(was_lost) {
            self.break_rule("an island ended although the job has lost no process");
        }
        self.count_loss(number);
        self.end(number);
    }

    /// Whether all processes of a member's island run, and stay.
    pub(crate) fn is_island_up(&self, number: usize) -> bool {
        self.mates(number).all(|mate| mate.life == Life::Up && !mate.leaves)
    }
}
