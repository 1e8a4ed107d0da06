//! Who holds a state anyway, and who receives a copy of it.

use super::burden::Burden;
use std::collections::{BTreeMap, BTreeSet};

/// Ranks in the order of their nodes' names; a seat is a place in that order.
pub(super) struct Cluster {
    rank_at: Vec<usize>,
    node_of_seat: Vec<usize>,
    /// The first seat of each node, and the number of seats.
    first_seats: Vec<usize>,
}

/// The seats that hold one state.
pub(super) struct State {
    /// Seats that hold it anyway, ascending.
    members: Vec<usize>,
    /// The nodes of those.
    homes: BTreeSet<usize>,
    /// Seats that receive a copy.
    pub(super) receivers: Vec<usize>,
    /// The nodes of both.
    nodes: BTreeSet<usize>,
}

impl Cluster {
    pub(super) fn new<S: AsRef<str>>(nodes: &[S]) -> Self {
        let mut ranks_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, node) in nodes.iter().enumerate() {
            ranks_of.entry(node.as_ref()).or_default().push(rank);
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
    /// One round for each copy. Seats a largest node apart are on different nodes, so where every rank is the only
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

    /// Where to go on if the seat cannot receive the state: past its node if another node is wanted.
    fn obstacle(&self, state: &State, seat: usize, new_node: bool) -> Option<usize> {
        let node = self.node_of_seat[seat];
        if new_node {
            return state.nodes.contains(&node).then(|| self.first_seats[node + 1]);
        }
        let held = state.members.binary_search(&seat).is_ok() || state.receivers.contains(&seat);
        held.then_some(seat + 1)
    }

    /// Where to go on if the seat cannot take over from the receiver `from`, whose node may be the only one of a kind.
    pub(super) fn obstacle_of_move(&self, state: &State, from: usize, seat: usize) -> Option<usize> {
        let (old, new) = (self.node_of_seat[from], self.node_of_seat[seat]);
        let on_old = state.receivers.iter().filter(|&&other| self.node_of_seat[other] == old).count();
        let needs_node = on_old == 1 && !state.homes.contains(&old);
        if new == old || !needs_node {
            return self.obstacle(state, seat, false);
        }
        self.obstacle(state, seat, true)
    }

    /// Lets `to` receive the state in place of `from`.
    pub(super) fn move_copy(&self, state: &mut State, from: usize, to: usize) {
        state.receivers.iter_mut().filter(|seat| **seat == from).for_each(|seat| *seat = to);
        state.nodes.clone_from(&state.homes);
        state.nodes.extend(state.receivers.iter().map(|&seat| self.node_of_seat[seat]));
    }

    /// The member itself and the next `copies − 1` holders: one on each node first, members before receivers.
    fn nearest(&self, state: &State, position: usize, copies: usize) -> Vec<usize> {
        let (before, after) = state.members.split_at(position);
        let mut nodes = BTreeSet::new();
        let (mut found, mut others) = (Vec::new(), Vec::new());
        for &seat in after.iter().chain(before).chain(&state.receivers) {
            let list = if nodes.insert(self.node_of_seat[seat]) { &mut found } else { &mut others };
            list.push(seat);
            if found.len() == copies {
                break;
            }
        }
        found.extend(others);
        found.truncate(copies);
        found
    }
}
