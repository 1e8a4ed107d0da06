//! What a loss of nodes costs: the version that is left, and the experts that go back alone.

use evermoe::engine::{Engine, Loss, Members, Options, Units};
use evermoe::protection::{PresetName, RankInfo, UnitInfo};
use evermoe::protocol::{step_of, version_of};
use evermoe::recovery::{Plan, plan_version};
use std::collections::BTreeSet;

const TOKENS: [i64; 3] = [30, 20, 10];

/// Three nodes with one expert each, and a unit that all train, or that node 0 owns. A budget or a save has room for one
/// expert.
fn engine(preset: PresetName, is_owned: bool, replication: usize) -> Engine {
    build(preset, is_owned, |options| options.replication = replication)
}

fn engine_with(preset: PresetName, change: impl FnOnce(&mut Options)) -> Engine {
    build(preset, false, change)
}

fn build(preset: PresetName, is_owned: bool, change: impl FnOnce(&mut Options)) -> Engine {
    let units = Units {
        experts: 3,
        classes: 1,
        bytes: vec![1200, 1200, 1200, 500],
        gradients: vec![400; 4],
        replayable: true,
        have_owners: is_owned,
    };
    let mut options = Options {
        preset: preset.preset(),
        replication: 2,
        copy_budget: 0.01,
        snapshot_interval: Some(1),
        experts_per_save: Some(1),
        save_interval: 1,
        max_lost_token_fraction: 1.0,
        remote_bytes_per_step: Some(1200),
    };
    change(&mut options);
    let ranks: Vec<RankInfo> = (0..3).map(rank).collect();
    let unit = |unit: usize| UnitInfo {
        state_bytes: units.bytes[unit],
        gradient_bytes: 400,
        active: if unit < 3 || is_owned { vec![unit % 3] } else { vec![0, 1, 2] },
        tokens: 20.0,
        replayable: true,
        may_lag: unit < 3,
    };
    let infos: Vec<UnitInfo> = (0..4).map(unit).collect();
    let mut engine = Engine::new(options, units).unwrap();
    engine.plan(&Members { nodes: &[0, 1, 2], ranks: &ranks, units: &infos }, 0).unwrap();
    engine.resume(0).unwrap();
    engine
}

fn rank(node: usize) -> RankInfo {
    RankInfo {
        node: format!("{node}"),
        free_bytes: 1 << 30,
        trains: true,
        step_seconds: Some(1.0),
        network_seconds: Some(1.0),
        log_bytes: 1 << 30,
        link: None,
        host_speed: None,
    }
}

fn take(engine: &mut Engine, steps: u64) {
    for step in step_of(engine.history().newest) + 1..=steps {
        engine.begin_step().unwrap();
        engine.take_step(version_of(0, step), || TOKENS.to_vec()).unwrap();
        engine.end_save(true);
    }
}

fn stale(loss: &Loss) -> Vec<(usize, u64, Option<i64>)> {
    let lost = |index: usize| loss.lost_tokens.as_ref().map(|lost| lost[index]);
    loss.stale.iter().enumerate().map(|(index, &(unit, at))| (unit, step_of(at), lost(index))).collect()
}

/// By load, the experts are copied in the order 0, 1, 0, 1, 0, 2: then 2 is up to date, 0 is one step behind, and 1 two.
#[test]
fn each_preset_continues_from_what_its_copies_have() {
    let alone = |unit, at, tokens| vec![(unit, at, Some(tokens))];
    let none = Vec::new;
    for (preset, nodes, version, undone, expected) in [
        (PresetName::Auto, vec![0], Some(6), 0, none()),
        (PresetName::Auto, vec![0, 1, 2], None, 6, none()),
        (PresetName::Gemini, vec![0], Some(5), 1, none()),
        (PresetName::Baft, vec![1], Some(5), 1, none()),
        (PresetName::Lazarus, vec![0], None, 6, none()),
        (PresetName::Moetion, vec![0], Some(6), 0, alone(0, 5, 30)),
        (PresetName::Moetion, vec![1], Some(6), 0, alone(1, 4, 40)),
        (PresetName::Moetion, vec![2], Some(6), 0, none()),
        (PresetName::Pec, vec![0], Some(6), 0, alone(0, 5, 30)),
        (PresetName::Pec, vec![1], Some(6), 0, alone(1, 4, 40)),
        (PresetName::Pec, vec![2], Some(6), 0, none()),
        (PresetName::Pec, vec![0, 1, 2], Some(6), 0, [alone(0, 5, 30), alone(1, 4, 40)].concat()),
    ] {
        let mut engine = engine(preset, false, 2);
        take(&mut engine, 6);
        let loss = engine.if_lost(&nodes).unwrap();
        let case = format!("{} without {nodes:?}: {loss:?}", preset.name());
        assert_eq!((loss.version.map(step_of), loss.undone_steps), (version, undone), "{case}");
        assert_eq!(stale(&loss), expected, "{case}");
        assert_eq!(engine.if_lost(&[]).unwrap().undone_steps, 0, "{case}");
    }
}

/// The plan of all units, from all that the other nodes and the store have.
fn complete_plan(engine: &Engine, lost: &BTreeSet<usize>) -> Plan {
    let (units, newest) = (engine.active().len(), engine.history().newest);
    let is_left = |nodes: &[usize]| nodes.iter().any(|node| !lost.contains(node));
    let trained = (0..units).filter(|&unit| is_left(&engine.active()[unit])).map(|unit| (newest, unit));
    let copies = engine.copies().unwrap().held(engine.history()).into_iter();
    let copied =
        copies.filter(|(_, node, ..)| !lost.contains(node)).map(|(unit, _, version, _)| (version, unit));
    let saved = engine.saved().map(|(unit, version)| (version, unit));
    let held: Vec<(u64, usize)> = trained.chain(copied).chain(saved).collect();
    engine.version_left(|may_lag| Ok(plan_version(units, held.clone(), may_lag))).unwrap().0
}

#[test]
fn the_units_that_lost_nodes_train_decide_as_all_units_do() {
    for preset in PresetName::ALL {
        for (is_owned, replication) in [(false, 2), (true, 2), (true, 3), (true, 1)] {
            let mut engine = engine(preset, is_owned, replication);
            for step in 0..=7 {
                take(&mut engine, step);
                for set in 0..8_usize {
                    let lost: BTreeSet<usize> = (0..3).filter(|node| set >> node & 1 == 1).collect();
                    let nodes: Vec<usize> = lost.iter().copied().collect();
                    let (found, all) = (engine.if_lost(&nodes).unwrap(), complete_plan(&engine, &lost));
                    let case =
                        format!("{} {is_owned} × {replication}, step {step}, {nodes:?}", preset.name());
                    assert_eq!((found.version, found.stale), (all.version, all.stale), "{case}");
                }
            }
        }
    }
}

#[test]
fn all_go_back_with_a_unit_that_must_not_lag() {
    let mut pec = engine(PresetName::Pec, true, 2);
    take(&mut pec, 6);
    pec.begin_step().unwrap();
    pec.take_step(version_of(0, 7), || TOKENS.to_vec()).unwrap(); // its save is in progress
    let loss = pec.if_lost(&[0]).unwrap();
    assert_eq!((loss.version.map(step_of), loss.undone_steps), (Some(6), 1));
    assert_eq!(stale(&loss), [(0, 5, Some(60)), (1, 4, Some(60))], "those of the repeated step count, too");
    let mut lazarus = engine(PresetName::Lazarus, true, 2);
    take(&mut lazarus, 6);
    assert_eq!(lazarus.if_lost(&[0]).unwrap().version, None);
}

/// Expert 0 has step 4 alone, all other units step 5 alone.
#[test]
fn experts_lag_where_the_preset_allows_it() {
    let (four, five) = (version_of(0, 4), version_of(0, 5));
    for (preset, replication, all_at_five, one_at_four) in [
        (PresetName::Gemini, 2, (Some(five), 0, false), (None, 0, false)),
        (PresetName::Auto, 2, (Some(five), 0, false), (Some(five), 1, true)),
        (PresetName::Auto, 0, (Some(five), 0, false), (None, 0, false)),
        (PresetName::Moetion, 2, (Some(five), 0, true), (Some(five), 1, true)),
    ] {
        let engine = engine(preset, false, replication);
        for (oldest, wanted) in [(five, all_at_five), (four, one_at_four)] {
            let held = vec![(oldest, 0), (five, 1), (five, 2), (five, 3)];
            let (plan, may_lag) =
                engine.version_left(|may_lag| Ok(plan_version(4, held.clone(), may_lag))).unwrap();
            assert_eq!((plan.version, plan.stale.len(), may_lag), wanted, "{preset:?} × {replication}");
        }
    }
}

#[test]
fn nothing_is_left_without_copies() {
    for preset in [PresetName::Auto, PresetName::Gemini, PresetName::Moetion] {
        let mut engine = engine(preset, false, 1);
        take(&mut engine, 3);
        assert_eq!(engine.if_lost(&[1]).unwrap().version, None, "{}", preset.name());
    }
}

#[test]
fn a_stride_counts_for_its_steps() {
    let mut engine = engine(PresetName::Moetion, false, 2);
    assert_eq!(engine.remote_budget(), Some(1200));
    engine.set_stride(3);
    assert_eq!(engine.remote_budget(), Some(3600));
    engine.begin_step().unwrap();
    let made = engine.take_step(version_of(0, 1), || TOKENS.to_vec()).unwrap();
    assert_eq!(made.peer_bytes, 3 * 1200);
    engine.begin_step().unwrap();
    let made = engine.take_step(version_of(0, 2), || TOKENS.to_vec()).unwrap();
    assert_eq!(made.peer_bytes, 3 * 1200, "states: in the steps between, other experts were copied");
}

#[test]
fn a_budget_that_has_no_room_for_an_expert_has_none_in_several_steps() {
    for (bytes, in_three) in [(1199, 1199), (1200, 3600), (5000, 15000)] {
        let mut engine =
            engine_with(PresetName::Moetion, |options| options.remote_bytes_per_step = Some(bytes));
        engine.set_stride(3);
        assert_eq!(engine.remote_budget(), Some(in_three));
    }
}

/// 8 steps between two saves are 2 steps of 4.
#[test]
fn saves_count_in_strides() {
    for (interval, stride, saves) in [(8, 4, [2, 4]), (7, 3, [2, 4]), (2, 4, [1, 2])] {
        let mut pec = engine_with(PresetName::Pec, |options| options.save_interval = interval);
        pec.set_stride(stride);
        let mut found = Vec::new();
        for step in 1..=4 {
            let made = pec.take_step(version_of(0, step), || TOKENS.to_vec()).unwrap();
            found.extend((made.store_bytes > 0).then_some(step));
            pec.end_save(true);
        }
        assert_eq!(found[..2], saves, "{interval} / {stride}");
    }
}

/// What was lost once is not lost again, and a copy of all experts has all tokens.
#[test]
fn tokens_count_from_the_copy() {
    for (preset, name) in [(PresetName::Moetion, "moetion"), (PresetName::Pec, "pec")] {
        let mut engine = engine(preset, false, 2);
        take(&mut engine, 6);
        let loss = engine.if_lost(&[1]).unwrap();
        assert_eq!(stale(&loss), [(1, 4, Some(40))], "{name}");
        assert_eq!(engine.lose(&loss.stale).unwrap(), Some(40.0), "{name}");
        assert_eq!(engine.if_lost(&[1]).unwrap().lost_tokens, Some(vec![0]), "{name}");
        assert_eq!(engine.ledger().unwrap().lost(), [0, 40, 0], "{name}");
    }
    let mut moetion = engine(PresetName::Moetion, false, 2);
    take(&mut moetion, 2);
    assert_eq!(moetion.ledger().unwrap().at_risk().iter().filter(|&&tokens| tokens > 0).count(), 2);
    moetion.resume(version_of(0, 2)).unwrap();
    assert_eq!(moetion.ledger().unwrap().at_risk(), [0; 3], "a recovery has copied all of them");
    let mut pec = engine(PresetName::Pec, false, 2);
    take(&mut pec, 2);
    let before = pec.ledger().unwrap().at_risk().to_vec();
    pec.resume(version_of(0, 2)).unwrap();
    assert_eq!(pec.ledger().unwrap().at_risk(), before, "the store has what was saved");
}
