//! Members that hold a state in any case, receivers of copies of it, and balancing of the copies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Ranks in the order of their nodes' names; a seat is a position in that order.
pub(super) struct Cluster {
    rank_at: Vec<usize>,
    node_of_seat: Vec<usize>,
    /// The first seat of each node, and the number of seats.
    first_seats: Vec<usize>,
}

/// The seats that hold one state.
struct State {
    /// Seats that hold it in any case, ascending.
    members: Vec<usize>,
    /// The nodes of these members.
    homes: BTreeSet<usize>,
    /// Seats that receive a copy.
    receivers: Vec<usize>,
    /// The nodes of both.
    nodes: BTreeSet<usize>,
}

impl Cluster {
    pub(super) fn new<S: Ord>(nodes: &[S]) -> Self {
        let mut ranks_of: BTreeMap<&S, Vec<usize>> = BTreeMap::new();
        for (rank, node) in nodes.iter().enumerate() {
            ranks_of.entry(node).or_default().push(rank);
        }
        let mut found = Self { rank_at: Vec::new(), node_of_seat: Vec::new(), first_seats: vec![0] };
        for (node, ranks) in ranks_of.into_values().enumerate() {
            found.node_of_seat.extend(ranks.iter().map(|_| node));
            found.rank_at.extend(ranks);
            found.first_seats.push(found.rank_at.len());
        }
        found
    }

    fn nodes(&self) -> usize {
        self.first_seats.len() - 1
    }

    /// For each rank the holders of its state, which all ranks of its `group` share.
    pub(super) fn holders(&self, group: &[usize], copies: usize) -> Vec<Vec<usize>> {
        let mut seats_of: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (seat, &rank) in self.rank_at.iter().enumerate() {
            seats_of.entry(group[rank]).or_default().push(seat);
        }
        let mut states: Vec<State> = seats_of.into_values().map(|members| self.state(members)).collect();
        states.sort_by_key(|state| state.members[0]);
        self.send(&mut states, copies);
        let mut holders = vec![Vec::new(); group.len()];
        for state in &states {
            for position in 0..state.members.len() {
                let seats = self.nearest(state, position, copies);
                holders[self.rank_at[state.members[position]]] =
                    seats.into_iter().map(|seat| self.rank_at[seat]).collect();
            }
        }
        holders
    }

    fn state(&self, members: Vec<usize>) -> State {
        let homes: BTreeSet<usize> = members.iter().map(|&seat| self.node_of_seat[seat]).collect();
        State { members, nodes: homes.clone(), homes, receivers: Vec::new() }
    }

    /// Adds receivers to the states that have too few holders or nodes.
    ///
    /// One round per copy. Seats at a distance of a largest node are on different nodes. So if every rank is the only
    /// holder of its state, round c shifts all states by c largest nodes: each seat receives one and no two collide.
    fn send(&self, states: &mut [State], copies: usize) {
        let largest = self.first_seats.windows(2).map(|seats| seats[1] - seats[0]).max().unwrap_or(0);
        let mut burden = Burden::new(self.rank_at.len());
        for round in 1..copies {
            for state in states.iter_mut() {
                let holders = state.members.len() + state.receivers.len();
                let wanted = state.nodes.len() < copies.min(self.nodes());
                if !wanted && holders >= copies {
                    continue;
                }
                let start = (state.members[0] + round * largest) % self.rank_at.len();
                let seat = burden.lightest(start, |seat| self.obstacle(state, seat, wanted));
                if let Some(seat) = seat {
                    burden.add(seat);
                    state.receivers.push(seat);
                    state.nodes.insert(self.node_of_seat[seat]);
                }
            }
        }
        burden.even_out(self, states);
    }

    /// The next seat to try if this one cannot receive the state: past its node if a new node is wanted.
    fn obstacle(&self, state: &State, seat: usize, new_node: bool) -> Option<usize> {
        let node = self.node_of_seat[seat];
        if new_node {
            return state.nodes.contains(&node).then(|| self.first_seats[node + 1]);
        }
        let held = state.members.binary_search(&seat).is_ok() || state.receivers.contains(&seat);
        held.then_some(seat + 1)
    }

    /// The next seat to try if this one cannot take over from the receiver `from`, whose node may be the only one of
    /// its kind.
    fn obstacle_of_move(&self, state: &State, from: usize, seat: usize) -> Option<usize> {
        let (old, new) = (self.node_of_seat[from], self.node_of_seat[seat]);
        let on_old = state.receivers.iter().filter(|&&other| self.node_of_seat[other] == old).count();
        let needs_node = on_old == 1 && !state.homes.contains(&old);
        if new == old || !needs_node {
            return self.obstacle(state, seat, false);
        }
        self.obstacle(state, seat, true)
    }

    /// Lets `to` receive the state in place of `from`.
    fn move_copy(&self, state: &mut State, from: usize, to: usize) {
        state.receivers.iter_mut().filter(|seat| **seat == from).for_each(|seat| *seat = to);
        state.nodes.clone_from(&state.homes);
        state.nodes.extend(state.receivers.iter().map(|&seat| self.node_of_seat[seat]));
    }

    /// The member itself and the next `copies − 1` holders: one on each node first, members before receivers.
    fn nearest(&self, state: &State, position: usize, copies: usize) -> Vec<usize> {
        let (before, after) = state.members.split_at(position);
        let mut nodes = BTreeSet::new();
        let (mut found, mut others) = (Vec::new(), Vec::new());
        for mut seats in [after, before, &state.receivers] {
            while let [seat, rest @ ..] = seats {
                seats = rest;
                let node = self.node_of_seat[*seat];
                if nodes.insert(node) {
                    found.push(*seat);
                } else if others.len() < copies {
                    others.push(*seat);
                } else {
                    // This node's share is complete; continue with the next node.
                    let same = seats.iter().take_while(|&&seat| self.node_of_seat[seat] == node).count();
                    seats = &seats[same..];
                }
                if found.len() == copies {
                    return found;
                }
            }
        }
        found.extend(others);
        found.truncate(copies);
        found
    }
}

/// Copies that each seat receives.
struct Burden {
    counts: Vec<usize>,
    /// The seats by the number of copies that they receive.
    seats_with: Vec<BTreeSet<usize>>,
}

impl Burden {
    fn new(seats: usize) -> Self {
        Self { counts: vec![0; seats], seats_with: vec![(0..seats).collect()] }
    }

    /// The first of the seats with the fewest copies, from `start` and wrapping around, that has no obstacle.
    fn lightest(&self, start: usize, obstacle: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let around = |seats| {
            next_free(seats, start, self.counts.len(), &obstacle)
                .or_else(|| next_free(seats, 0, start, &obstacle))
        };
        self.seats_with.iter().find_map(around)
    }

    fn add(&mut self, seat: usize) {
        self.seats_with[self.counts[seat]].remove(&seat);
        self.counts[seat] += 1;
        if self.seats_with.len() == self.counts[seat] {
            self.seats_with.push(BTreeSet::new());
        }
        self.seats_with[self.counts[seat]].insert(seat);
    }

    /// Moves copies along chains "seat a gives a state to seat b, b another one to c, …" from seats with many copies to
    /// seats with at least two fewer, as long as such chains exist.
    fn even_out(&mut self, cluster: &Cluster, states: &mut [State]) {
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
            // A state moves at most once in a chain: a second move would ignore the node that the first one took.
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

/// The first of the seats from `from` to before `end` that has no obstacle; an obstacle names the next seat to try.
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
