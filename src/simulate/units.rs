//! The units of a model, and which node trains which of them.

use super::scenario::{Cluster, Model};
use crate::placement::matrix_of;

/// Units that are no experts, at most, and (node, unit) pairs of them.
const MOST_DENSE: usize = 64;
const MOST_ACTIVE: usize = 1 << 16;

/// Sizes of all units: the experts of each class, whose layers count as one, then what is no expert.
#[derive(Clone, Debug)]
pub(super) struct Units {
    pub(super) experts: usize,
    pub(super) classes: usize,
    /// Bytes of each unit.
    pub(super) bytes: Vec<u64>,
    pub(super) gradients: Vec<u64>,
}

impl Units {
    pub(super) fn new(model: &Model, cluster: &Cluster) -> Self {
        let Model { layers, classes, experts, .. } = *model;
        let layers_of = |class: usize| (layers / classes + usize::from(class < layers % classes)) as u64;
        let each = |size: u64| -> Vec<u64> {
            (0..classes).flat_map(|class| std::iter::repeat_n(size * layers_of(class), experts)).collect()
        };
        let (mut bytes, mut gradients) = (each(model.expert_state_bytes), each(model.expert_gradient_bytes));
        let parts = cluster.nodes.clamp(1, MOST_DENSE).min((MOST_ACTIVE / cluster.nodes).max(1)) as u64;
        let dense = model.dense_state_bytes;
        let sizes = (0..parts).map(|part| dense * (part + 1) / parts - dense * part / parts);
        bytes.extend(sizes.filter(|&size| size > 0));
        gradients.resize(bytes.len(), 0); // every node reduces these
        Self { experts, classes, bytes, gradients }
    }

    /// Number of experts of all classes; they are the first units.
    pub(super) fn num_experts(&self) -> usize {
        self.classes * self.experts
    }

    /// Units that are no expert.
    pub(super) fn dense(&self) -> std::ops::Range<usize> {
        self.num_experts()..self.bytes.len()
    }

    /// Bytes of the experts of a class.
    pub(super) fn of_class(&self, class: usize) -> Vec<i64> {
        self.bytes[class * self.experts..][..self.experts].iter().map(|&bytes| bytes as i64).collect()
    }
}

/// A member: its node, and the experts of each class that it trains, with the number of replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) node: usize,
    pub(super) held: Vec<Vec<(usize, i64)>>,
}

impl Seat {
    /// The expert units that it trains.
    pub(super) fn units(&self, experts: usize) -> impl Iterator<Item = usize> + '_ {
        let rows = self.held.iter().enumerate();
        rows.flat_map(move |(class, row)| row.iter().map(move |(expert, _)| class * experts + expert))
    }
}

/// `[nodes, experts]` replicas of a class; a node without a seat has none.
pub(super) fn matrix(seats: &[Option<&Seat>], class: usize, experts: usize) -> Vec<i64> {
    matrix_of(seats.iter().map(|seat| seat.map_or(&[][..], |seat| &seat.held[class])), experts)
}

/// Ranks that train each unit.
pub(super) fn active(seats: &[Seat], units: &Units) -> Vec<Vec<usize>> {
    let mut active = vec![Vec::new(); units.bytes.len()];
    for (rank, seat) in seats.iter().enumerate() {
        seat.units(units.experts).for_each(|unit| active[unit].push(rank));
    }
    for unit in units.dense() {
        active[unit] = (0..seats.len()).collect();
    }
    active
}
