//! How evenly copies are spread.

use super::cluster::{Cluster, State};
use std::collections::{BTreeSet, VecDeque};

/// How many copies each seat receives.
pub(super) struct Burden {
    counts: Vec<usize>,
    /// The seats that receive so many.
    seats_with: Vec<BTreeSet<usize>>,
}

impl Burden {
    pub(super) fn new(seats: usize) -> Self {
        Self { counts: vec![0; seats], seats_with: vec![(0..seats).collect()] }
    }

    /// Of the seats with the fewest copies the first from `start` on, around the end, that has no obstacle.
    pub(super) fn lightest(&self, start: usize, obstacle: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let around = |seats| {
            next_free(seats, start, self.counts.len(), &obstacle)
                .or_else(|| next_free(seats, 0, start, &obstacle))
        };
        self.seats_with.iter().find_map(around)
    }

    pub(super) fn add(&mut self, seat: usize) {
        self.seats_with[self.counts[seat]].remove(&seat);
        self.counts[seat] += 1;
        if self.seats_with.len() == self.counts[seat] {
            self.seats_with.push(BTreeSet::new());
        }
        self.seats_with[self.counts[seat]].insert(seat);
    }

    /// Moves copies along chains "seat a gives a state to seat b, b another one to c, …" from seats with many copies to
    /// seats with at least two fewer, as long as there are such chains.
    pub(super) fn even_out(&mut self, cluster: &Cluster, states: &mut [State]) {
        let mut received: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.counts.len()];
        for (index, state) in states.iter().enumerate() {
            state.receivers.iter().for_each(|&seat| _ = received[seat].insert(index));
        }
        for count in (2..self.seats_with.len()).rev() {
            while let Some(chain) = self.chain(cluster, states, &received, count) {
                for &(from, state, to) in &chain {
                    cluster.move_copy(&mut states[state], from, to);
                    received[from].remove(&state);
                    received[to].insert(state);
                }
                self.shift(chain.last().map_or(0, |last| last.0), chain[0].2);
            }
        }
    }

    /// The shortest chain from a seat with `count` copies to one with at most `count − 2`, last move first.
    fn chain(
        &self,
        cluster: &Cluster,
        states: &[State],
        received: &[BTreeSet<usize>],
        count: usize,
    ) -> Option<Vec<Move>> {
        if self.seats_with[..count - 1].iter().all(BTreeSet::is_empty) {
            return None;
        }
        let mut reached_by: Vec<Option<Move>> = vec![None; self.counts.len()];
        let mut queue: VecDeque<usize> = self.seats_with[count].iter().copied().collect();
        let mut unseen: BTreeSet<usize> = (0..self.counts.len()).collect();
        queue.iter().for_each(|seat| _ = unseen.remove(seat));
        while let Some(from) = queue.pop_front() {
            let before = chain_to(&reached_by, from);
            for &index in received[from].iter().filter(|&&index| before.iter().all(|step| step.1 != index)) {
                let obstacle = |seat| cluster.obstacle_of_move(&states[index], from, seat);
                while let Some(to) = next_free(&unseen, 0, self.counts.len(), &obstacle) {
                    unseen.remove(&to);
                    reached_by[to] = Some((from, index, to));
                    if self.counts[to] + 2 <= count {
                        return Some(chain_to(&reached_by, to));
                    }
                    queue.push_back(to);
                }
            }
        }
        None
    }

    fn shift(&mut self, from: usize, to: usize) {
        self.seats_with[self.counts[from]].remove(&from);
        self.counts[from] -= 1;
        self.seats_with[self.counts[from]].insert(from);
        self.add(to);
    }
}

/// From a seat, a state, to a seat.
type Move = (usize, usize, usize);

/// The moves that led to a seat, last first.
fn chain_to(reached_by: &[Option<Move>], seat: usize) -> Vec<Move> {
    std::iter::successors(reached_by[seat], |step| reached_by[step.0]).collect()
}

/// The first of the seats from `from` to before `end` that has no obstacle; an obstacle says where to go on.
fn next_free(
    seats: &BTreeSet<usize>,
    mut from: usize,
    end: usize,
    obstacle: &impl Fn(usize) -> Option<usize>,
) -> Option<usize> {
    while let Some(&seat) = seats.range(from..end.max(from)).next() {
        match obstacle(seat) {
            Some(next) => from = next,
            None => return Some(seat),
        }
    }
    None
}
