//! Migration: no assignment moves fewer bytes, and the transfers are right and balanced; exhaustive on small sizes.

use evermoe::placement::{Migration, migrate};
use proptest::prelude::*;

fn held(matrix: &[i64], experts: usize, row: usize, expert: usize) -> bool {
    matrix[row * experts + expert] > 0
}

/// Bytes that move when each position goes to its node.
fn moved(old: &[i64], new: &[i64], nbytes: &[i64], node_map: &[usize]) -> i128 {
    let experts = nbytes.len();
    let fetched = |(position, &node): (usize, &usize)| -> i128 {
        let missing =
            |&expert: &usize| held(new, experts, position, expert) && !held(old, experts, node, expert);
        (0..experts).filter(missing).map(|expert| i128::from(nbytes[expert])).sum()
    };
    node_map.iter().enumerate().map(fetched).sum()
}

fn fixed(node_map: &[usize]) -> usize {
    node_map.iter().enumerate().filter(|(position, node)| position == *node).count()
}

/// All ways to give `positions` different nodes.
fn assignments(positions: usize, nodes: usize) -> Vec<Vec<usize>> {
    (0..positions).fold(vec![Vec::new()], |maps, _| {
        let longer = |map: Vec<usize>| {
            let free: Vec<usize> = (0..nodes).filter(|node| !map.contains(node)).collect();
            free.into_iter().map(move |node| [map.as_slice(), &[node]].concat())
        };
        maps.into_iter().flat_map(longer).collect()
    })
}

/// Properties of any migration, whatever the assignment.
fn check_transfers(old: &[i64], new: &[i64], nbytes: &[i64], migration: &Migration) {
    let (experts, nodes) = (nbytes.len(), old.len() / nbytes.len());
    let Migration { node_map, transfers, nbytes: total } = migration;
    let mut taken = node_map.clone();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!((taken.len(), node_map.len()), (new.len() / experts, new.len() / experts), "{node_map:?}");
    assert_eq!(*total, moved(old, new, nbytes, node_map), "{migration:?}");
    assert!(transfers.is_sorted_by_key(|transfer| -transfer.nbytes), "{transfers:?}");
    let mut after = vec![false; nodes * experts];
    let mut sent = vec![0_i128; nodes];
    for transfer in transfers {
        let holders = (0..nodes).filter(|&node| held(old, experts, node, transfer.expert));
        let least = holders.min_by_key(|&node| (sent[node], node));
        assert_eq!(Some(transfer.source), least, "{transfer:?} of {transfers:?}");
        assert_eq!(transfer.nbytes, nbytes[transfer.expert]);
        sent[transfer.source] += i128::from(transfer.nbytes);
        let cell = transfer.destination * experts + transfer.expert;
        assert!(!after[cell] && old[cell] == 0, "{transfer:?} is for nothing");
        after[cell] = true;
    }
    for (position, &node) in node_map.iter().enumerate() {
        for expert in 0..experts {
            let is_present = held(old, experts, node, expert) || after[node * experts + expert];
            assert!(
                is_present || !held(new, experts, position, expert),
                "node {node} lacks {expert}: {migration:?}"
            );
        }
    }
}

fn check_optimal(old: &[i64], new: &[i64], nbytes: &[i64]) {
    let migration = migrate(old, new, nbytes, None).unwrap();
    check_transfers(old, new, nbytes, &migration);
    let experts = nbytes.len();
    let all = assignments(new.len() / experts, old.len() / experts);
    let best = all.iter().map(|map| (moved(old, new, nbytes, map), usize::MAX - fixed(map))).min().unwrap();
    let found = (migration.nbytes, usize::MAX - fixed(&migration.node_map));
    assert_eq!(found, best, "old {old:?} new {new:?} nbytes {nbytes:?}: {migration:?}");
}

/// Gives every expert a holder.
fn covered(mut old: Vec<i64>, experts: usize) -> Vec<i64> {
    for expert in 0..experts {
        if old.iter().skip(expert).step_by(experts).all(|&count| count == 0) {
            old[expert] = 1;
        }
    }
    old
}

#[test]
fn every_placement_of_two_experts_on_three_nodes() {
    let bits =
        |number: usize, size: usize| (0..size).map(|bit| (number >> bit & 1) as i64).collect::<Vec<_>>();
    for nbytes in [[3, 5], [4, 4], [0, 1]] {
        for old in 0..64 {
            for new in 0..64 {
                check_optimal(&covered(bits(old, 6), 2), &bits(new, 6), &nbytes);
            }
            for new in 0..16 {
                check_optimal(&covered(bits(old, 6), 2), &bits(new, 4), &nbytes);
            }
        }
    }
}

/// Old and new matrix of `experts` with up to `nodes` rows, and sizes.
fn case(
    nodes: std::ops::RangeInclusive<usize>,
    experts: usize,
) -> impl Strategy<Value = (Vec<i64>, Vec<i64>, Vec<i64>)> {
    let count = || prop_oneof![3 => Just(0_i64), 2 => 1_i64..3];
    let size = prop_oneof![4 => 0_i64..9, 1 => Just(1 << 40)];
    (nodes, prop::collection::vec(size, experts)).prop_flat_map(move |(nodes, nbytes)| {
        let old = prop::collection::vec(count(), nodes * experts);
        let new = (0..=nodes).prop_flat_map(move |rows| prop::collection::vec(count(), rows * experts));
        (old, new, Just(nbytes)).prop_map(move |(old, new, nbytes)| (covered(old, experts), new, nbytes))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_assignment_moves_fewer_bytes((old, new, nbytes) in case(1..=6, 5)) {
        check_optimal(&old, &new, &nbytes);
    }

    #[test]
    fn a_permutation_moves_nothing(
        rows in prop::collection::vec(prop::collection::vec(0_i64..2, 6), 1..40), seed in any::<prop::sample::Index>(),
    ) {
        // Rotated by some rows; every expert that a row needs is present.
        let mut rotated = rows.clone();
        rotated.rotate_left(seed.index(rows.len()));
        let migration = migrate(&rows.concat(), &rotated.concat(), &[7, 1, 9, 2, 2, 5], None).unwrap();
        prop_assert!(migration.transfers.is_empty() && migration.nbytes == 0);
    }

    #[test]
    fn joiners_are_served_by_all_holders_alike(
        holders in 1..6_usize, joiners in 1..6_usize, nbytes in prop::collection::vec(1_i64..1000, 1..12),
    ) {
        let experts = nbytes.len();
        let mut old = vec![1; holders * experts];
        old.resize((holders + joiners) * experts, 0);
        let migration = migrate(&old, &vec![1; old.len()], &nbytes, None).unwrap();
        let mut sent = vec![0; holders];
        for transfer in &migration.transfers {
            sent[transfer.source] += transfer.nbytes;
        }
        let (total, largest) = (sent.iter().sum::<i64>(), nbytes.iter().max().unwrap());
        prop_assert_eq!(total, nbytes.iter().sum::<i64>() * joiners as i64);
        let busiest = *sent.iter().max().unwrap();
        prop_assert!(busiest * (holders as i64) < total + largest * (holders as i64), "{:?}", sent);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn many_nodes_move_no_more_than_by_number((old, new, nbytes) in case(513..=600, 7)) {
        let migration = migrate(&old, &new, &nbytes, None).unwrap();
        check_transfers(&old, &new, &nbytes, &migration);
        let own: Vec<usize> = (0..new.len() / nbytes.len()).collect();
        prop_assert!(migration.nbytes <= moved(&old, &new, &nbytes, &own));
    }
}

/// 600 nodes; node n holds expert n and one of ten others.
fn many() -> (Vec<i64>, usize) {
    let (nodes, experts) = (600, 610);
    let mut matrix = vec![0; nodes * experts];
    for node in 0..nodes {
        matrix[node * experts + node] = 1;
        matrix[node * experts + nodes + node % 10] = 1;
    }
    (matrix, experts)
}

#[test]
fn many_nodes_keep_their_rows_wherever_these_are_now() {
    let (old, experts) = many();
    let mut new = old.clone();
    new.rotate_left(7 * experts);
    let migration = migrate(&old, &new, &vec![3; experts], None).unwrap();
    assert_eq!(migration.node_map, (0..600).map(|position| (position + 7) % 600).collect::<Vec<_>>());
    assert_eq!(migration.nbytes, 0);
}

/// The node of each position when node n of 600 holds `old[n]`, or nothing, of experts with 0, 1, 2, … bytes.
fn among_many(old: &[&[usize]], new: &[&[usize]]) -> Vec<usize> {
    let nbytes: Vec<i64> = (0..10).collect();
    let row = |held: &&[usize]| (0..10).map(|expert| i64::from(held.contains(&expert))).collect::<Vec<_>>();
    let mut matrix = old.iter().flat_map(row).collect::<Vec<_>>();
    matrix.resize(600 * 10, 0);
    let migration = migrate(&matrix, &new.iter().flat_map(row).collect::<Vec<_>>(), &nbytes, None).unwrap();
    check_transfers(&matrix, &new.iter().flat_map(row).collect::<Vec<_>>(), &nbytes, &migration);
    migration.node_map
}

#[test]
fn among_many_nodes_the_most_bytes_in_common_go_first() {
    assert_eq!(among_many(&[&[], &[1, 9], &[]], &[&[1], &[], &[9]]), [0, 2, 1]);
}

#[test]
fn among_many_nodes_positions_stay_if_they_lose_nothing() {
    // 0 and 1 must swap; 3 could go to node 2 as well.
    let old: [&[usize]; 4] = [&[1, 3], &[1, 4], &[1, 2], &[1, 5]];
    assert_eq!(among_many(&old, &[&[4], &[3], &[], &[1]]), [1, 0, 2, 3]);
}

#[test]
fn among_many_nodes_greed_gives_way_to_the_order_by_number() {
    // 0 has 6 bytes on node 1 and 5 on its own, 1 has 5 on its own and none on node 0.
    assert_eq!(among_many(&[&[5], &[6, 2, 3]], &[&[5, 6], &[2, 3]]), [0, 1]);
}

#[test]
fn many_nodes_that_need_what_they_have_stay() {
    // All nodes hold the same: no assignment moves anything.
    let migration = migrate(&vec![1; 1200], &vec![1; 1200], &[1, 1], None).unwrap();
    assert_eq!(migration.node_map, (0..600).collect::<Vec<_>>());
}

/// Nodes in domains of these sizes, dealt to them in turn.
fn dealt(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut domains = vec![Vec::new(); sizes.len()];
    let mut node = 0;
    for round in 0..sizes.iter().copied().max().unwrap_or(0) {
        for (domain, _) in sizes.iter().enumerate().filter(|(_, size)| **size > round) {
            domains[domain].push(node);
            node += 1;
        }
    }
    domains
}

/// The domain whose nodes take the positions of each domain; none if some take those of several.
fn exchanged(domains: &[Vec<usize>], node_map: &[usize]) -> Option<Vec<usize>> {
    let home = |node: usize| domains.iter().position(|domain| domain.contains(&node));
    let taken = |domain: &Vec<usize>| {
        let mut homes: Vec<_> = domain.iter().map(|&position| home(node_map[position])).collect();
        homes.dedup();
        if homes.len() == 1 { homes[0] } else { None }
    };
    domains.iter().map(taken).collect()
}

/// Sizes of domains, and old and new matrix of 4 experts on their nodes.
fn case_in_domains() -> impl Strategy<Value = (Vec<usize>, Vec<i64>, Vec<i64>, Vec<i64>)> {
    let sizes =
        prop::collection::vec(1..=3_usize, 1..=3).prop_filter("few nodes", |s| s.iter().sum::<usize>() <= 6);
    (sizes, prop::collection::vec(0_i64..9, 4)).prop_flat_map(|(sizes, nbytes)| {
        let cells = sizes.iter().sum::<usize>() * 4;
        let matrix = || prop::collection::vec(0_i64..3, cells);
        (Just(sizes), matrix(), matrix(), Just(nbytes))
            .prop_map(|(sizes, old, new, nbytes)| (sizes, covered(old, 4), new, nbytes))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_assignment_that_keeps_domains_together_moves_fewer_bytes((sizes, old, new, nbytes) in case_in_domains()) {
        let domains = dealt(&sizes);
        let migration = migrate(&old, &new, &nbytes, Some(&domains)).unwrap();
        check_transfers(&old, &new, &nbytes, &migration);
        prop_assert!(exchanged(&domains, &migration.node_map).is_some(), "{migration:?}");
        let nodes = sizes.iter().sum();
        let all = assignments(nodes, nodes).into_iter().filter(|map| exchanged(&domains, map).is_some());
        let best = all.map(|map| (moved(&old, &new, &nbytes, &map), usize::MAX - fixed(&map))).min();
        prop_assert_eq!(Some((migration.nbytes, usize::MAX - fixed(&migration.node_map))), best);
    }
}

#[test]
fn domains_exchange_what_they_hold_as_a_whole() {
    let old = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1];
    let new = [0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0];
    let migration = migrate(&old, &new, &[8; 4], Some(&[vec![0, 1], vec![2, 3]])).unwrap();
    assert_eq!((migration.node_map, migration.nbytes), (vec![3, 2, 1, 0], 0));
    let one_of_each = migrate(&old, &new, &[8; 4], Some(&[vec![0, 2], vec![1, 3]])).unwrap();
    assert_eq!((one_of_each.node_map, one_of_each.nbytes), (vec![3, 2, 1, 0], 0));
    let uneven = migrate(&old, &new, &[8; 4], Some(&[vec![0, 1, 2]])).unwrap();
    assert_eq!(uneven.node_map[3], 3);
}

#[test]
fn among_many_nodes_each_domain_keeps_its_own() {
    let domains: Vec<Vec<usize>> = (0..300).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
    let (old, experts) = many();
    let mut new = old.clone();
    for pair in new.chunks_exact_mut(2 * experts) {
        pair.rotate_left(experts);
    }
    let migration = migrate(&old, &new, &vec![3; experts], Some(&domains)).unwrap();
    assert_eq!(migration.node_map, (0..600).map(|position| position ^ 1).collect::<Vec<_>>());
    assert_eq!(migration.nbytes, 0);
}

#[test]
fn domains_need_a_row_for_each_node() {
    let error = migrate(&[1, 0, 0, 1], &[1, 0], &[1, 1], Some(&[vec![0, 1]])).unwrap_err().to_string();
    assert!(
        error.starts_with("domains: with them, expected as many rows in new as in old, got 1 and 2"),
        "{error}"
    );
}
