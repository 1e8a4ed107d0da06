//! `balanced` and the other policies: none is better in one of evenness and survival and not worse in the other.

use evermoe::placement::{Policy, Request, allocate, place};
use proptest::prelude::*;

/// The qualities of a placement, found by enumeration.
#[derive(Debug)]
struct Worth {
    imbalance: f64,
    /// Number of sets of failed nodes that leave every expert a replica, by their size.
    survived: Vec<usize>,
    /// (node, expert) pairs.
    pairs: usize,
}

fn request<'a>(
    replicas: &'a [i64],
    nodes: usize,
    slots: usize,
    load: &'a [f64],
    policy: Policy,
) -> Request<'a> {
    Request {
        replicas,
        nodes,
        slots,
        policy,
        load: Some(load),
        previous: None,
        domains: None,
        failures: None,
    }
}

fn worth(matrix: &[i64], nodes: usize, replicas: &[i64], load: &[f64]) -> Worth {
    let experts = replicas.len();
    let row = |node: usize| &matrix[node * experts..][..experts];
    let borne = |node: usize| -> f64 {
        (0..experts).map(|expert| row(node)[expert] as f64 * load[expert] / replicas[expert] as f64).sum()
    };
    let (busiest, total) = ((0..nodes).map(borne).fold(0.0, f64::max), load.iter().sum::<f64>());
    let mut survived = vec![0; nodes + 1];
    for lost in 0_u32..1 << nodes {
        let lives = |node: &usize| lost >> node & 1 == 0;
        let kept = (0..experts).all(|expert| (0..nodes).any(|node| row(node)[expert] > 0 && lives(&node)));
        survived[lost.count_ones() as usize] += usize::from(kept);
    }
    let pairs = matrix.iter().filter(|&&count| count > 0).count();
    Worth { imbalance: if total > 0.0 { busiest * nodes as f64 / total } else { 1.0 }, survived, pairs }
}

/// Fails where another policy has a better placement than `balanced` at its number of failures, or one at one more that
/// has each expert on as many nodes.
fn check(replicas: &[i64], nodes: usize, slots: usize, load: &[f64], failures: Option<usize>) {
    let with = |policy, failures| {
        place(&Request { failures, ..request(replicas, nodes, slots, load, policy) }).unwrap()
    };
    let balanced = with(Policy::Balanced, failures);
    let own = worth(&balanced.matrix, nodes, replicas, load);
    let failures = balanced.reason.failures;
    assert!((balanced.reason.imbalance - own.imbalance).abs() < 1e-9, "{}", balanced.reason);
    let others = [Policy::Mro, Policy::Spread, Policy::Compact, Policy::Safest];
    for (policy, weighed) in
        others.map(|policy| (policy, Some(failures))).into_iter().chain([(Policy::Safest, None)])
    {
        let placement = with(policy, weighed);
        let other = worth(&placement.matrix, nodes, replicas, load);
        let as_wide = placement.reason.spread >= balanced.reason.spread;
        let setting = || {
            format!("{replicas:?} {load:?} {nodes} × {slots}, {failures} lost, {policy:?}: {own:?} {other:?}")
        };
        let (even, more_even) =
            (other.imbalance <= own.imbalance + 1e-9, other.imbalance < own.imbalance - 1e-6);
        for lost in failures..=(failures + 1).min(nodes) {
            let (safe, safer) =
                (other.survived[lost] >= own.survived[lost], other.survived[lost] > own.survived[lost]);
            // At one loss more a placement that has an expert on fewer nodes is no rival.
            let is_rival = as_wide || lost == failures;
            assert!(!(is_rival && more_even && safer), "worse on both counts: {}", setting());
            let dominates = as_wide
                && lost == failures
                && even
                && safe
                && (more_even || safer && other.pairs >= own.pairs);
            assert!(!dominates, "dominated: {}", setting());
        }
    }
}

#[test]
fn named_cases() {
    check(&[4, 4, 7, 5, 6, 5, 4], 7, 5, &[134.0, 333.0, 476.0, 385.0, 785.0, 390.0, 698.0], None);
    check(&[1, 6, 1, 3, 1], 6, 2, &[350.0, 987.0, 273.0, 502.0, 159.0], None);
    check(&[4, 2, 2, 6], 7, 2, &[751.0, 33.0, 402.0, 970.0], None);
    check(&[3, 1, 1, 1], 3, 2, &[528.0, 129.0, 523.0, 514.0], None);
    check(&[4, 5, 4, 4, 4, 7], 7, 4, &[5.0, 7.0, 6.0, 2.0, 502.0, 91.0], None);
}

#[test]
fn a_survival_of_one_half_is_not_hopeless() {
    // Half of the nodes hold the only replica of an expert: half of all losses of one node are survived.
    for nodes in [4, 6, 10] {
        let replicas: Vec<i64> = vec![1; nodes / 2].into_iter().chain([nodes as i64 / 2]).collect();
        let load: Vec<f64> = (1..=replicas.len()).map(|load| load as f64).collect();
        let failures = Some(1);
        let with = |policy| {
            place(&Request { failures, ..request(&replicas, nodes, 1, &load, policy) })
                .unwrap()
                .reason
                .survival
        };
        assert_eq!((with(Policy::Mro), with(Policy::Balanced)), (0.5, 0.5), "{nodes}");
    }
}

#[test]
fn a_hot_expert_has_several_replicas_on_a_node() {
    // Lazarus' own setting (§6.5): 8 experts, 10 nodes × 6 slots, f = 2; one expert has four times the mean load.
    let load = [1.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0];
    let replicas = allocate(&load, 10, 6, 2).unwrap();
    assert_eq!(replicas, [4, 4, 4, 32, 4, 4, 4, 4]);
    for (policy, lost) in [(Policy::Mro, 5), (Policy::Safest, 5), (Policy::Balanced, 4)] {
        let placement = place(&request(&replicas, 10, 6, &load, policy)).unwrap();
        let found = worth(&placement.matrix, 10, &replicas, &load);
        assert!((placement.reason.imbalance - found.imbalance).abs() < 1e-9);
        assert!(found.imbalance < 1.08, "{policy:?}: {}", placement.reason);
        let all = if lost == 5 { 252 } else { 210 };
        assert!(found.survived[lost] * 100 >= 95 * all, "{policy:?}: {found:?}");
    }
    check(&replicas, 10, 6, &load, None);
}

prop_compose! {
    /// Nodes, slots, replicas that fill them, loads and failures.
    fn setting()(nodes in 2_usize..8, slots in 1_usize..5)(
        nodes in Just(nodes),
        slots in Just(slots),
        owners in prop::collection::vec(0..nodes * slots, nodes * slots),
        experts in 1..=(nodes * slots).min(12),
        load in prop::collection::vec(prop_oneof![0..9_u32, 0..1000_u32], 12),
        failures in prop_oneof![2 => Just(None), 1 => (1..=nodes).prop_map(Some)],
        by_load in any::<bool>(),
    ) -> (usize, usize, Vec<i64>, Vec<f64>, Option<usize>) {
        let load: Vec<f64> = load[..experts].iter().map(|&load| f64::from(load)).collect();
        let mut replicas = vec![1; experts];
        owners[experts..].iter().for_each(|owner| replicas[owner % experts] += 1);
        let replicas = if by_load { allocate(&load, nodes, slots, 2).unwrap() } else { replicas };
        (nodes, slots, replicas, load, failures)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn no_policy_beats_balanced((nodes, slots, replicas, load, failures) in setting()) {
        check(&replicas, nodes, slots, &load, failures);
    }
}
