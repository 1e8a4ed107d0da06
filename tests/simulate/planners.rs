//! The planners decide: other planners lead to other outcomes, and their inputs are those of a session.

use super::*;
use evermoe::Result;
use evermoe::dispatch::LoadAverage;
use evermoe::placement::{self, Placement, Policy};
use evermoe::selection::{self, Selection, TokenLedger};
use evermoe::simulate::Planners;
use std::cell::{Cell, RefCell};

/// Counts calls, and places by another policy.
struct Swapped {
    calls: Cell<usize>,
}

impl Planners for Swapped {
    fn place(&self, request: &placement::Request<'_>) -> Result<Placement> {
        self.calls.set(self.calls.get() + 1);
        placement::place(&placement::Request { policy: Policy::Compact, ..*request })
    }
}

#[test]
fn another_planner_decides_otherwise() {
    let swapped = Swapped { calls: Cell::new(0) };
    let scenario = scenario();
    let other = simulate(&scenario, &auto(), 1, &swapped, &mut |_| Ok(())).unwrap();
    let own = run(&scenario, &auto(), 1);
    assert!(swapped.calls.get() > own.losses as usize);
    assert!(other.first_bytes + other.recovery_bytes != own.first_bytes + own.recovery_bytes);
    assert!(other.copy_bytes > own.copy_bytes, "compact placements leave more to copy");
}

/// Records the tokens and the choices of the first calls.
#[derive(Default)]
struct Recorded {
    budgets: RefCell<Vec<(Vec<i64>, Selection)>>,
    saves: RefCell<Vec<Selection>>,
}

impl Planners for Recorded {
    fn budget(&self, tokens: &[i64], shape: [usize; 2], capacity: u64) -> Result<Selection> {
        let chosen = selection::budget(tokens, shape, capacity)?;
        self.budgets.borrow_mut().push((tokens.to_vec(), chosen.clone()));
        Ok(chosen)
    }

    fn load_aware(&self, ledger: &TokenLedger, ranks: &[i64]) -> Result<Selection> {
        let chosen = Product.load_aware(ledger, ranks)?;
        self.saves.borrow_mut().push(chosen.clone());
        Ok(chosen)
    }
}

/// As `evermoe.copies.selection` chooses before a step: tokens since the last copy, and those that a step has on average.
#[test]
fn moetion_chooses_before_a_step_by_average_tokens() {
    let counts: [[i64; 4]; 4] =
        [[700, 200, 90, 10], [100, 300, 200, 400], [400, 100, 400, 100], [10, 90, 200, 700]];
    for capacity in 1..=4 {
        let mut scenario = scenario();
        scenario.cluster.nodes = 4;
        (scenario.model.experts, scenario.model.classes, scenario.model.layers) = (4, 1, 1);
        scenario.model.tokens_per_step = 1000;
        scenario.load.trace =
            (0..).zip(counts).map(|(step, row)| (step, row.map(|n| n as f64).to_vec())).collect();
        scenario.session.slots = Some(1); // no expert has a second node
        scenario.session.min_replicas = Some(1);
        scenario.session.rebalance_interval = 0;
        scenario.session.remote_bytes_per_step = Some(capacity * scenario.model.expert_state_bytes);
        scenario.failures.clear();
        scenario.steps = Some(4);
        let recorded = Recorded::default();
        simulate(&scenario, &preset(PresetName::Moetion), 1, &recorded, &mut |_| Ok(())).unwrap();
        let found = recorded.budgets.into_inner();
        assert_eq!(found.len(), 4, "once for each step");
        let mut average = LoadAverage::new(1, 4, 7.0).unwrap();
        let mut at_risk = [0; 4];
        for ((tokens, chosen), counts) in found.iter().zip(counts) {
            let expected = average.loads().into_iter().map(|mean| (mean.round_ties_even() as i64).max(1));
            let wanted: Vec<i64> =
                at_risk.iter().zip(expected).map(|(risk, expected)| risk + expected).collect();
            assert_eq!(*tokens, wanted, "capacity {capacity}");
            at_risk.iter_mut().zip(counts).for_each(|(risk, count)| *risk += count);
            chosen[0].iter().for_each(|&expert| at_risk[expert] = 0);
            average.add(&counts).unwrap();
        }
    }
}

#[test]
fn pec_saves_its_experts_of_each_layer() {
    for each in 1..=3 {
        let mut scenario = scenario();
        scenario.session.experts_per_save = Some(each);
        scenario.load.drift = 0.3;
        scenario.steps = Some(60);
        let recorded = Recorded::default();
        simulate(&scenario, &preset(PresetName::Pec), 1, &recorded, &mut |_| Ok(())).unwrap();
        let saves = recorded.saves.into_inner();
        assert!(saves.len() > 20);
        for chosen in saves {
            assert!(chosen.len() == 2 && chosen.iter().all(|row| row.len() == each), "{each}: {chosen:?}");
        }
    }
}
