//! The units of a model and their assignment to nodes.

use super::scenario::{Dense, Model, Scenario};
use crate::engine::Units;
use crate::placement::matrix_of;

/// Maximum number of units that are no experts, and of (node, unit) pairs of them.
const MAX_DENSE: usize = 64;
const MAX_ACTIVE: usize = 1 << 16;

/// Sizes of all units of a scenario's model.
pub(super) fn units_of(scenario: &Scenario) -> Units {
    let (model, nodes) = (&scenario.model, scenario.cluster.nodes);
    let &Model { layers, classes, experts, .. } = model;
    let layers_of = |class: usize| (layers / classes + usize::from(class < layers % classes)) as u64;
    let each = |size: u64| -> Vec<u64> {
        (0..classes).flat_map(|class| std::iter::repeat_n(size * layers_of(class), experts)).collect()
    };
    let (mut bytes, mut gradients) = (each(model.expert_state_bytes), each(model.expert_gradient_bytes));
    let have_owners = scenario.session.dense == Dense::Sharded;
    let has_bytes = |size: &u64| *size > 0;
    if have_owners {
        let gradient = |size: &u64| {
            let share = u128::from(*size) * u128::from(model.expert_gradient_bytes);
            (share / u128::from(model.expert_state_bytes.max(1))) as u64
        };
        bytes.extend(model.dense_modules.iter().copied().filter(has_bytes));
        gradients.extend(model.dense_modules.iter().filter(|size| has_bytes(size)).map(gradient));
    } else {
        let parts = nodes.clamp(1, MAX_DENSE).min((MAX_ACTIVE / nodes).max(1)) as u64;
        let dense: u64 = model.dense_modules.iter().sum();
        let end = |part: u64| (u128::from(dense) * u128::from(part) / u128::from(parts)) as u64;
        bytes.extend((0..parts).map(|part| end(part + 1) - end(part)).filter(has_bytes));
        gradients.resize(bytes.len(), 0); // every node reduces these
    }
    Units { experts, classes, bytes, gradients, replayable: model.replayable, have_owners }
}

/// The units of a member: its node, the experts of each class that it trains with their replica counts, and the other
/// units that it owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankUnits {
    pub(super) node: usize,
    pub(super) held: Vec<Vec<(usize, i64)>>,
    pub(super) owned: Vec<usize>,
}

impl RankUnits {
    /// The units that it trains, without those that every node has.
    pub(super) fn units(&self, experts: usize) -> impl Iterator<Item = usize> + '_ {
        let rows = self.held.iter().enumerate();
        let experts =
            rows.flat_map(move |(class, row)| row.iter().map(move |(expert, _)| class * experts + expert));
        experts.chain(self.owned.iter().copied())
    }

    /// Whether it trains a unit that not every node has.
    pub(super) fn has(&self, unit: usize, units: &Units) -> bool {
        let (class, expert) = (unit / units.experts, unit % units.experts);
        match class < units.classes {
            true => self.held[class].iter().any(|(held, _)| *held == expert),
            false => self.owned.contains(&unit),
        }
    }
}

/// `[nodes, experts]` replicas of a class; a node without a member has none.
pub(super) fn matrix(rank_units: &[Option<&RankUnits>], class: usize, experts: usize) -> Vec<i64> {
    matrix_of(
        rank_units.iter().map(|own_units| own_units.map_or(&[][..], |own_units| &own_units.held[class])),
        experts,
    )
}

/// Ranks that train each unit.
pub(super) fn active(rank_units: &[RankUnits], units: &Units) -> Vec<Vec<usize>> {
    let mut active = vec![Vec::new(); units.bytes.len()];
    for (rank, own_units) in rank_units.iter().enumerate() {
        own_units.units(units.experts).for_each(|unit| active[unit].push(rank));
    }
    for unit in units.everywhere() {
        active[unit] = (0..rank_units.len()).collect();
    }
    active
}
