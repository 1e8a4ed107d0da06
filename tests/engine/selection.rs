//! Which experts take their turn, and that copies need room.

use super::*;
use evermoe::dispatch::LoadAverage;
use evermoe::engine::{Budgets, Selector};
use evermoe::selection::TokenLedger;

fn engine(preset: PresetName, change: impl FnOnce(&mut Options)) -> Engine {
    let mut options = options(preset);
    change(&mut options);
    let mut engine = Engine::new(options, units(false)).unwrap();
    let cluster = Cluster::new(&[0, 1, 2], false, 1 << 20);
    engine.plan(&cluster.members(), 0).unwrap();
    engine.resume(0).unwrap();
    engine
}

/// Tokens since the last copy, and those that a step has on average; the step's own tokens are not known yet.
#[test]
fn moetion_chooses_before_a_step_by_average_tokens() {
    let counts: [[i64; 4]; 4] =
        [[700, 200, 90, 10], [100, 300, 200, 400], [400, 100, 400, 100], [10, 90, 200, 700]];
    for capacity in 1..=4 {
        let mut engine =
            engine(PresetName::Moetion, |options| options.remote_bytes_per_step = Some(capacity * 100));
        let mut average = LoadAverage::new(1, 4, 7.0).unwrap();
        let mut at_risk = [0; 4];
        for (number, counts) in (1..).zip(counts) {
            let expected = average.loads().into_iter().map(|mean| (mean.round_ties_even() as i64).max(1));
            let tokens: Vec<i64> = at_risk.iter().zip(expected).map(|(risk, mean)| risk + mean).collect();
            let mut order: Vec<usize> = (0..4).collect();
            order.sort_by_key(|&expert| (std::cmp::Reverse(tokens[expert]), expert));
            let mut wanted = order[..capacity as usize].to_vec();
            wanted.sort_unstable();
            assert_eq!(
                engine.begin_step().unwrap().unwrap()[0],
                wanted,
                "capacity {capacity}, step {number}"
            );
            engine.take_step(version_of(0, number), || counts.to_vec()).unwrap();
            at_risk.iter_mut().zip(counts).for_each(|(risk, count)| *risk += count);
            wanted.iter().for_each(|&expert| at_risk[expert] = 0);
            average.add(&counts).unwrap();
            assert_eq!(engine.ledger().unwrap().at_risk(), at_risk);
        }
    }
}

#[test]
fn an_expert_that_its_copy_followed_sends_a_gradient_and_others_their_state() {
    let mut engine = engine(PresetName::Moetion, |options| options.remote_bytes_per_step = Some(100));
    let sent = |engine: &mut Engine, number, counts: [i64; 4]| {
        engine.begin_step().unwrap();
        engine.take_step(version_of(0, number), || counts.to_vec()).unwrap().peer_bytes
    };
    assert_eq!(sent(&mut engine, 1, [90, 1, 1, 1]), 10, "its gradient: all copies are current");
    assert_eq!(sent(&mut engine, 2, [90, 1, 1, 1]), 10, "expert 0 again");
    assert_eq!(sent(&mut engine, 3, [0, 500, 1, 1]), 10);
    assert_eq!(sent(&mut engine, 4, [0, 500, 1, 1]), 100, "expert 1 has most tokens at risk now");
}

#[test]
fn pec_saves_k_experts_of_each_layer_and_a_due_save_follows_the_one_in_progress() {
    for each in 1..=3 {
        let mut engine = engine(PresetName::Pec, |options| {
            (options.experts_per_save, options.save_interval) = (Some(each), 3);
        });
        let mut saved = Vec::new();
        for number in 1..=12 {
            engine.begin_step().unwrap();
            let made = engine.take_step(version_of(0, number), || COUNTS.to_vec()).unwrap();
            saved.push(made.store_bytes);
            if number == 9 {
                engine.end_save(true);
            }
        }
        let bytes = 100 * each as u64 + 90;
        let wanted = [0, 0, bytes, 0, 0, 0, 0, 0, 0, bytes, 0, 0];
        assert_eq!(saved, wanted, "K = {each}: at 6 and 9 the first save is in progress, at 12 the second");
        assert_eq!(engine.saved().count(), each + 2);
        assert!(engine.saved().all(|(_, version)| version == version_of(0, 3)));
        engine.end_save(false); // a member is lost with its part
        assert!(engine.saved().all(|(_, version)| version == version_of(0, 3)));
        for number in 13..=15 {
            let made = engine.take_step(version_of(0, number), || COUNTS.to_vec()).unwrap();
            assert_eq!(made.store_bytes > 0, number == 15, "a save that failed is not followed at once");
        }
    }
}

/// Two layers of two experts, each with a copy on two other nodes.
#[test]
fn experts_of_each_layer_have_their_own_copies_and_tokens() {
    let sizes = Units { experts: 2, classes: 2, ..units(false) };
    let mut options = options(PresetName::Moetion);
    (options.replication, options.remote_bytes_per_step) = (3, None);
    let mut engine = Engine::new(options, sizes).unwrap();
    let mut cluster = Cluster::new(&[0, 1, 2], false, 1 << 20);
    cluster.ranks[1].step_seconds = Some(0.05);
    cluster.ranks.iter_mut().for_each(|rank| {
        rank.link = Some(Link { alpha: 0.0, beta: 100.0 });
        rank.step_seconds = rank.step_seconds.map(|seconds| seconds / 2.0);
    });
    engine.plan(&cluster.members(), version_of(1, 0)).unwrap();
    assert_eq!(
        engine.remote_budget(),
        Some(150),
        "what three links carry in the slowest member's half second"
    );
    engine.resume(version_of(1, 0)).unwrap();
    let mut take = |number, counts: [i64; 4], wanted: [&[usize]; 2]| {
        let chosen = engine.begin_step().unwrap().unwrap().clone();
        let made = engine.take_step(version_of(1, number), || counts.to_vec()).unwrap();
        assert_eq!(chosen, wanted, "step {number}");
        (made.peer_bytes, engine.ledger().unwrap().at_risk().to_vec())
    };
    assert_eq!(take(1, [1, 2, 3, 90], [&[0], &[]]), (20, vec![0, 2, 3, 90]), "a gradient to two nodes");
    assert_eq!(take(2, [1, 2, 3, 90], [&[], &[1]]), (200, vec![1, 4, 6, 0]), "a state to two nodes");
    assert_eq!(take(3, [1, 2, 3, 90], [&[], &[1]]), (20, vec![2, 6, 9, 0]));
    assert_eq!(take(4, [0, 0, 900, 0], [&[], &[1]]), (20, vec![2, 6, 909, 0]));
    assert_eq!(
        engine.if_lost(&[1]).unwrap().stale,
        [(2, version_of(1, 0))],
        "not copied since the beginning"
    );
    let loss = engine.if_lost(&[0, 1]).unwrap();
    assert_eq!(loss.stale, [(0, version_of(1, 1)), (1, version_of(1, 0)), (2, version_of(1, 0))]);
    assert_eq!(loss.lost_tokens, Some(vec![2, 6, 909]));
    assert_eq!(engine.lose(&loss.stale).unwrap(), Some(917.0));
    assert_eq!(engine.ledger().unwrap().lost(), [2, 6, 909, 0]);
    engine.take_step(version_of(1, 5), || vec![5; 4]).unwrap();
    engine.resume(version_of(1, 5)).unwrap();
    assert_eq!(engine.ledger().unwrap().at_risk(), [0; 4]);
    assert_eq!(engine.ledger().unwrap().lost(), [2, 6, 909, 0]);
}

#[test]
fn selectors_take_experts_in_turn_or_by_load() {
    let mut ledger = TokenLedger::new(2, 3, 1, 1.0).unwrap();
    ledger.add(&[9, 5, 1, 7, 0, 8]).unwrap();
    let selector = |is_sequential| {
        let mut selector = Selector::new(&[100; 6], is_sequential, Budgets::default());
        selector.replan(&vec![vec![0]; 6], vec![true; 6], 1).unwrap();
        selector
    };
    assert_eq!(selector(true).select_in_turn(&ledger).unwrap(), [[0], [1]]);
    assert_eq!(selector(false).select_in_turn(&ledger).unwrap(), [[0], [2]]);
    // Without a measurement an eighth of 600 bytes would be less than an expert: one expert, then what was measured.
    assert_eq!(selector(false).select_within_budget(&ledger, None).unwrap(), [vec![0], vec![]]);
    assert_eq!(selector(false).select_within_budget(&ledger, Some(250)).unwrap(), [[0], [2]]);
    let requested = Selector::new(&[100; 6], false, Budgets { remote: None, local: Some(600) });
    assert_eq!(requested.select_within_budget(&ledger, Some(0)).unwrap(), [vec![0, 1, 2], vec![0, 2]]);
    assert_eq!(requested.remote_budget(None), 100);
    assert_eq!(requested.remote_budget(Some(7)), 7);
}

#[test]
fn a_selector_skips_experts_that_peers_do_not_keep_and_rows_without_experts() {
    let mut ledger = TokenLedger::new(2, 3, 1, 1.0).unwrap();
    ledger.add(&[9, 5, 1, 7, 8, 0]).unwrap();
    let mut selector =
        Selector::new(&[100, 100, 100, 100, 100, 0], false, Budgets { remote: Some(1000), local: None });
    let active = [vec![0], vec![1], vec![0, 1], vec![1], vec![0], vec![]];
    selector.replan(&active, vec![true, true, false, true, true, false], 2).unwrap();
    assert_eq!(selector.select_to_follow(&ledger, &[0.0; 6], None).unwrap(), [[0, 1], [0, 1]]);
    assert!(selector.replan(&active, vec![true; 6], 1).is_err(), "there is no rank 1");
}

#[test]
fn copies_without_room_are_missing_and_former_ones_make_room() {
    for (preset, free, missing, has_room) in [
        (PresetName::Gemini, 1 << 20, 0, true),
        (PresetName::Gemini, 0, 1960, false),
        (PresetName::Moetion, 0, 4 * 220 + 4 * 200 + 360, false),
    ] {
        let mut engine = Engine::new(options(preset), units(false)).unwrap();
        let cluster = Cluster::new(&[0, 1, 2], false, free);
        let planned = engine.plan(&cluster.members(), 0).unwrap();
        assert_eq!((planned.missing_bytes, planned.has_room), (missing, has_room), "{preset:?} {free}");
        if missing > 0 {
            assert_eq!(engine.host_bytes().values().sum::<u64>(), 0);
        }
    }
    // Each node has room for one plan's copies, not for two.
    let mut engine = Engine::new(options(PresetName::Gemini), units(false)).unwrap();
    let three = Cluster::new(&[0, 1, 2], false, 1200);
    assert!(engine.plan(&three.members(), 0).unwrap().has_room);
    engine.resume(0).unwrap();
    engine.restore(0);
    let two = Cluster::new(&[1, 2], false, 1200);
    assert!(!engine.plan(&two.members(), 0).unwrap().has_room);
    assert!(engine.copies().unwrap().held(engine.history()).is_empty(), "the former ones are removed");
}
