//! Invalid scenarios and traces are refused.

use super::*;
use evermoe::simulate::{read_bamboo, read_skypilot};

#[test]
fn what_is_none_is_refused_with_its_name() {
    let message = |change: &dyn Fn(&mut Scenario)| {
        let mut scenario = scenario();
        change(&mut scenario);
        simulate(&scenario, &auto(), 1, &Product, &mut |_| Ok(())).unwrap_err().to_string()
    };
    assert!(message(&|s| s.cluster.nodes = 0).starts_with("cluster.nodes: expected 1 or more"));
    assert!(message(&|s| s.model.step_seconds = f64::NAN).starts_with("model.step_seconds: expected"));
    assert!(message(&|s| s.costs.digest_bytes_per_second = 0.0).contains("above 0, got 0"));
    assert!(message(&|s| s.session.most_slots = Some(0)).starts_with("session.most_slots"));
    assert!(message(&|s| s.load.drift_interval = 0).starts_with("load.drift_interval"));
    assert!(message(&|s| s.load.trace = vec![(0, vec![1.0])]).contains("expected 16 numbers"));
    assert!(
        message(&|s| s.failures = vec![Source::Poisson { mtbf_seconds: 0.0, repair_seconds: None }])
            .starts_with("mtbf")
    );
    let trace = Source::Trace { events: vec![(0.0, true, vec![99])] };
    assert!(
        message(&|s| s.failures = vec![trace.clone()])
            .contains("expected nodes below 12, spares included, got 99")
    );
    let Scheme::Restart(choices) = restart(false) else { unreachable!() };
    let scheme = Scheme::Restart(RestartChoices { expert_parallel: 13, ..choices });
    let error = simulate(&scenario(), &scheme, 1, &Product, &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("expert_parallel: expected 1 to 12 nodes, got 13"));
}

#[test]
fn traces_that_are_none_are_refused_with_the_line() {
    for (text, expected) in [
        ("", "got none"),
        ("0,add", "line 1: expected milliseconds,add|remove,node"),
        (
            "0,add,a\n0,add,a",
            "line 2: expected milliseconds,add|remove,node, got \"0,add,a\": the node is present",
        ),
        ("0,remove,a", "the node is not present"),
        ("5,add,a\n4,add,b", "expected ascending times, got 4 ms after 5 ms"),
        ("0,moved,a", "line 1"),
        ("-1,add,a", "line 1"),
    ] {
        let message = read_bamboo(text).unwrap_err().to_string();
        assert!(message.contains(expected), "{text:?}: {message}");
    }
    for text in [
        "[]",
        "{\"metadata\": {\"gap_seconds\": 0}, \"data\": []}",
        "{\"metadata\": {\"gap_seconds\": 1}, \"data\": [2]}",
    ] {
        assert!(read_skypilot(&[text]).unwrap_err().to_string().starts_with("file 0: "), "{text}");
    }
}
