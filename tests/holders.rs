//! Holders of copies, and the losses that they survive: properties for all inputs, and exhaustive tests of small sizes.

use evermoe::placement::{
    CopyPolicy, copy_holders, copy_recovery_probability, primaries, training_copy_holders,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const POLICIES: [CopyPolicy; 4] =
    [CopyPolicy::Mixed, CopyPolicy::Group, CopyPolicy::Ring, CopyPolicy::Previous];

fn names(nodes: usize) -> Vec<String> {
    (0..nodes).map(|node| format!("node{node:05}")).collect()
}

fn distinct<T: Ord>(items: impl IntoIterator<Item = T>) -> usize {
    items.into_iter().collect::<BTreeSet<_>>().len()
}

fn survived(holders: &[Vec<usize>], failures: usize) -> f64 {
    let found = copy_recovery_probability::<&str>(holders, failures, None, None, 0).unwrap();
    assert_eq!(found.samples, None);
    found.probability
}

fn choose(n: usize, k: usize) -> f64 {
    if k > n { 0.0 } else { (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product() }
}

#[test]
fn gemini_groups_and_ring() {
    // 7 = one group of 3 and a ring of 4.
    let holders = copy_holders(&names(7), 3, CopyPolicy::Mixed).unwrap();
    assert_eq!(holders[..3], [vec![0, 1, 2], vec![1, 2, 0], vec![2, 0, 1]]);
    assert_eq!(holders[3..], [vec![3, 4, 5], vec![4, 5, 6], vec![5, 6, 3], vec![6, 3, 4]]);
}

#[test]
fn groups_are_mixed_where_they_divide_and_refused_elsewhere() {
    for nodes in 1..13 {
        for copies in 1..6 {
            let group = copy_holders(&names(nodes), copies, CopyPolicy::Group);
            if nodes % copies == 0 {
                assert_eq!(group.unwrap(), copy_holders(&names(nodes), copies, CopyPolicy::Mixed).unwrap());
            } else {
                let message = group.unwrap_err().to_string();
                let expected =
                    format!("copies: groups of {copies} do not divide {nodes} nodes; use the mixed");
                assert!(message.starts_with(&expected), "{message}");
            }
        }
    }
}

#[test]
fn a_single_node_copies_between_its_ranks() {
    for policy in [CopyPolicy::Mixed, CopyPolicy::Ring] {
        assert_eq!(copy_holders(&["a"; 3], 2, policy).unwrap(), [vec![0, 1], vec![1, 2], vec![2, 0]]);
        assert_eq!(copy_holders(&["a"], 3, policy).unwrap(), [vec![0]]);
        assert!(copy_holders::<&str>(&[], 2, policy).unwrap().is_empty());
        assert!(copy_holders(&["a"], 0, policy).unwrap_err().to_string().starts_with("copies"));
    }
}

#[test]
fn fewer_nodes_than_copies_use_all_nodes() {
    assert_eq!(copy_holders(&["b", "a"], 3, CopyPolicy::Mixed).unwrap(), [vec![0, 1], vec![1, 0]]);
    assert_eq!(copy_holders(&["b", "a"], usize::MAX, CopyPolicy::Ring).unwrap(), [vec![0, 1], vec![1, 0]]);
}

#[test]
fn nodes_of_different_sizes_pair_by_position() {
    let holders = copy_holders(&["a", "a", "b"], 2, CopyPolicy::Mixed).unwrap();
    assert_eq!(holders, [vec![0, 2], vec![1, 2], vec![2, 0]]);
}

#[test]
fn policies_have_names() {
    assert_eq!(
        ["mixed", "group", "ring", "previous"].map(|name| name.parse::<CopyPolicy>().unwrap()),
        POLICIES
    );
    let message = "moon".parse::<CopyPolicy>().unwrap_err().to_string();
    assert_eq!(message, "policy: expected \"mixed\", \"group\", \"ring\" or \"previous\", got \"moon\"");
}

#[test]
fn survival_of_every_policy_matches_enumeration() {
    for nodes in 1..=12_usize {
        for copies in 1..=4 {
            for policy in POLICIES {
                let Ok(holders) = copy_holders(&names(nodes), copies, policy) else {
                    continue;
                };
                for failures in 0..=nodes {
                    let choices =
                        (0..1_u32 << nodes).filter(|failed| failed.count_ones() as usize == failures);
                    let lost = |failed: &u32| {
                        holders.iter().any(|ranks| ranks.iter().all(|rank| failed >> rank & 1 == 1))
                    };
                    let all = choices.clone().count() as f64;
                    let expected = 1.0 - choices.filter(lost).count() as f64 / all;
                    let found = survived(&holders, failures);
                    assert!((found - expected).abs() < 1e-12, "{nodes} {copies} {policy:?} {failures}");
                }
            }
        }
    }
}

#[test]
fn groups_survive_by_the_closed_form_and_the_corollary_is_a_lower_bound() {
    for (nodes, copies) in [(12, 2), (12, 3), (16, 2), (24, 4), (32, 2)] {
        let holders = copy_holders(&names(nodes), copies, CopyPolicy::Group).unwrap();
        let groups = nodes / copies;
        let mut strictly_below = 0;
        for failures in 0..nodes {
            let term = |lost: usize| {
                let sign = if lost.is_multiple_of(2) { 1.0 } else { -1.0 };
                sign * choose(groups, lost) * choose(nodes - lost * copies, failures - lost * copies)
            };
            let closed = (0..=failures / copies).map(term).sum::<f64>() / choose(nodes, failures);
            // Corollary 1 stops after the first term: a union bound, exact while only one group can be lost.
            let after_first = if failures < copies { 0.0 } else { choose(nodes - copies, failures - copies) };
            let corollary = (1.0 - groups as f64 * after_first / choose(nodes, failures)).max(0.0);
            let found = survived(&holders, failures);
            assert!(
                (found - closed).abs() < 1e-10,
                "{nodes} {copies} {failures}: {found}, expected {closed}"
            );
            assert!(found > corollary - 1e-10);
            assert!(failures >= 2 * copies || (found - corollary).abs() < 1e-10);
            strictly_below += usize::from(found > corollary + 1e-6);
        }
        assert!(strictly_below > 0);
    }
}

#[test]
fn groups_survive_more_than_a_ring() {
    for failures in 2..12 {
        let by = |policy| survived(&copy_holders(&names(24), 2, policy).unwrap(), failures);
        assert!(by(CopyPolicy::Group) > by(CopyPolicy::Ring) + 1e-6, "{failures}");
    }
}

#[test]
fn ranks_of_a_node_fail_together() {
    let nodes = ["a", "b", "a", "b"];
    let lists = [vec![0, 2], vec![1, 0]];
    let found = copy_recovery_probability(&lists, 1, Some(&nodes), None, 0).unwrap();
    assert!((found.probability - 0.5).abs() < 1e-12, "node a holds all of the first list: {found:?}");
    let message = |holders: &[Vec<usize>], failures, nodes: Option<&[&str]>| {
        copy_recovery_probability(holders, failures, nodes, None, 0).unwrap_err().to_string()
    };
    assert!(message(&[vec![1]], 0, None).starts_with("holders: item 0 names rank 1; there are 1 ranks"));
    assert!(message(&[vec![4]], 0, Some(&nodes)).starts_with("holders: item 0 names rank 4; there are 4"));
    assert!(message(&[vec![3]], 3, Some(&nodes)).starts_with("failures: expected 0 to 2"));
}

// ---- training jobs ----

/// Properties of the holders of one kind of state; `group[r]` is the state that rank r's replicas share.
fn check_training(nodes: &[String], group: &[usize], copies: usize, holders: &[Vec<usize>]) -> Vec<usize> {
    let most = copies.min(distinct(nodes));
    let mut received = vec![0; nodes.len()];
    let mut members_of: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    group.iter().enumerate().for_each(|(rank, group)| members_of.entry(*group).or_default().push(rank));
    for members in members_of.values() {
        let receivers: Vec<BTreeSet<usize>> = members
            .iter()
            .map(|&rank| holders[rank].iter().copied().filter(|holder| !members.contains(holder)).collect())
            .collect();
        assert!(receivers.windows(2).all(|pair| pair[0] == pair[1]), "sent more than once: {holders:?}");
        receivers[0].iter().for_each(|&rank| received[rank] += 1);
        let on_nodes = distinct(members.iter().map(|&rank| &nodes[rank]));
        let to_nodes = most.saturating_sub(on_nodes);
        let needed = to_nodes.max(copies.saturating_sub(members.len()));
        assert_eq!(receivers[0].len(), needed, "{nodes:?} {group:?} {copies}: {holders:?}");
    }
    for (rank, holders) in holders.iter().enumerate() {
        assert_eq!((holders[0], holders.len(), distinct(holders)), (rank, copies, copies));
        assert_eq!(
            distinct(holders.iter().map(|&rank| &nodes[rank])),
            most,
            "{nodes:?} {group:?}: {holders:?}"
        );
    }
    received
}

/// The smallest largest number of copies that a rank can receive, by trying all receivers of one group after the other.
fn least_spread(nodes: &[String], needs: &[(Vec<usize>, usize)], received: &mut [usize]) -> usize {
    let Some(((members, needed), rest)) = needs.split_first() else {
        return received.iter().max().unwrap() - received.iter().min().unwrap();
    };
    let held: BTreeSet<&String> = members.iter().map(|&rank| &nodes[rank]).collect();
    let mut best = usize::MAX;
    for choice in (0_u32..1 << nodes.len()).filter(|choice| choice.count_ones() as usize == *needed) {
        let chosen: Vec<usize> = (0..nodes.len()).filter(|rank| choice >> rank & 1 == 1).collect();
        let on: BTreeSet<&String> = chosen.iter().map(|&rank| &nodes[rank]).collect();
        if on.len() == *needed && on.is_disjoint(&held) {
            chosen.iter().for_each(|&rank| received[rank] += 1);
            best = best.min(least_spread(nodes, rest, received));
            chosen.iter().for_each(|&rank| received[rank] -= 1);
        }
    }
    best
}

#[test]
fn zero_stages_decide_what_is_copied() {
    let nodes = names(4);
    let (data, stages) = ([0, 1, 0, 1], [0, 0, 1, 1]);
    let found = |zero| training_copy_holders(&nodes, &data, &stages, 2, zero).unwrap();
    let peers = [vec![0, 1], vec![1, 0], vec![2, 3], vec![3, 2]];
    let next = [vec![0, 1], vec![1, 2], vec![2, 3], vec![3, 0]];
    assert_eq!((found(0).parameters, found(0).optimizer), (peers.to_vec(), peers.to_vec()));
    for zero in [1, 2] {
        assert_eq!((found(zero).parameters, found(zero).optimizer), (peers.to_vec(), next.to_vec()));
    }
    assert_eq!((found(3).parameters, found(3).optimizer), (next.to_vec(), next.to_vec()));
}

#[test]
fn without_peers_copies_go_to_the_next_nodes() {
    for (nodes, each) in [(2, 1), (3, 2), (5, 1), (7, 4)] {
        let names: Vec<String> = (0..nodes * each).map(|rank| format!("n{}", rank % nodes)).collect();
        let ranks: Vec<usize> = (0..nodes * each).collect();
        for copies in 1..=nodes {
            let found = training_copy_holders(&names, &ranks, &vec![0; ranks.len()], copies, 3).unwrap();
            assert_eq!(found.parameters, copy_holders(&names, copies, CopyPolicy::Ring).unwrap());
        }
    }
}

#[test]
fn a_peer_on_the_same_node_does_not_protect() {
    let nodes = ["a", "a", "b", "b"];
    let found = training_copy_holders(&nodes, &[0, 1, 0, 1], &[0, 0, 1, 1], 2, 0).unwrap();
    // one copy for each stage, not for each rank
    assert_eq!(found.parameters, [vec![0, 2], vec![1, 2], vec![2, 0], vec![3, 0]]);
}

#[test]
fn receivers_are_balanced_wherever_they_can_be_on_small_sizes() {
    let mut cases = 0;
    for ranks in 2..=5 {
        for code in 0..4_usize.pow(ranks as u32) {
            let on = |rank: usize| code / 4_usize.pow(rank as u32) % 4;
            let nodes: Vec<String> = (0..ranks).map(|rank| format!("n{}", on(rank))).collect();
            for stages in 1..=ranks {
                let stage: Vec<usize> = (0..ranks).map(|rank| rank % stages).collect();
                let data: Vec<usize> = (0..ranks).map(|rank| rank / stages).collect();
                for copies in 1..=distinct(&nodes).min(3) {
                    let found = training_copy_holders(&nodes, &data, &stage, copies, 0).unwrap().parameters;
                    let received = check_training(&nodes, &stage, copies, &found);
                    let spread = received.iter().max().unwrap() - received.iter().min().unwrap();
                    let needs: Vec<(Vec<usize>, usize)> = (0..stages)
                        .map(|wanted| {
                            let members: Vec<usize> =
                                (0..ranks).filter(|&rank| stage[rank] == wanted).collect();
                            let on_nodes = distinct(members.iter().map(|&rank| &nodes[rank]));
                            (members, copies.saturating_sub(on_nodes))
                        })
                        .collect();
                    let best = least_spread(&nodes, &needs, &mut vec![0; ranks]);
                    cases += 1;
                    assert!(spread <= best.max(1), "{nodes:?} {stage:?} {copies}: {received:?}, not {best}");
                }
            }
        }
    }
    assert_eq!(cases, 17_624);
}

#[test]
fn training_errors_name_the_argument() {
    let message = |data: &[usize], stages: &[usize], copies, zero| {
        training_copy_holders(&names(2), data, stages, copies, zero).unwrap_err().to_string()
    };
    assert!(message(&[0], &[0, 0], 1, 0).starts_with("data_parallel: expected a number for each of the 2"));
    assert!(message(&[0, 1], &[0], 1, 0).starts_with("pipeline: expected a number for each of the 2"));
    assert!(message(&[0, 1], &[0, 0], 0, 0).starts_with("copies: expected 1"));
    assert!(message(&[0, 1], &[0, 0], 3, 0).starts_with("copies: expected at most 2"));
    assert!(message(&[0, 1], &[0, 0], usize::MAX, 0).starts_with("copies: expected at most 2"));
    assert!(message(&[0, 1], &[0, 0], 1, 4).starts_with("zero_stage: expected 0 to 3, got 4"));
    assert!(
        message(&[7, 7], &[5, 5], 1, 0).starts_with("pipeline: ranks 0 and 1 both have data-parallel coo")
    );
    assert!(training_copy_holders::<&str>(&[], &[], &[], 1, 0).unwrap().parameters.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn copies_are_on_distinct_ranks_and_nodes(
        nodes in prop::collection::vec(0_u8..6, 0..20), copies in 1_usize..5, policy in 0..POLICIES.len(),
    ) {
        let names: Vec<String> = nodes.iter().map(|node| format!("n{node}")).collect();
        let count = distinct(&names);
        let Ok(found) = copy_holders(&names, copies, POLICIES[policy]) else {
            prop_assert_eq!(policy, 1);
            return Ok(());
        };
        for (rank, holders) in found.iter().enumerate() {
            prop_assert_eq!(holders[0], rank);
            let expected = if count == 1 { copies.min(names.len()) } else { copies.min(count) };
            prop_assert_eq!(distinct(holders), expected);
            prop_assert_eq!(holders.len(), expected);
            let on = distinct(holders.iter().map(|&holder| &names[holder]));
            prop_assert!(count == 1 || on == expected, "two copies on one node: {:?}", holders);
        }
    }

    #[test]
    fn training_copies_are_complete_and_nothing_is_copied_twice(
        nodes in prop::collection::vec(0_usize..7, 1..20), stages in 1_usize..8, copies in 1_usize..6, zero in 0_usize..4,
    ) {
        let ranks = nodes.len();
        let copies = copies.min(ranks);
        let names: Vec<String> = nodes.iter().map(|node| format!("n{node}")).collect();
        let stage: Vec<usize> = (0..ranks).map(|rank| rank % stages).collect();
        let data: Vec<usize> = (0..ranks).map(|rank| rank / stages).collect();
        let alone: Vec<usize> = (0..ranks).collect();
        let found = training_copy_holders(&names, &data, &stage, copies, zero).unwrap();
        check_training(&names, if zero < 3 { &stage } else { &alone }, copies, &found.parameters);
        let received = check_training(&names, if zero < 1 { &stage } else { &alone }, copies, &found.optimizer);
        let largest = (0..7).map(|node| nodes.iter().filter(|&&other| other == node).count()).max().unwrap();
        if zero > 0 && ranks >= copies * largest {
            prop_assert!(received.iter().all(|&count| count == copies - 1), "{:?}", received);
        }
    }

    #[test]
    fn primaries_hold_and_balance(bytes in prop::collection::vec(0_u64..1000, 1..40), ranks in 1_usize..6) {
        let everywhere = vec![(0..ranks).collect::<Vec<_>>(); bytes.len()];
        let chosen = primaries(&everywhere, &bytes, ranks).unwrap();
        let mut sums = vec![0; ranks];
        chosen.iter().zip(&bytes).for_each(|(&rank, bytes)| sums[rank] += bytes);
        let spread = sums.iter().max().unwrap() - sums.iter().min().unwrap();
        prop_assert!(spread <= *bytes.iter().max().unwrap(), "{:?}", sums);
    }
}
