//! A 0/1 table with given sums of rows and columns and the fewest ones in cells that cost something.
//!
//! Successive shortest paths: cells that cost nothing are filled greedily, then each expert that still lacks a rank
//! finds the cheapest chain "take rank a; its expert moves to rank b; …" that ends at a rank with room. A table that is
//! the cheapest of its size stays so after each such step.

use std::collections::VecDeque;

/// The parent of the expert where a chain starts. Nodes of the search are numbered experts first, then ranks.
const NOBODY: usize = usize::MAX;

/// Which ranks take one replica of each expert.
pub(super) struct Table {
    experts: usize,
    ranks: usize,
    /// `[experts, ranks]`: the rank takes the expert.
    taken: Vec<bool>,
    /// `[experts, ranks]`: the rank would have to fetch the expert.
    costs: Vec<bool>,
    /// Replicas of each expert that still lack a rank.
    wanted: Vec<usize>,
    /// Replicas that each rank still has room for.
    room: Vec<usize>,
}

impl Table {
    pub(super) fn new(wanted: Vec<usize>, room: Vec<usize>, costs: Vec<bool>) -> Self {
        let (experts, ranks) = (wanted.len(), room.len());
        Self { experts, ranks, taken: vec![false; experts * ranks], costs, wanted, room }
    }

    /// Fills the table; every row sum `wanted[e] ≤ ranks` and equal `room` make that possible.
    pub(super) fn fill(mut self) -> Vec<bool> {
        self.fill_free();
        while self.wanted.iter().any(|&wanted| wanted > 0) {
            if !self.augment() {
                unreachable!("equal room on all ranks and at most one replica per rank always fit");
            }
        }
        self.taken
    }

    /// Free cells first: experts with the most replicas first, on the ranks with the most room.
    fn fill_free(&mut self) {
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by_key(|&expert| (usize::MAX - self.wanted[expert], expert));
        for expert in order {
            let mut free: Vec<usize> = (0..self.ranks)
                .filter(|&rank| !self.costs[expert * self.ranks + rank] && self.room[rank] > 0)
                .collect();
            free.sort_by_key(|&rank| (usize::MAX - self.room[rank], rank));
            for rank in free.into_iter().take(self.wanted[expert]) {
                self.taken[expert * self.ranks + rank] = true;
                self.wanted[expert] -= 1;
                self.room[rank] -= 1;
            }
        }
    }

    /// Gives one expert one more rank by the cheapest chain; false if there is none.
    fn augment(&mut self) -> bool {
        let (distance, parent) = self.search();
        let end = (0..self.ranks)
            .filter(|&rank| self.room[rank] > 0 && distance[self.experts + rank] < i64::MAX)
            .min_by_key(|&rank| (distance[self.experts + rank], rank));
        let Some(end) = end else { return false };
        self.room[end] -= 1;
        let mut node = self.experts + end;
        while parent[node] != NOBODY {
            let before = parent[node];
            let (expert, rank) = if node >= self.experts { (before, node) } else { (node, before) };
            self.taken[expert * self.ranks + rank - self.experts] = node >= self.experts;
            node = before;
        }
        self.wanted[node] -= 1;
        true
    }

    /// Bellman-Ford with a queue from all experts that lack a rank: cost of reaching each node, and from where.
    fn search(&self) -> (Vec<i64>, Vec<usize>) {
        let nodes = self.experts + self.ranks;
        let (mut distance, mut parent) = (vec![i64::MAX; nodes], vec![NOBODY; nodes]);
        let mut queued = vec![false; nodes];
        let mut queue: VecDeque<usize> =
            (0..self.experts).filter(|&expert| self.wanted[expert] > 0).collect();
        for &expert in &queue {
            (distance[expert], queued[expert]) = (0, true);
        }
        while let Some(node) = queue.pop_front() {
            queued[node] = false;
            let from_expert = node < self.experts;
            for other in if from_expert { self.experts..nodes } else { 0..self.experts } {
                let (expert, rank) = if from_expert { (node, other) } else { (other, node) };
                let cell = expert * self.ranks + rank - self.experts;
                if self.taken[cell] == from_expert {
                    continue;
                }
                let cost = i64::from(self.costs[cell]);
                let reached = distance[node] + if from_expert { cost } else { -cost };
                if reached < distance[other] {
                    (distance[other], parent[other]) = (reached, node);
                    if !queued[other] {
                        queued[other] = true;
                        queue.push_back(other);
                    }
                }
            }
        }
        (distance, parent)
    }
}
