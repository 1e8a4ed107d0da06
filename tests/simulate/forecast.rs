//! Forecasts say what jobs without failures send, and what a loss costs them on average.

use super::*;
use evermoe::simulate::{Forecast, forecast};

/// Eight experts of 12 kB and 48 kB of other state on four nodes, without a second replica.
fn small() -> Scenario {
    let mut scenario = scenario();
    (scenario.cluster.nodes, scenario.failures) = (4, Vec::new());
    scenario.cluster.network_latency_seconds = 10e-6;
    scenario.cluster.network_bytes_per_second = 1e6;
    scenario.costs.store_write_bytes_per_second = 1e18;
    scenario.costs.capture_bytes_per_second = 1e18;
    let model = &mut scenario.model;
    (model.layers, model.classes, model.experts) = (1, 1, 8);
    (model.expert_state_bytes, model.expert_gradient_bytes) = (12_000, 4000);
    (model.dense_modules, model.dense_weight_bytes) = (vec![12_000; 4], 0);
    (model.step_seconds, model.expert_share, model.tokens_per_step) = (0.1, 0.0, 1 << 20);
    (scenario.load.zipf, scenario.load.drift) = (1.0, 0.0);
    let session = &mut scenario.session;
    (session.slots, session.min_replicas) = (Some(2), Some(1));
    (session.join_interval, session.rebalance_interval, session.checkpoint_interval) = (0, 0, 1000);
    scenario
}

fn found(scenario: &Scenario, name: PresetName) -> Forecast {
    forecast(scenario, name).unwrap()
}

#[test]
fn a_job_without_failures_sends_as_many_bytes() {
    let mut scenario = small();
    scenario.session.save_interval = 3;
    scenario.session.remote_bytes_per_step = Some(30_000);
    scenario.steps = Some(3000);
    for name in PresetName::ALL {
        let (forecast, outcome) = (found(&scenario, name), run(&scenario, &preset(name), 0));
        let case = format!("{}: {forecast:?}, {} in 3000 steps", name.name(), outcome.copy_bytes);
        let sent = 3000.0 * forecast.peer_bytes;
        assert!((outcome.copy_bytes as f64 - sent).abs() <= 0.01 * sent, "{case}");
        let stored = 3000.0 * forecast.store_bytes;
        let complete = if name == PresetName::Pec { 0.0 } else { 144_000.0 }; // the last checkpoint begins with step 3000
        let is_near = (outcome.store_bytes as f64 - stored).abs() <= 0.01 * stored + complete;
        assert!(is_near, "{case}: {} to the store", outcome.store_bytes);
    }
}

#[test]
fn losses_at_each_step_and_node_cost_as_much_on_average() {
    let mut scenario = small();
    scenario.cluster.spares = 1;
    scenario.session.save_interval = 3;
    scenario.session.remote_bytes_per_step = Some(12_000);
    scenario.session.snapshot_interval = Some(3);
    scenario.load.zipf = 0.0; // so that selections repeat
    for (name, steps) in [
        (PresetName::Gemini, 3),
        (PresetName::Baft, 3),
        (PresetName::Auto, 1),
        (PresetName::Moetion, 8),
        (PresetName::Pec, 12),
    ] {
        let forecast = found(&scenario, name);
        let (mut undone, mut lost) = (0.0, 0.0);
        for step in 192..192 + steps {
            for node in 0..4 {
                let mut failing = scenario.clone();
                failing.failures = vec![Source::Steps { losses: vec![(step, vec![node])] }];
                failing.steps = Some(step + 10);
                let outcome = run(&failing, &preset(name), 0);
                assert_eq!((outcome.losses, outcome.checkpoint_loads), (1, 0));
                undone += outcome.undone_steps as f64 / (4 * steps) as f64;
                lost += outcome.lost_tokens / (4 * steps) as f64;
            }
        }
        let case = format!("{}: {forecast:?}, undone {undone}, lost {lost}", name.name());
        assert!((forecast.undone_steps - undone).abs() < 1e-9, "{case}");
        assert!((forecast.lost_tokens - lost).abs() <= 1e-3 * lost, "{case}");
        assert_eq!(lost > 0.0, matches!(name, PresetName::Moetion | PresetName::Pec), "{case}");
    }
}

#[test]
fn versions_take_the_steps_that_windows_need() {
    let gemini = found(&small(), PresetName::Gemini); // 72 kB pass each node, in 50 ms of windows of a step
    assert_eq!(
        (gemini.version_steps, gemini.window_steps, gemini.delay_seconds),
        (Some(2), Some(2), Some(0.0))
    );
    assert_eq!((gemini.survives, gemini.undone_steps, gemini.peer_bytes), (1.0, 2.5, 72_000.0));
    let mut each = small();
    each.session.snapshot_interval = Some(1);
    let gemini = found(&each, PresetName::Gemini);
    assert_eq!((gemini.version_steps, gemini.window_steps, gemini.undone_steps), (Some(1), Some(2), 1.0));
    assert!((gemini.delay_seconds.unwrap() - 0.022).abs() < 0.001, "{gemini:?}");
}

#[test]
fn one_step_may_stand_for_several() {
    let (mut scenario, tokens) = (small(), f64::from(1 << 20));
    (scenario.load.zipf, scenario.session.experts_per_save) = (0.0, Some(2));
    scenario.session.save_interval = 100;
    let pec = found(&scenario, PresetName::Pec);
    let behind = (0.0 + 100.0 + 200.0 + 300.0) / 4.0 + 49.5;
    assert!((pec.lost_tokens / tokens - behind / 4.0).abs() < 1e-3, "{pec:?}");
    assert_eq!((pec.version_steps, pec.undone_steps, pec.survives), (Some(400), 0.0, 0.0));
    assert_eq!(pec.store_bytes, (48_000.0 + 24_000.0) / 100.0);
    assert_eq!((pec.experts_per_snapshot, pec.experts_per_save), (Some(4), Some(2)));
    assert!((pec.restart_lost_tokens.unwrap() / tokens - 0.5).abs() < 1e-3, "{pec:?}");
    scenario.session.dense = Dense::Sharded;
    assert_eq!(found(&scenario, PresetName::Pec).undone_steps, 49.5);

    let mut many = small();
    (many.model.experts, many.session.slots, many.load.zipf) = (512, Some(128), 0.0);
    many.session.remote_bytes_per_step = Some(12_000); // 512 steps until all are copied, 8 at a time
    let moetion = found(&many, PresetName::Moetion);
    assert_eq!((moetion.version_steps, moetion.peer_bytes), (Some(512), 12_000.0));
    assert!((moetion.lost_tokens / tokens - 255.5 / 4.0).abs() < 0.1, "{moetion:?}");
}

#[test]
fn copies_that_are_never_made_are_as_old_as_the_checkpoint() {
    let mut scenario = small();
    scenario.session.remote_bytes_per_step = Some(11_999);
    let moetion = found(&scenario, PresetName::Moetion);
    assert_eq!((moetion.version_steps, moetion.peer_bytes), (None, 0.0));
    assert!((moetion.lost_tokens / f64::from(1 << 20) - 499.5 / 4.0).abs() < 0.1, "{moetion:?}");
    scenario.cluster.host_bytes = 0;
    for name in [PresetName::Gemini, PresetName::Auto, PresetName::Lazarus] {
        let found = found(&scenario, name);
        assert_eq!((found.survives, found.undone_steps, found.lost_tokens), (0.0, 499.5, 0.0), "{found:?}");
    }
    scenario.session.checkpoint_interval = 0;
    let message = forecast(&scenario, PresetName::Auto).unwrap_err().to_string();
    assert_eq!(message, "session.checkpoint_interval: expected 1 step or more, got 0");
}

#[test]
fn racks_fail_together_and_keep_no_copies_of_each_other() {
    let mut scenario = small();
    scenario.cluster.nodes_per_rack = 2;
    for name in [PresetName::Gemini, PresetName::Auto] {
        assert_eq!(found(&scenario, name).survives, 1.0, "{}", name.name());
    }
    scenario.session.slots = Some(4);
    scenario.session.min_replicas = Some(2);
    for name in PresetName::ALL {
        assert_eq!(found(&scenario, name).survives, 1.0, "{}", name.name());
    }
}
