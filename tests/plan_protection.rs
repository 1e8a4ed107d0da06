//! Copies in a session: each preset keeps what `copies` requires, in every shape, and snapshots of own units are
//! balanced.

use evermoe::protection::{
    CopyKind, PresetName, ProtectionRequest, RankInfo, UnitInfo, UnitProtection, plan_protection,
};
use std::collections::BTreeSet;

const UNIT_BYTES: u64 = 1200;

/// Nodes, ranks of each, whether modules that are no experts have owners, and the nodes of replica ranks.
#[derive(Clone, Debug)]
struct Shape {
    nodes: usize,
    ranks_per_node: usize,
    is_sharded: bool,
    replica_nodes: Vec<&'static str>,
}

impl Shape {
    fn all() -> impl Iterator<Item = Self> {
        let replicas: [&[&'static str]; 5] = [&[], &["r"], &["r", "s"], &["r", "r"], &["n0"]];
        (1..=6).flat_map(move |nodes| {
            [1, 2, 3].into_iter().flat_map(move |ranks_per_node| {
                [false, true].into_iter().flat_map(move |is_sharded| {
                    replicas.into_iter().map(move |replica_nodes| Self {
                        nodes,
                        ranks_per_node,
                        is_sharded,
                        replica_nodes: replica_nodes.to_vec(),
                    })
                })
            })
        })
    }

    fn trainers(&self) -> usize {
        self.nodes * self.ranks_per_node
    }

    fn ranks(&self) -> Vec<RankInfo> {
        let rank = |node: String, trains| RankInfo {
            node,
            free_bytes: 1 << 30,
            trains,
            step_seconds: None,
            network_seconds: None,
            log_bytes: 1 << 30,
            link: None,
            host_speed: None,
        };
        let own = (0..self.trainers()).map(|at| rank(format!("n{}", at / self.ranks_per_node), true));
        own.chain(self.replica_nodes.iter().map(|node| rank((*node).into(), false))).collect()
    }

    /// An expert on each rank, one on the first two nodes, and as many modules as there are ranks.
    fn units(&self) -> Vec<UnitInfo> {
        let unit = |active: Vec<usize>, is_expert| UnitInfo {
            state_bytes: UNIT_BYTES,
            gradient_bytes: UNIT_BYTES / 3,
            active,
            tokens: 64.0,
            replayable: is_expert,
            may_lag: is_expert,
        };
        let trainers = self.trainers();
        let mut units: Vec<UnitInfo> = (0..trainers).map(|rank| unit(vec![rank], true)).collect();
        if self.nodes > 1 {
            units.push(unit(vec![0, self.ranks_per_node], true));
        }
        units.extend((0..trainers).map(|owner| match self.is_sharded {
            true => unit(vec![owner], false),
            false => unit((0..trainers).collect(), false),
        }));
        units
    }
}

fn arranged(
    shape: &Shape,
    preset: PresetName,
    copies: usize,
) -> (Vec<UnitInfo>, Vec<RankInfo>, Vec<UnitProtection>) {
    let (units, ranks) = (shape.units(), shape.ranks());
    let request =
        ProtectionRequest { preset: preset.preset(), units: &units, ranks: &ranks, copies, budget: 0.01 };
    let kept = plan_protection(&request).unwrap().units;
    (units, ranks, kept)
}

/// Failure domains: nodes, or the ranks if there is only one node.
fn domain(ranks: &[RankInfo], rank: usize) -> String {
    let nodes: BTreeSet<&str> = ranks.iter().map(|rank| rank.node.as_str()).collect();
    if nodes.len() == 1 { rank.to_string() } else { ranks[rank].node.clone() }
}

fn domains(ranks: &[RankInfo], some: impl Iterator<Item = usize>) -> BTreeSet<String> {
    some.map(|rank| domain(ranks, rank)).collect()
}

#[test]
fn each_unit_is_on_as_many_nodes_as_copies_says() {
    for shape in Shape::all() {
        for copies in 0..=4 {
            for preset in [PresetName::Auto, PresetName::Gemini, PresetName::Baft, PresetName::Moetion] {
                let (units, ranks, kept) = arranged(&shape, preset, copies);
                let all = domains(&ranks, 0..ranks.len()).len();
                for (unit, kept) in units.iter().zip(&kept) {
                    let held = unit.active.iter().chain(&kept.holders).copied();
                    let on = domains(&ranks, held).len();
                    let case = format!("{preset:?}, {copies} copies, {shape:?}, {unit:?}: {kept:?}");
                    assert!(on >= copies.min(all), "{on} of {all} nodes: {case}");
                    assert!(kept.holders.len() < copies.max(1), "more holders than asked for: {case}");
                    assert!(unit.active.contains(&kept.primary), "{case}");
                    let each: BTreeSet<usize> = kept.holders.iter().copied().collect();
                    assert!(each.len() == kept.holders.len() && !each.contains(&kept.primary), "{case}");
                }
            }
            let (_, _, kept) = arranged(&shape, PresetName::Lazarus, copies);
            assert!(kept.iter().all(|kept| kept.holders.is_empty() && kept.kind == CopyKind::Active));
        }
    }
}

/// With that number of copies every loss of fewer nodes leaves each unit: `survives_two` is 1 with three.
#[test]
fn two_lost_nodes_leave_each_unit_with_three_copies() {
    for shape in Shape::all().filter(|shape| shape.nodes >= 3) {
        for preset in [PresetName::Auto, PresetName::Gemini, PresetName::Baft, PresetName::Moetion] {
            let (units, ranks, kept) = arranged(&shape, preset, 3);
            let all: Vec<String> = domains(&ranks, 0..ranks.len()).into_iter().collect();
            for (at, one) in all.iter().enumerate() {
                for two in &all[at + 1..] {
                    let is_left = |(unit, kept): (&UnitInfo, &UnitProtection)| {
                        let held = unit.active.iter().chain(&kept.holders).copied();
                        domains(&ranks, held).iter().any(|node| node != one && node != two)
                    };
                    assert!(
                        units.iter().zip(&kept).all(is_left),
                        "{preset:?} loses a unit with {one} and {two}: {shape:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn baft_copies_to_the_previous_nodes_the_nearest_first() {
    for copies in 2..=4 {
        let shape = Shape { nodes: 5, ranks_per_node: 1, is_sharded: true, replica_nodes: Vec::new() };
        let (_, _, kept) = arranged(&shape, PresetName::Baft, copies);
        for kept in kept {
            let before: Vec<usize> = (1..copies).map(|back| (kept.primary + 5 - back) % 5).collect();
            assert_eq!(kept.holders, before, "{copies} copies of what rank {} sends", kept.primary);
        }
    }
}

#[test]
fn what_several_nodes_train_has_snapshots_on_as_many_of_them_as_copies_says() {
    for shape in Shape::all() {
        for copies in 0..=4 {
            for preset in [PresetName::Auto, PresetName::Moetion, PresetName::Lazarus, PresetName::Gemini] {
                let (units, ranks, kept) = arranged(&shape, preset, copies);
                let node = |rank: usize| ranks[rank].node.as_str();
                for (unit, kept) in units.iter().zip(&kept) {
                    let case = format!("{preset:?}, {copies} copies, {shape:?}, {unit:?}: {kept:?}");
                    if matches!(kept.kind, CopyKind::Snapshot { .. }) {
                        assert!(kept.own.is_empty(), "the holders keep snapshots, and the sender: {case}");
                        continue;
                    }
                    let train: BTreeSet<&str> = unit.active.iter().map(|&rank| node(rank)).collect();
                    let on: BTreeSet<&str> = kept.own.iter().map(|&rank| node(rank)).collect();
                    assert_eq!((on.len(), on.len()), (copies.min(train.len()), kept.own.len()), "{case}");
                    assert!(kept.own.iter().all(|rank| unit.active.contains(rank)), "{case}");
                    assert!(copies == 0 || kept.own[0] == kept.primary, "{case}");
                }
            }
        }
    }
}

/// For units that all ranks train, each has the same number of snapshots, so that none captures more than its share.
#[test]
fn own_snapshots_of_what_all_train_are_spread_evenly() {
    for shape in Shape::all().filter(|shape| !shape.is_sharded && shape.replica_nodes.is_empty()) {
        for copies in 1..=4 {
            let (units, ranks, kept) = arranged(&shape, PresetName::Lazarus, copies);
            let mut count = vec![0; ranks.len()];
            for (unit, kept) in units.iter().zip(&kept).filter(|(unit, _)| !unit.may_lag) {
                assert_eq!(unit.active.len(), ranks.len());
                kept.own.iter().for_each(|&rank| count[rank] += 1);
            }
            assert_eq!(count, vec![copies.min(shape.nodes); ranks.len()], "{copies} copies, {shape:?}");
        }
    }
}
