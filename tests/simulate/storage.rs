//! Checkpoints and copies: when they count, and the memory and bandwidth that they need.

use super::*;

/// Daly's model, exactly: work w and a checkpoint d are repeated from the previous checkpoint until both are complete.
/// Each loss costs c, again if it occurs during c. So of a mean time M between losses the share that counts is
/// w ÷ (M · exp(c ÷ M) · (exp((w + d) ÷ M) − 1)).
#[test]
fn a_restart_loses_the_checkpoint_for_which_training_still_waits() {
    let (step, cost) = (10.0, 5.0 + 20.0 + 4.0);
    for (mtbf, interval, stall) in
        [(300.0, 5, 0.0), (300.0, 20, 60.0), (300.0, 10, 120.0), (1200.0, 60, 90.0)]
    {
        let mut scenario = scenario();
        (scenario.cluster.nodes, scenario.cluster.spares) = (16, 64);
        scenario.costs.store_write_bytes_per_second = 1e18;
        scenario.costs.store_read_bytes_per_second = 1e18;
        scenario.costs.capture_bytes_per_second = 1e18;
        scenario.costs.persist_seconds = stall;
        (scenario.load.zipf, scenario.load.drift) = (0.0, 0.0);
        scenario.failures = vec![Source::Poisson { mtbf_seconds: mtbf, repair_seconds: Some(1.0) }];
        let scheme = Scheme::Restart(RestartChoices {
            name: "restart".into(),
            expert_parallel: 1,
            drops_groups: false,
            checkpoint_interval: interval,
            join_seconds: 1e9,
        });
        let found: Vec<f64> = (0..24).map(|seed| run(&scenario, &scheme, seed).ettr).collect();
        let mean = found.iter().sum::<f64>() / found.len() as f64;
        let variance = found.iter().map(|each| (each - mean).powi(2)).sum::<f64>() / (found.len() - 1) as f64;
        let half = 2.81 * (variance / found.len() as f64).sqrt(); // Student's t at 99 %, 23 degrees of freedom
        let work = step * interval as f64;
        let expected = work / (mtbf * (cost / mtbf).exp() * ((work + stall) / mtbf).exp_m1());
        assert!(
            (mean / expected - 1.0).abs() < half / expected + 0.005,
            "{mtbf} s, {interval} steps, {stall} s: expected {expected}, found {mean} ± {half}"
        );
        assert!(half < 0.03 * expected, "{half} of {expected}");
    }
}

/// A job with an even load whose checkpoints take 60 s to write, and no time to capture or to read.
fn slow_writes() -> Scenario {
    let mut scenario = scenario();
    scenario.session.slots = Some(8);
    (scenario.load.zipf, scenario.load.drift) = (0.0, 0.0);
    scenario.costs.capture_bytes_per_second = 1e18;
    scenario.costs.store_read_bytes_per_second = 1e18;
    scenario.costs.store_write_bytes_per_second = 370e6 / 12.0 / 60.0;
    scenario
}

/// The 51st step begins after 524 s with `restart` and after 526 s with a preset, and takes 10 s. With it begins a
/// checkpoint that takes 60 s, by a stall or by a write; with a preset, once the step is computed.
#[test]
fn a_checkpoint_counts_once_all_of_it_is_written() {
    for (scheme, stalls, lost_at, is_stored) in [
        (restart(false), true, 581, false),
        (restart(false), true, 605, true),
        (restart(false), false, 581, false), // complete before the loss is detected, without the lost node's part
        (restart(false), false, 587, true),
        (restart(true), true, 581, false),
        (restart(true), false, 581, false),
        (restart(true), false, 587, true),
        (auto(), true, 593, false),
        (auto(), true, 605, true),
        (auto(), false, 593, false),
        (auto(), false, 605, true),
    ] {
        let mut scenario = slow_writes();
        if stalls {
            scenario.costs.persist_seconds = 60.0;
            scenario.costs.store_write_bytes_per_second = 1e18;
        }
        let all: Vec<usize> = (0..12).collect();
        let lost_at = f64::from(lost_at);
        let events =
            vec![(0.0, true, all.clone()), (lost_at, false, all.clone()), (lost_at + 300.0, true, all)];
        scenario.failures = vec![Source::Trace { events }];
        scenario.seconds = 1500.0;
        let outcome = run(&scenario, &scheme, 1);
        let case = format!("{}, stalls {stalls}, lost at {lost_at}: {outcome:?}", scheme.name());
        assert_eq!(outcome.checkpoint_loads, u64::from(is_stored), "{case}");
        assert_eq!(outcome.undone_steps < 10, is_stored, "{case}");
    }
}

/// A write takes 60 s, as above. One node is lost 3 s before its end, all others a minute later.
#[test]
fn a_lost_node_leaves_the_checkpoint_that_it_writes_incomplete() {
    for (scheme, lost_at) in [(restart(true), 581.0), (auto(), 593.0)] {
        let mut scenario = slow_writes();
        let events = vec![
            (0.0, true, (0..12).collect()),
            (lost_at, false, vec![11]),
            (lost_at + 60.0, false, (0..11).collect()),
            (lost_at + 300.0, true, (0..12).collect()),
        ];
        scenario.failures = vec![Source::Trace { events }];
        scenario.seconds = lost_at + 400.0;
        let outcome = run(&scenario, &scheme, 1);
        assert_eq!(outcome.checkpoint_loads, 0, "{}: {outcome:?}", scheme.name());
        assert!(outcome.undone_steps > 50, "{}: {outcome:?}", scheme.name());
    }
}

/// 2 nodes hold 4 experts each, whose state is 20 MB, and 50 MB that both train. A snapshot is kept in two versions.
#[test]
fn copies_need_room_in_host_memory() {
    let all = 2 * (16 * 20_000_000 + 50_000_000); // of `gemini` and `baft`, on each of 2 nodes: its own and the other's
    let replayed = 8 * (20_000_000 + 12 * 4_000_000); // of `moetion`, without its own snapshots
    for (name, room, undone, missing) in [
        (PresetName::Gemini, all, 1, false),
        (PresetName::Gemini, all - 1, 15, true),
        (PresetName::Gemini, 0, 15, true),
        (PresetName::Baft, all, 1, false),
        (PresetName::Baft, all - 1, 15, true),
        (PresetName::Baft, 0, 15, true),
        (PresetName::Moetion, 1 << 40, 0, false),
        (PresetName::Moetion, replayed - 1, 15, true),
        (PresetName::Moetion, 0, 15, true),
        (PresetName::Auto, 1 << 40, 0, false),
        (PresetName::Auto, 0, 15, true),
        (PresetName::Lazarus, 0, 15, true), // snapshots in own memory
    ] {
        let mut scenario = scenario();
        (scenario.cluster.nodes, scenario.cluster.spares, scenario.cluster.host_bytes) = (2, 2, room);
        scenario.session.slots = Some(4); // no expert is on both nodes
        scenario.session.min_replicas = Some(1);
        scenario.session.checkpoint_interval = 20;
        scenario.session.snapshot_interval = Some(1);
        scenario.costs.store_write_bytes_per_second = 1e12;
        scenario.failures = vec![Source::Steps { losses: vec![(55, vec![1])] }];
        scenario.steps = Some(60);
        let outcome = run(&scenario, &preset(name), 1);
        let case = format!("{} with {room} bytes: {outcome:?}", name.name());
        assert_eq!(outcome.steps, 60, "{case}");
        assert_eq!(outcome.missing_copy_bytes > 0, missing, "{case}");
        assert_eq!(outcome.checkpoint_loads, u64::from(undone > 1), "{case}");
        assert_eq!(outcome.undone_steps, undone, "{case}");
    }
}

#[test]
fn the_end_of_all_nodes_takes_a_job_back_to_its_checkpoint() {
    let mut scenario = scenario();
    let all: Vec<usize> = (0..12).collect();
    let events = vec![(0.0, true, all.clone()), (HOUR, false, all.clone()), (2.0 * HOUR, true, all)];
    scenario.failures = vec![Source::Trace { events }];
    scenario.seconds = 3.0 * HOUR;
    for scheme in &[PresetName::Auto, PresetName::Gemini, PresetName::Baft, PresetName::Lazarus].map(preset) {
        let outcome = run(&scenario, scheme, 1);
        assert_eq!(outcome.checkpoint_loads, 1, "{}", scheme.name());
        assert!((1..=60).contains(&outcome.undone_steps), "{}: {}", scheme.name(), outcome.undone_steps);
        let waited = outcome.nanoseconds["wait"] as f64 * 1e-9;
        assert!((3000.0..3700.0).contains(&waited), "{}: {waited}", scheme.name());
        let without = Scenario {
            session: SessionChoices { checkpoint_interval: 0, ..scenario.session.clone() },
            ..scenario.clone()
        };
        let outcome = run(&without, scheme, 1);
        assert!(outcome.undone_steps > 100 && outcome.checkpoint_loads == 0, "{}", scheme.name());
    }
}

#[test]
fn a_store_that_all_nodes_share_is_read_at_its_own_rate() {
    let mut scenario = scenario();
    scenario.cluster.spares = 1;
    scenario.failures = vec![Source::Steps { losses: vec![(60, vec![3])] }];
    scenario.steps = Some(80);
    let fetch = |all: Option<f64>| {
        let mut shared = scenario.clone();
        shared.costs.store_bytes_per_second = all;
        run(&shared, &restart(false), 1).nanoseconds["fetch"]
    };
    let own = fetch(None);
    assert!(own > 0);
    assert_eq!(fetch(Some(12e9)), own);
    assert!(fetch(Some(6e9)).abs_diff(2 * own) <= 1, "but for a rounded nanosecond");
}
