//! Memory of copies in the nodes' host memory. Copies that do not fit are missing.

use super::copies::{Copies, UnitCopies};
use super::units::Units;
use crate::protection::{CopyKind, LOG_STEPS, OWN_VERSIONS};
use std::collections::BTreeMap;

/// Units that a session copies together: the indices of those with the same nodes.
struct Bundle {
    units: Vec<usize>,
    /// The sender, if it keeps a snapshot, then the other nodes.
    nodes: Vec<usize>,
    bytes: u64,
    /// Whether these are the snapshots of a node that trains the units.
    is_own: bool,
}

/// Host memory of the copies of a unit on each of its holders.
fn holder_bytes(unit: usize, kind: CopyKind, units: &Units) -> u64 {
    kind.memory_bytes(units.bytes[unit], units.gradients[unit], LOG_STEPS)
}

/// Whether the sender captures a snapshot in its own memory.
fn is_captured(each: &UnitCopies) -> bool {
    matches!(each.kind, CopyKind::Snapshot { .. })
}

impl Copies {
    /// Bytes that the copies take in the host memory of each node.
    pub fn host_bytes(&self, units: &Units) -> BTreeMap<usize, u64> {
        let mut by_node = BTreeMap::new();
        for (unit, each) in self.units.iter().enumerate() {
            let bytes = holder_bytes(unit, each.kind, units);
            let own = each.own.iter().map(|&node| (node, OWN_VERSIONS * units.bytes[unit]));
            for (node, bytes) in each.keepers().map(|node| (node, bytes)).chain(own) {
                *by_node.entry(node).or_default() += bytes;
            }
        }
        by_node
    }

    /// Removes the copies that do not fit into the `room` of their node; returns their bytes.
    ///
    /// A node first makes room for the snapshots that it captures, then for copies that others send. A snapshot without
    /// room on its sender has no copies.
    pub(super) fn fit(&mut self, room: &BTreeMap<usize, u64>, units: &Units, are_separate: bool) -> u64 {
        let wanted = self.host_bytes(units);
        let room = |node: usize| room.get(&node).copied().unwrap_or(0);
        if wanted.iter().all(|(&node, &bytes)| bytes <= room(node)) {
            return 0;
        }
        let mut bundles = self.bundles(units, are_separate);
        bundles.sort_by_key(|bundle| !bundle.is_own);
        let mut used: BTreeMap<usize, u64> = BTreeMap::new();
        let mut refused: Vec<(usize, bool, Vec<usize>)> = Vec::new();
        for is_first in [true, false] {
            for bundle in &bundles {
                let (first, others) = bundle.nodes.split_at(usize::from(bundle.is_own));
                for &node in if is_first { first } else { others } {
                    let used = used.entry(node).or_default();
                    if used.saturating_add(bundle.bytes) <= room(node) {
                        *used += bundle.bytes;
                    } else {
                        refused.push((node, is_first, bundle.units.clone()));
                    }
                }
            }
        }
        for (node, is_first, of) in refused {
            for unit in of {
                let each = &mut self.units[unit];
                if !is_first {
                    each.holders.retain(|&holder| holder != node);
                } else if is_captured(each) {
                    each.holders.clear();
                    each.kind = CopyKind::Uncovered;
                } else {
                    each.own.retain(|&holder| holder != node);
                }
            }
        }
        let left: u64 = self.host_bytes(units).values().sum();
        wanted.values().sum::<u64>() - left
    }

    /// Bundles in the order of their first unit, snapshots of a node's own units last.
    fn bundles(&self, units: &Units, are_separate: bool) -> Vec<Bundle> {
        let mut found: Vec<Bundle> = Vec::new();
        let mut number: BTreeMap<(bool, Option<usize>, usize, Vec<usize>), usize> = BTreeMap::new();
        let mut add =
            |unit: usize, nodes: Vec<usize>, bytes: u64, is_own: bool, key: (Option<usize>, usize)| {
                let next = found.len();
                let at = *number.entry((is_own, key.0, key.1, nodes.clone())).or_insert(next);
                if at == next {
                    found.push(Bundle { units: Vec::new(), nodes, bytes: 0, is_own });
                }
                found[at].units.push(unit);
                found[at].bytes += bytes;
            };
        for (unit, each) in self.units.iter().enumerate() {
            let bytes = holder_bytes(unit, each.kind, units);
            let is_captured = is_captured(each);
            let sender = is_captured.then_some(each.primary);
            let nodes: Vec<usize> = sender.into_iter().chain(each.holders.iter().copied()).collect();
            if !nodes.is_empty() {
                let alone = (!is_captured).then_some(unit); // a replayed copy is made alone
                add(unit, nodes, bytes, is_captured, (alone, each.kind.period()));
            }
        }
        for (unit, each) in self.units.iter().enumerate() {
            for &node in &each.own {
                let alone = are_separate.then_some(unit);
                add(unit, vec![node], OWN_VERSIONS * units.bytes[unit], true, (alone, 0));
            }
        }
        found
    }

    /// Returns the copies with all bytes removed: new copies need their memory.
    pub(super) fn removed(mut self) -> Self {
        for each in &mut self.units {
            each.kind = CopyKind::Uncovered;
            each.holders.clear();
            each.own.clear();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two copies for which a node has no room, the snapshot is made: its sender has captured it.
    #[test]
    fn snapshots_have_room_before_replicas() {
        let units = Units {
            experts: 2,
            classes: 1,
            bytes: vec![100, 100],
            gradients: vec![10, 10],
            replayable: true,
            have_owners: true,
        };
        let copies = |kind| UnitCopies { kind, primary: 0, holders: vec![1], own: Vec::new(), version: None };
        let both = vec![copies(CopyKind::Replayed), copies(CopyKind::Snapshot { period: 1 })];
        let replica = 100 + LOG_STEPS * 10;
        for (room, left) in [(replica + 200, [1, 1]), (replica + 199, [0, 1]), (200, [0, 1]), (199, [0, 0])] {
            let mut copies = Copies::of(both.clone(), 0);
            let missing = copies.fit(&BTreeMap::from([(0, 200), (1, room)]), &units, false);
            let found = [0, 1].map(|unit: usize| copies.units[unit].holders.len() as u64);
            assert_eq!((found, missing), (left, (1 - left[0]) * replica + (1 - left[1]) * 200), "{room}");
        }
    }
}
