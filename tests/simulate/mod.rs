//! Simulated jobs: properties of all of them, cases with a closed form, and that the planners decide.

mod forecast;
mod planners;
mod refusals;
mod storage;

use evermoe::protection::PresetName;
use evermoe::simulate::{
    Cluster, Costs, Dense, Load, Model, Outcome, Product, RestartChoices, Scenario, Scheme, SessionChoices,
    Source, simulate,
};

const HOUR: f64 = 3600.0;

fn scenario() -> Scenario {
    Scenario {
        cluster: Cluster {
            nodes: 12,
            spares: 0,
            devices: 1,
            nodes_per_rack: 0,
            network_latency_seconds: 50e-6,
            network_bytes_per_second: 1e9,
            host_bytes: 1 << 40,
        },
        costs: Costs {
            detect_seconds: 5.0,
            agree_seconds: 1.0,
            rebuild_seconds: 4.0,
            rebuild_seconds_per_node: 0.0,
            survey_seconds: 1.0,
            digest_bytes_per_second: 1e10,
            capture_bytes_per_second: 1e10,
            store_write_bytes_per_second: 1e9,
            store_read_bytes_per_second: 1e9,
            store_bytes_per_second: None,
            persist_seconds: 0.0,
            start_seconds: 20.0,
        },
        model: Model {
            layers: 4,
            classes: 2,
            experts: 8,
            expert_state_bytes: 10_000_000,
            expert_gradient_bytes: 2_000_000,
            dense_modules: vec![50_000_000],
            dense_weight_bytes: 10_000_000,
            tokens_per_step: 100_000,
            step_seconds: 10.0,
            scaling: 1.0,
            expert_share: 0.5,
            network_idle: 0.5,
            replayable: true,
        },
        load: Load { zipf: 1.0, drift: 0.05, drift_interval: 10, trace: Vec::new() },
        session: SessionChoices {
            slots: None,
            most_slots: None,
            min_replicas: None,
            dense: Dense::Replicated,
            copies: 2,
            copy_budget: 0.01,
            snapshot_interval: None,
            experts_per_snapshot: None,
            join_interval: 1,
            rebalance_interval: 100,
            rejoin_timeout: 30.0,
            checkpoint_interval: 50,
            replay_log_bytes: 1 << 30,
            experts_per_save: None,
            save_interval: 1,
            max_lost_token_fraction: 1.0,
            remote_bytes_per_step: None,
            replans: true,
        },
        failures: vec![Source::Poisson { mtbf_seconds: 1200.0, repair_seconds: Some(600.0) }],
        seconds: 48.0 * HOUR,
        steps: None,
    }
}

fn preset(name: PresetName) -> Scheme {
    Scheme::Preset { name }
}

fn auto() -> Scheme {
    preset(PresetName::Auto)
}

fn restart(drops_groups: bool) -> Scheme {
    Scheme::Restart(RestartChoices {
        name: if drops_groups { "restart-groups" } else { "restart" }.into(),
        expert_parallel: 2,
        drops_groups,
        checkpoint_interval: 50,
        join_seconds: 120.0,
    })
}

fn schemes() -> Vec<Scheme> {
    let presets = PresetName::ALL.map(preset);
    presets.into_iter().chain([restart(false), restart(true)]).collect()
}

fn run(scenario: &Scenario, scheme: &Scheme, seed: u64) -> Outcome {
    simulate(scenario, scheme, seed, &Product, &mut |_| Ok(())).unwrap()
}

/// Failures of all kinds at once.
fn troubled() -> Scenario {
    let mut scenario = scenario();
    scenario.cluster.spares = 2;
    scenario.failures.extend([
        Source::Racks { nodes_per_rack: 3, mtbf_seconds: 6.0 * HOUR, repair_seconds: Some(HOUR) },
        Source::Maintenance { every_seconds: 5.0 * HOUR, nodes: 2, seconds: 900.0 },
        Source::Stragglers { mtbf_seconds: 2.0 * HOUR, factor: 1.5, seconds: 600.0 },
    ]);
    scenario
}

#[test]
fn causes_add_up_to_the_total_and_a_seed_repeats() {
    for scheme in schemes() {
        for scenario in [scenario(), troubled()] {
            let scenario = Scenario { seconds: 16.0 * HOUR, ..scenario };
            let outcome = run(&scenario, &scheme, 3);
            let spent: u64 = outcome.nanoseconds.values().sum();
            assert_eq!(
                spent,
                (scenario.seconds * 1e9) as u64,
                "{}: {:?}",
                scheme.name(),
                outcome.nanoseconds
            );
            assert!(outcome.losses > 15 && outcome.steps > 500, "{}: {outcome:?}", scheme.name());
            assert_eq!(outcome, run(&scenario, &scheme, 3), "{}", scheme.name());
            assert_ne!(outcome.steps, run(&scenario, &scheme, 4).steps, "{}", scheme.name());
        }
    }
}

#[test]
fn steps_that_count_took_the_time_that_counts() {
    for scheme in schemes() {
        let mut scenario = scenario();
        (scenario.load.zipf, scenario.load.drift) = (0.0, 0.0);
        scenario.session.slots = Some(8); // every node has every expert: an even load, regardless of the number of nodes
        scenario.cluster.spares = 6;
        let outcome = run(&scenario, &scheme, 1);
        let trained = outcome.nanoseconds["train"] as f64 * 1e-9;
        let (fewest, most) = (outcome.steps as f64 * 10.0, outcome.steps as f64 * 20.0);
        assert!(
            (fewest - 1e-3..=most).contains(&trained),
            "{}: {trained} s, {}",
            scheme.name(),
            outcome.steps
        );
    }
}

#[test]
fn more_failures_leave_less_time_for_training() {
    for scheme in schemes() {
        let mean = |mtbf_seconds: f64| {
            let failures = vec![Source::Poisson { mtbf_seconds, repair_seconds: Some(600.0) }];
            let scenario = Scenario { failures, seconds: 16.0 * HOUR, ..scenario() };
            (0..3).map(|seed| run(&scenario, &scheme, seed).ettr).sum::<f64>() / 3.0
        };
        let found = [300.0, 1200.0, 7200.0, 1e9].map(mean);
        assert!(found.is_sorted(), "{}: {found:?}", scheme.name());
        assert!(found[3] > 0.98, "{}: {found:?}", scheme.name());
    }
}

/// Losses are a Poisson process of rate r, and each costs c; a loss during that time costs c again; a step takes s. Of
/// an exponential time between two losses complete steps are s ÷ (exp(r·s) − 1), and a recovery takes (exp(r·c) − 1) ÷
/// r. So the share that counts is r·s ÷ (exp(r·s) − 1) · exp(−r·c).
#[test]
fn a_fixed_cost_of_each_loss_has_a_closed_form() {
    let (mtbf, cost, step) = (600.0, 11.0, 10.0);
    let mut scenario = scenario();
    scenario.cluster.nodes = 32;
    scenario.cluster.spares = 32;
    scenario.cluster.network_bytes_per_second = 1e18;
    scenario.cluster.network_latency_seconds = 0.0;
    scenario.costs.digest_bytes_per_second = 1e18;
    scenario.costs.start_seconds = 0.0;
    (scenario.load.zipf, scenario.load.drift) = (0.0, 0.0);
    scenario.session.checkpoint_interval = 0;
    scenario.failures = vec![Source::Poisson { mtbf_seconds: mtbf, repair_seconds: Some(1.0) }];
    let found: Vec<f64> = (0..12).map(|seed| run(&scenario, &auto(), seed).ettr).collect();
    let mean = found.iter().sum::<f64>() / found.len() as f64;
    let variance = found.iter().map(|each| (each - mean).powi(2)).sum::<f64>() / (found.len() - 1) as f64;
    let half = 3.1 * (variance / found.len() as f64).sqrt(); // Student's t at 99 %, 11 degrees of freedom
    let expected = step / mtbf / (step / mtbf).exp_m1() * (-cost / mtbf).exp();
    assert!((mean - expected).abs() < half, "expected {expected}, found {mean} ± {half}");
    assert!(half < 0.01, "{half}");
}

#[test]
fn copies_of_each_step_lose_none_where_nodes_fail_one_by_one() {
    let mut scenario = scenario();
    scenario.failures = vec![Source::Poisson { mtbf_seconds: 3.0 * HOUR, repair_seconds: Some(600.0) }];
    let outcome = run(&scenario, &auto(), 5);
    assert!(outcome.losses > 5);
    assert_eq!((outcome.undone_steps, outcome.checkpoint_loads, outcome.lost_tokens), (0, 0, 0.0));
    assert!(outcome.interrupted_steps <= outcome.losses);
    let gemini = run(&scenario, &preset(PresetName::Gemini), 5);
    assert!(gemini.undone_steps <= gemini.losses, "one step for each loss at most: {}", gemini.undone_steps);
    assert!(gemini.copy_bytes > outcome.copy_bytes);
}

/// Over 3 steps from the first on, versions 1, 4, 7 are complete when 4, 7, 10 steps are taken; before that, the start
/// is.
#[test]
fn a_loss_goes_back_to_the_newest_version_that_is_whole() {
    let mut scenario = scenario();
    scenario.cluster.nodes = 8;
    scenario.session.slots = Some(1); // no expert has a second node
    scenario.session.checkpoint_interval = 0;
    scenario.steps = Some(20);
    for (steps, undone) in [(1, [0, 1, 1, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 3, 4, 5])] {
        scenario.session.snapshot_interval = Some(steps);
        for (step, undone) in undone.into_iter().enumerate() {
            scenario.failures = vec![Source::Steps { losses: vec![(step as u64, vec![3])] }];
            for scheme in &[PresetName::Gemini, PresetName::Baft].map(preset) {
                let outcome = run(&scenario, scheme, 1);
                assert_eq!(outcome.undone_steps, undone, "{}: step {step} of {steps}", scheme.name());
                assert_eq!(outcome.steps, 20);
            }
        }
    }
}

#[test]
fn versions_take_as_many_steps_as_delay_none() {
    let mut scenario = scenario();
    scenario.cluster.network_bytes_per_second = 5e6; // more seconds of copies than the 5 that steps leave free
    let gemini = run(&scenario, &preset(PresetName::Gemini), 1);
    assert_eq!(gemini.nanoseconds["copy"], 0);
    scenario.session.snapshot_interval = Some(1);
    let each_step = run(&scenario, &preset(PresetName::Gemini), 1);
    assert!(each_step.nanoseconds["copy"] > gemini.nanoseconds["train"] / 10);
    assert!(each_step.undone_steps < gemini.undone_steps && each_step.ettr < gemini.ettr);
}

#[test]
fn presets_that_may_lose_tokens_say_how_many() {
    let mut scenario = scenario();
    scenario.session.slots = Some(2); // too few for two replicas of each
    scenario.cluster.nodes = 8;
    scenario.session.remote_bytes_per_step = Some(40_000_000); // an eighth of the experts
    for scheme in &[PresetName::Pec, PresetName::Moetion].map(preset) {
        let outcome = run(&scenario, scheme, 2);
        assert!(outcome.lost_tokens > 0.0 && outcome.plt > 0.0 && outcome.plt < 1.0, "{outcome:?}");
    }
}

#[test]
fn a_job_ends_after_its_steps() {
    for scheme in schemes() {
        let outcome = run(&Scenario { steps: Some(500), ..scenario() }, &scheme, 1);
        assert_eq!(outcome.steps, 500, "{}", scheme.name());
        let spent: u64 = outcome.nanoseconds.values().sum();
        assert!(spent < 48 * 3600 * 1_000_000_000 && (spent as f64 * 1e-9 - outcome.seconds).abs() < 1e-6);
    }
}

#[test]
fn members_with_notice_lose_no_step() {
    let mut scenario = scenario();
    scenario.failures = vec![Source::Maintenance { every_seconds: HOUR, nodes: 1, seconds: 600.0 }];
    let outcome = run(&scenario, &auto(), 1);
    assert_eq!((outcome.losses, outcome.interrupted_steps, outcome.undone_steps), (0, 0, 0));
    assert!(outcome.recoveries > 47 * 2 - 2, "{}", outcome.recoveries);
}

#[test]
fn members_whose_maintenance_is_over_before_they_went_stay() {
    let mut scenario = scenario();
    scenario.cluster.nodes = 8;
    scenario.costs.start_seconds = 0.0;
    scenario.model.step_seconds = 100.0;
    scenario.failures = vec![Source::Maintenance { every_seconds: 630.0, nodes: 1, seconds: 1.0 }];
    let outcome = run(&scenario, &auto(), 1);
    assert_eq!((outcome.losses, outcome.fewest_members), (0, 8));
}

#[test]
fn only_losses_interrupt_steps() {
    let mut scenario = scenario();
    scenario.failures = vec![Source::Stragglers { mtbf_seconds: HOUR, factor: 3.0, seconds: 1800.0 }];
    for end in 0..8 {
        scenario.seconds = HOUR + f64::from(end) * 13.7;
        for scheme in schemes() {
            let outcome = run(&scenario, &scheme, 1);
            assert_eq!((outcome.interrupted_steps, outcome.undone_steps), (0, 0), "{}", scheme.name());
        }
    }
}

#[test]
fn nobody_recovers_when_a_notice_comes_with_the_last_step() {
    let mut scenario = scenario();
    scenario.costs.start_seconds = 0.0;
    scenario.costs.rebuild_seconds = 0.0;
    scenario.failures = vec![Source::Maintenance { every_seconds: 45.0, nodes: 1, seconds: 600.0 }];
    scenario.steps = Some(5);
    scenario.model.expert_share = 0.0;
    for scheme in [restart(false), restart(true), auto()] {
        let outcome = run(&scenario, &scheme, 1);
        assert_eq!(outcome.steps, 5, "{}", scheme.name());
        assert!(outcome.happened.iter().all(|event| event.step < 5), "{}: {outcome:?}", scheme.name());
    }
}

#[test]
fn taking_over_moves_less_than_planning_anew() {
    let mut scenario = scenario();
    scenario.cluster.spares = 6;
    let replanned = run(&scenario, &auto(), 1);
    scenario.session.replans = false;
    let taken_over = run(&scenario, &auto(), 1);
    assert!(taken_over.recovery_bytes <= replanned.recovery_bytes);
    assert!((taken_over.ettr - replanned.ettr).abs() < 0.05, "{} {}", taken_over.ettr, replanned.ettr);
}

#[test]
fn progress_grows_and_its_error_ends_the_simulation() {
    let mut told = Vec::new();
    simulate(&scenario(), &auto(), 1, &Product, &mut |part| {
        told.push(part);
        Ok(())
    })
    .unwrap();
    assert!(told.is_sorted() && told.len() > 5 && told.iter().all(|part| (0.0..=1.0).contains(part)));
    let stop = || Err(evermoe::Error::cancelled("the simulation", "enough"));
    let error = simulate(&scenario(), &auto(), 1, &Product, &mut |_| stop()).unwrap_err();
    assert_eq!(error.to_string(), "the simulation was cancelled: enough");
}
