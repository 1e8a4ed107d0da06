//! Plans: with other nodes in place of lost ones, with little memory, and what a step of their copies costs.

use super::*;
use evermoe::protection::CopyKind;
use std::collections::BTreeMap;

const ROOM: u64 = 1 << 20;

/// An engine of three nodes with a plan whose copies are complete; `change` changes its options.
fn engine(preset: PresetName, is_sharded: bool, change: impl FnOnce(&mut Options)) -> Engine {
    let mut options = options(preset);
    change(&mut options);
    let mut engine = Engine::new(options, units(is_sharded)).unwrap();
    engine.plan(&Cluster::new(&[0, 1, 2], is_sharded, ROOM).members(), 0).unwrap();
    engine.resume(0).unwrap();
    engine
}

/// Node 3 takes the place of a lost one.
fn with_three(lost: usize) -> impl Fn(usize) -> Option<usize> {
    move |node| Some(if node == lost { 3 } else { node })
}

#[test]
fn a_plan_is_kept_with_another_node_in_the_place_of_a_lost_one() {
    for preset in [PresetName::Gemini, PresetName::Baft, PresetName::Moetion] {
        let mut engine = engine(preset, true, |_| ());
        let before = engine.copies().unwrap().units.clone();
        let cluster = Cluster::new(&[0, 3, 2], true, ROOM);
        assert_eq!(engine.keep_plan(&cluster.members(), with_three(1), 0).unwrap(), None, "no former plan");
        engine.restore(0);
        let first = engine.keep_plan(&cluster.members(), with_three(1), 0).unwrap().unwrap();
        assert!(first.keys().all(|&(_, to)| to == 3), "{preset:?}: the others have their copies: {first:?}");
        let to_three = |unit: usize| before[unit].holders.contains(&1);
        let wanted: u64 = (0..6).filter(|&unit| to_three(unit)).map(|unit| engine.units().bytes[unit]).sum();
        assert_eq!(first.values().sum::<u64>(), wanted, "{preset:?}");
        engine.release();
        let now = |node: &usize| if *node == 1 { 3 } else { *node };
        for (unit, (old, new)) in before.iter().zip(&engine.copies().unwrap().units).enumerate() {
            let each = |nodes: &[usize]| nodes.iter().map(now).collect::<Vec<_>>();
            assert_eq!((new.kind, new.primary), (old.kind, now(&old.primary)), "{preset:?}, {unit}");
            assert_eq!(
                (&new.holders, &new.own),
                (&each(&old.holders), &each(&old.own)),
                "{preset:?}, {unit}"
            );
            let takes_turns = preset == PresetName::Moetion && unit < EXPERTS;
            assert_eq!(new.version, takes_turns.then_some(0), "{preset:?}, {unit}");
        }
    }
}

#[test]
fn a_plan_is_not_kept_without_a_node_for_each_copy() {
    let gone = |lost: usize| move |node: usize| (node != lost).then_some(node);
    let mut gemini = engine(PresetName::Gemini, false, |_| ());
    gemini.restore(0);
    let two = Cluster::new(&[1, 2], false, ROOM);
    assert_eq!(gemini.keep_plan(&two.members(), gone(0), 0).unwrap(), None, "a holder is lost");

    // With all units on all nodes, nothing is kept: the plan needs no node in the place of the lost one.
    let mut everywhere = Cluster::new(&[0, 1, 2], false, ROOM);
    everywhere.units.iter_mut().for_each(|unit| unit.active = vec![0, 1, 2]);
    let mut auto = Engine::new(options(PresetName::Auto), units(false)).unwrap();
    auto.plan(&everywhere.members(), 0).unwrap();
    assert!(auto.copies().unwrap().units.iter().all(|each| each.kind == CopyKind::Active));
    auto.restore(0);
    let mut left = Cluster::new(&[1, 2], false, ROOM);
    left.units.iter_mut().for_each(|unit| unit.active = vec![0, 1]);
    let kept = auto.keep_plan(&left.members(), gone(0), 0).unwrap();
    assert_eq!(kept, Some(BTreeMap::new()), "two nodes train each unit, as many as wanted");
    auto.release();
    assert!(auto.copies().unwrap().units.iter().all(|each| each.primary != 0), "no lost node sends");
    auto.restore(0);
    left.units[2].active = vec![1];
    assert_eq!(auto.keep_plan(&left.members(), Some, 0).unwrap(), None, "one node trains expert 2 alone");
}

#[test]
fn copies_of_the_former_plan_serve_until_those_of_the_new_one_are_complete() {
    let mut engine = engine(PresetName::Gemini, false, |_| ());
    engine.restore(version_of(0, 0));
    let former = engine.copies().unwrap().units.clone();
    engine.plan(&Cluster::new(&[1, 2], false, ROOM).members(), version_of(1, 0)).unwrap();
    assert_eq!(engine.copies().unwrap().units, former);
    engine.release();
    assert_ne!(engine.copies().unwrap().units, former);
    assert_eq!(engine.history().newest, version_of(0, 0));
    engine.resume(version_of(1, 0)).unwrap();
    assert_eq!(engine.history().newest, version_of(1, 0));
    engine.forget();
    assert_eq!((engine.copies(), engine.history().newest), (None, 0));
    assert!(engine.active().iter().all(Vec::is_empty));
    let mut moetion = Engine::new(options(PresetName::Moetion), units(false)).unwrap();
    assert_eq!(moetion.begin_step().unwrap(), None, "nothing follows a step before there is a plan");
    let made = moetion.take_step(1, || COUNTS.to_vec()).unwrap();
    assert_eq!((made.peer_bytes, made.store_bytes), (0, 0));
}

/// While a plan's first copies are made, memory has those of the former plan, too.
#[test]
fn former_copies_stay_if_both_have_room() {
    for lacks in [0, 1] {
        let mut engine = engine(PresetName::Gemini, false, |_| ());
        let former = engine.host_bytes();
        engine.restore(0);
        let mut two = Cluster::new(&[1, 2], false, ROOM);
        two.ranks[0].free_bytes = former[&1] + 980 - lacks; // all copies are on both nodes: half of 4 × 490 bytes
        let planned = engine.plan(&two.members(), 0).unwrap();
        assert_eq!(planned.has_room, lacks == 0);
        assert_eq!(engine.copies().unwrap().held(engine.history()).is_empty(), lacks == 1);
        assert_eq!(planned.missing_bytes, 0);
    }
}

/// A node makes room for the snapshots that it captures, then for copies of others, each in the order of units.
#[test]
fn copies_that_have_no_room_are_missing() {
    for (preset, is_sharded, rows) in ROOMS {
        for (room, missing, wanted) in rows {
            let mut engine = Engine::new(options(preset), units(is_sharded)).unwrap();
            let planned = engine.plan(&Cluster::new(&[0, 1, 2], is_sharded, room).members(), 0).unwrap();
            engine.resume(0).unwrap();
            let found = (planned.missing_bytes, held(&engine));
            assert_eq!(found, (missing, wanted.to_owned()), "{preset:?}, room for {room} bytes");
            assert!(engine.host_bytes().values().all(|&bytes| bytes <= room));
        }
    }
}

/// Bytes of room on each node, those of missing copies, and the copies.
type Rows = [(u64, u64, &'static str); 3];

const ROOMS: [(PresetName, bool, Rows); 4] = [
    (
        PresetName::Gemini, // two versions of each snapshot, also on its sender; experts 0 and 1 together
        false,
        [
            (300, 1440, "e0 e1 e2 e3>0@0 d0 d1>0@0"),
            (400, 980, "e0 e1 e2 e3 d0 d1"),
            (600, 660, "e0 e1 e2>2@0 e3 d0>2@0 d1"),
        ],
    ),
    (
        PresetName::Moetion,
        false,
        [
            (199, 1680, "e0 e1 e2 e3 d0=1+2 d1=2+0"),
            (320, 1140, "e0=0 e1 e2=1 e3=2 d0=1+2 d1=0"),
            (600, 440, "e0>1@0=0 e1=0 e2>2@0=1 e3=2 d0=1+2 d1=2+0"),
        ],
    ),
    (
        PresetName::Moetion,
        true,
        [
            (200, 1458, "e0=0 e1 e2=1 e3=2 d0 d1"),
            (420, 846, "e0=0 e1=0 e2>2@0=1 e3=2 d0>1@0 d1=1"),
            (520, 572, "e0>1@0=0 e1=0 e2>2@0=1 e3=2 d0=0 d1>2@0=1"),
        ],
    ),
    (
        PresetName::Pec,
        false,
        [
            (200, 560, "e0=0 e1 e2=1 e3=2 d0 d1"),
            (419, 60, "e0=0 e1=0 e2=1 e3=2 d0=1+2 d1=2"),
            (460, 0, "e0=0 e1=0 e2=1 e3=2 d0=1+2 d1=2+0"),
        ],
    ),
];

#[test]
fn a_step_waits_for_what_the_windows_of_the_busiest_node_have_no_room_for() {
    for (preset, is_sharded, bytes, windows, delay) in [
        // Node 1 receives 200 bytes, and sends 160. The link carries 600 in a second.
        (PresetName::Gemini, false, 300.0, 2, "0.103"),
        (PresetName::Gemini, true, 300.0, 2, "0.153"),
        // BAFT sends complete units in a window.
        (PresetName::Baft, false, 300.0, 2, "0.267"),
        (PresetName::Baft, false, 200.0, 2, "0.405"),
        (PresetName::Lazarus, true, 1.0, 1, "0.000"),
    ] {
        let mut engine = engine(preset, is_sharded, |options| options.snapshot_interval = Some(1));
        let pace = engine.pace(&network(bytes)).unwrap();
        let found = (pace.version_steps, pace.window_steps, format!("{:.3}", pace.delay_seconds));
        assert_eq!(found, (1, Some(windows), delay.to_owned()), "{preset:?}, windows of {bytes} bytes");
    }
}

/// BAFT sends complete units, so that a version takes a step more than its bytes would.
#[test]
fn a_version_takes_the_steps_in_which_windows_have_room_for_it() {
    for (preset, bytes, steps) in [(PresetName::Gemini, 125.0, 3), (PresetName::Baft, 125.0, 4)] {
        let pace = engine(preset, false, |_| ()).pace(&network(bytes)).unwrap();
        assert_eq!((pace.version_steps, pace.delay_seconds), (steps, 0.0), "{preset:?}");
    }
}

/// Node 1 receives gradients of 20 bytes of experts and 6 of a module, and sends 10 and 3: of experts, what the budget allows.
#[test]
fn experts_that_take_turns_send_what_the_budget_allows() {
    for (budget, bytes, windows) in
        [(100, 7.0, 3), (250, 7.0, 5), (250, 10.0, 4), (400, 10.0, 5), (4000, 7.0, 7)]
    {
        let change = |options: &mut Options| options.remote_bytes_per_step = Some(budget);
        let mut engine = engine(PresetName::Moetion, true, change);
        let pace = engine.pace(&network(bytes)).unwrap();
        assert_eq!(
            (pace.bytes, pace.window_steps),
            (9, Some(windows)),
            "budget {budget}, windows of {bytes}"
        );
    }
}

#[test]
fn each_copy_counts_in_what_the_budget_allows() {
    let mut engine = engine(PresetName::Moetion, true, |options| {
        (options.replication, options.remote_bytes_per_step) = (3, Some(400));
    });
    // Of 800 bytes of experts' copies the budget has room for a half: node 0 sends 20 bytes and receives 10. Modules: 15.
    assert_eq!(engine.pace(&network(10.0)).unwrap().window_steps, Some(6));
}

/// `auto` copies snapshots of units whose steps cannot be repeated.
fn without_replay(is_sharded: bool, idle: f64) -> Engine {
    let mut engine =
        Engine::new(options(PresetName::Auto), Units { replayable: false, ..units(is_sharded) }).unwrap();
    let mut cluster = Cluster::new(&[0, 1, 2], is_sharded, ROOM);
    cluster.units.iter_mut().for_each(|unit| unit.replayable = false);
    cluster.ranks.iter_mut().for_each(|rank| rank.network_seconds = Some(idle));
    engine.plan(&cluster.members(), 0).unwrap();
    engine
}

#[test]
fn auto_schedules_versions_of_all_snapshots_and_lets_others_delay_a_step_as_it_chose() {
    for (is_sharded, idle, wanted) in [
        (true, 0.5, "245 bytes a step, a version in 2, in windows alone in 2, delay 0.000 s"),
        (false, 0.5, "200 bytes a step, a version in 2, in windows alone in 2, delay 0.000 s"),
        (false, 0.1, "158 bytes a step, a version in 1, in windows alone in none, delay 0.009 s"),
    ] {
        let pace = without_replay(is_sharded, idle).pace(&network(300.0)).unwrap();
        assert_eq!(text_of(&pace), wanted, "{is_sharded}, {idle} s without traffic");
    }
    let free = engine(PresetName::Auto, true, |_| ()).pace(&network(1.0)).unwrap();
    assert_eq!(text_of(&free), "49 bytes a step, a version in 1, in windows alone in 1, delay 0.000 s");
}
