//! Allocation and placement: properties for all inputs, and exhaustive tests of small sizes.

use evermoe::placement::{Construction, Policy, Request, allocate, migrate, place, reallocate};
use proptest::prelude::*;

/// Lazarus Eq. 1 as in the paper, for integer loads.
fn equation_1(load: &[i64], nodes: usize, slots: usize, min_replicas: usize) -> Vec<i64> {
    let places = (nodes * slots) as i128;
    let floor = (min_replicas as i128).min(places / load.len() as i128);
    let mut ascending: Vec<usize> = (0..load.len()).collect();
    ascending.sort_by_key(|&expert| (load[expert], expert));
    let mut replicas = vec![0; load.len()];
    for (position, &expert) in ascending.iter().enumerate() {
        let rest: i128 = ascending[position..].iter().map(|&other| i128::from(load[other])).sum();
        let left = places - replicas.iter().sum::<i64>() as i128;
        let share = if rest == 0 {
            left / (load.len() - position) as i128
        } else {
            i128::from(load[expert]) * left / rest
        };
        replicas[expert] = share.max(floor) as i64;
    }
    replicas
}

fn request(replicas: &[i64], nodes: usize, slots: usize, policy: Policy) -> Request<'_> {
    Request { replicas, nodes, slots, policy, load: None, previous: None, domains: None, failures: None }
}

/// Properties for every policy: full nodes, every replica placed.
fn check_sums(replicas: &[i64], nodes: usize, slots: usize, matrix: &[i64]) {
    let experts = replicas.len();
    assert!(matrix.iter().all(|&count| count >= 0));
    for row in matrix.chunks(experts) {
        assert_eq!(row.iter().sum::<i64>(), slots as i64, "{matrix:?}");
    }
    for (expert, &wanted) in replicas.iter().enumerate() {
        assert_eq!(
            (0..nodes).map(|node| matrix[node * experts + expert]).sum::<i64>(),
            wanted,
            "expert {expert}"
        );
    }
}

/// What holds for `safest` (but where another construction won) and `balanced`: the widest spread, evenly.
fn check_spread(replicas: &[i64], nodes: usize, matrix: &[i64]) {
    let experts = replicas.len();
    for expert in 0..experts {
        let column: Vec<i64> = (0..nodes).map(|node| matrix[node * experts + expert]).collect();
        let (least, most) = (column.iter().min().unwrap(), column.iter().max().unwrap());
        assert!(most - least <= 1, "expert {expert} is uneven: {column:?}");
        let distinct = column.iter().filter(|&&count| count > 0).count();
        assert_eq!(distinct, nodes.min(replicas[expert] as usize), "expert {expert}: {column:?}");
    }
}

fn new_replicas(matrix: &[i64], previous: &[i64]) -> usize {
    matrix.iter().zip(previous).filter(|&(&now, &before)| now > 0 && before == 0).count()
}

/// Part of all losses of `failures` of `domains` (node → domain) that leave every expert a replica: one after the other.
fn enumerated(matrix: &[i64], experts: usize, domain: &[usize], failures: usize) -> f64 {
    let domains = domain.iter().max().unwrap() + 1;
    let survives = |lost: u32| {
        (0..experts).all(|expert| {
            (0..domain.len()).any(|node| matrix[node * experts + expert] > 0 && lost >> domain[node] & 1 == 0)
        })
    };
    let losses: Vec<u32> =
        (0_u32..1 << domains).filter(|lost| lost.count_ones() as usize == failures).collect();
    losses.iter().filter(|&&lost| survives(lost)).count() as f64 / losses.len() as f64
}

/// All lists of `size` numbers of at least 1 that sum to `sum`.
fn compositions(size: usize, sum: i64) -> Vec<Vec<i64>> {
    if size == 0 {
        return if sum == 0 { vec![Vec::new()] } else { Vec::new() };
    }
    let with = |first: i64| {
        compositions(size - 1, sum - first).into_iter().map(move |rest| [&[first], &rest[..]].concat())
    };
    (1..=sum).flat_map(with).collect()
}

/// The most survival of any placement whatsoever, for each number of failures: all of them, expert after expert.
fn most_survival(replicas: &[i64], nodes: usize, slots: usize) -> Vec<usize> {
    fn place_rest(replicas: &[i64], room: &mut [i64], sets: &mut Vec<u32>, best: &mut [usize]) {
        let Some((&count, rest)) = replicas.split_first() else {
            let mut survived = vec![0; best.len()];
            for lost in (0_u32..1 << room.len()).filter(|lost| !sets.iter().any(|set| set & lost == *set)) {
                survived[lost.count_ones() as usize] += 1;
            }
            best.iter_mut().zip(survived).for_each(|(best, survived)| *best = (*best).max(survived));
            return;
        };
        fill(0, count, 0, rest, room, sets, best);
    }
    fn fill(
        node: usize,
        left: i64,
        set: u32,
        rest: &[i64],
        room: &mut [i64],
        sets: &mut Vec<u32>,
        best: &mut [usize],
    ) {
        if node == room.len() {
            if left == 0 {
                sets.push(set);
                place_rest(rest, room, sets, best);
                sets.pop();
            }
            return;
        }
        for count in 0..=left.min(room[node]) {
            room[node] -= count;
            fill(node + 1, left - count, set | u32::from(count > 0) << node, rest, room, sets, best);
            room[node] += count;
        }
    }
    let mut best = vec![0; nodes + 1];
    place_rest(replicas, &mut vec![slots as i64; nodes], &mut Vec::new(), &mut best);
    best
}

fn choose(n: usize, k: usize) -> usize {
    (0..k).fold(1, |product, i| product * (n - i) / (i + 1))
}

/// All orders of a list.
fn orders(count: usize) -> Vec<Vec<usize>> {
    let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
    let shorter = orders(last);
    let with_last = |order: &Vec<usize>| {
        (0..=last).map(|at| [&order[..at], &[last], &order[at..]].concat()).collect::<Vec<_>>()
    };
    shorter.iter().flat_map(with_last).collect()
}

/// The experts of [2, 2, 4, 4] survive 5 of 6 losses of two nodes; [4, 4, 2, 2] are the same experts.
#[test]
fn safest_does_not_depend_on_the_order_of_experts() {
    for (replicas, nodes, slots, failures, survival) in [
        (&[2, 2, 4, 4][..], 4, 3, 2, Some(5.0 / 6.0)),
        (&[1, 2, 3], 3, 2, 1, None),
        (&[1, 1, 3, 5], 5, 2, 2, None),
        (&[2, 3, 3, 4], 4, 3, 3, None),
        (&[2, 2, 3, 5], 6, 2, 2, None),
        (&[2, 2, 2, 3, 6], 5, 3, 2, None),
    ] {
        let load: Vec<f64> = replicas.iter().map(|&count| count as f64 + 0.5).collect();
        for previous in [false, true] {
            let request = |replicas: &[i64], load: &[f64], previous: Option<&[i64]>| {
                let (load, failures) = (Some(load), Some(failures));
                place(&Request {
                    replicas,
                    nodes,
                    slots,
                    policy: Policy::Safest,
                    load,
                    previous,
                    domains: None,
                    failures,
                })
                .unwrap()
            };
            let first = request(replicas, &load, None).matrix;
            let previous = previous.then_some(&first[..]);
            let sorted = request(replicas, &load, previous).reason;
            assert!(
                survival.is_none_or(|best| (sorted.survival - best).abs() < 1e-9),
                "{replicas:?}: {sorted}"
            );
            for order in orders(replicas.len()) {
                let listed: Vec<i64> = order.iter().map(|&expert| replicas[expert]).collect();
                let load: Vec<f64> = order.iter().map(|&expert| load[expert]).collect();
                let columns = |matrix: &[i64]| -> Vec<i64> {
                    let rows = matrix.chunks_exact(order.len());
                    rows.flat_map(|row| order.iter().map(|&expert| row[expert])).collect()
                };
                let previous = previous.map(columns);
                let found = request(&listed, &load, previous.as_deref());
                assert_eq!(found.reason, sorted, "{listed:?} on {nodes} × {slots}");
                for (expert, &count) in listed.iter().enumerate() {
                    let placed: i64 = found.matrix.iter().skip(expert).step_by(listed.len()).sum();
                    assert_eq!(placed, count, "{listed:?}: expert {expert}");
                }
            }
        }
    }
}

#[test]
fn safest_is_as_safe_as_any_placement_of_small_sizes() {
    let mut better_than_the_papers = 0;
    for (nodes, slots) in [(2, 3), (3, 2), (3, 3), (4, 2), (5, 2)] {
        for experts in 1..=5 {
            let all = compositions(experts, (nodes * slots) as i64);
            for replicas in all.iter().filter(|replicas| replicas.is_sorted()) {
                let most = most_survival(replicas, nodes, slots);
                for (failures, &most) in most.iter().enumerate().take(nodes).skip(1) {
                    let survival = |policy| {
                        let request =
                            Request { failures: Some(failures), ..request(replicas, nodes, slots, policy) };
                        let placement = place(&request).unwrap();
                        check_sums(replicas, nodes, slots, &placement.matrix);
                        let alone: Vec<usize> = (0..nodes).collect();
                        let counted = enumerated(&placement.matrix, experts, &alone, failures);
                        assert!(
                            (placement.reason.survival - counted).abs() < 1e-9,
                            "{placement:?}: {counted}"
                        );
                        counted
                    };
                    let papers = [Policy::Mro, Policy::Spread, Policy::Compact].map(survival);
                    let best = most as f64 / choose(nodes, failures) as f64;
                    let safest = survival(Policy::Safest);
                    assert!(
                        (safest - best).abs() < 1e-9,
                        "{replicas:?} on {nodes} × {slots}, {failures} lost: {safest}, not {best}"
                    );
                    better_than_the_papers += usize::from(papers.iter().all(|&paper| paper < safest - 1e-9));
                }
            }
        }
    }
    assert!(better_than_the_papers > 0);
}

#[test]
fn maximum_rank_overlap_is_not_optimal_where_its_last_group_is_cut() {
    // Lazarus, Theorem 1, fails: two of three nodes alive.
    let survival = |policy| {
        let request = Request { failures: Some(1), ..request(&[2, 2, 2], 3, 2, policy) };
        place(&request).unwrap().reason.survival
    };
    assert!((survival(Policy::Mro) - 2.0 / 3.0).abs() < 1e-12);
    for policy in [Policy::Spread, Policy::Safest, Policy::Balanced] {
        assert!((survival(policy) - 1.0).abs() < 1e-12, "{policy:?}");
    }
}

#[test]
fn maximum_rank_overlap_leaves_cold_groups_idle() {
    let load: Vec<f64> = (1..=64).map(|rank| 1.0 / f64::from(rank)).collect();
    let replicas = allocate(&load, 16, 10, 2).unwrap();
    let imbalance = |policy| {
        let request = Request { load: Some(&load), ..request(&replicas, 16, 10, policy) };
        place(&request).unwrap().reason.imbalance
    };
    assert!(imbalance(Policy::Mro) > 1.6);
    assert!(imbalance(Policy::Balanced) < 1.05);
}

/// Loads of 256 experts in the shapes that real traces have, in no order.
fn shapes() -> Vec<(&'static str, Vec<f64>)> {
    let zipf = |power: f64| (0..256).map(|i| (f64::from(i * 77 % 256) + 1.0).powf(-power)).collect();
    // Quantiles of the normal distribution by the logistic approximation.
    let quantile = |i: i32| (f64::from(i * 101 % 256) + 0.5) / 256.0;
    let lognormal = (0..256).map(|i| ((quantile(i) / (1.0 - quantile(i))).ln() / 1.702).exp()).collect();
    let mut two_hot = vec![13.0 / 254.0; 256];
    (two_hot[40], two_hot[200]) = (43.5, 43.5);
    vec![
        ("uniform", vec![1.0; 256]),
        ("lognormal", lognormal),
        ("zipf 0.5", zipf(0.5)),
        ("zipf 1.0", zipf(1.0)),
        ("87 % on two", two_hot),
    ]
}

#[test]
fn balanced_is_even_and_survives_at_the_size_of_deepseek_v3() {
    for slots in [9, 18, 24] {
        for (name, load) in shapes() {
            let replicas = allocate(&load, 32, slots, 2).unwrap();
            let with = |policy| Request {
                load: Some(&load),
                failures: Some(2),
                ..request(&replicas, 32, slots, policy)
            };
            let (balanced, mro) =
                (place(&with(Policy::Balanced)).unwrap(), place(&with(Policy::Mro)).unwrap());
            check_sums(&replicas, 32, slots, &balanced.matrix);
            check_spread(&replicas, 32, &balanced.matrix);
            let reason = &balanced.reason;
            assert!(
                reason.survival >= mro.reason.survival - 0.05,
                "{name} × {slots}: {reason}; {}",
                mro.reason
            );
            assert!(
                reason.imbalance <= mro.reason.imbalance + 1e-9,
                "{name} × {slots}: {reason}; {}",
                mro.reason
            );
            // 17, 34 or 130 replicas of each of two experts on 32 nodes: some nodes must hold one more of them.
            assert_eq!(reason.least_imbalance > 1.05, name == "87 % on two", "{name} × {slots}");
            let limit = reason.least_imbalance.max(1.05) + 1e-9;
            assert!(reason.imbalance <= limit, "{name} × {slots}: {reason}");
        }
    }
}

#[test]
fn little_moves_when_the_load_drifts() {
    for (name, load) in shapes() {
        let replicas = allocate(&load, 32, 9, 2).unwrap();
        let before =
            place(&Request { load: Some(&load), ..request(&replicas, 32, 9, Policy::Balanced) }).unwrap();
        // Up to 5 % up or down.
        let drifted: Vec<f64> =
            load.iter().enumerate().map(|(i, load)| load * (1.0 + 0.05 * (i as f64 * 2.399).sin())).collect();
        let replicas = reallocate(&drifted, 32, 9, 2, &replicas).unwrap();
        let previous = Some(&before.matrix[..]);
        let request =
            Request { load: Some(&drifted), previous, ..request(&replicas, 32, 9, Policy::Balanced) };
        let after = place(&request).unwrap();
        check_spread(&replicas, 32, &after.matrix);
        assert_eq!(after.reason.moved.unwrap(), new_replicas(&after.matrix, &before.matrix));
        assert!(after.reason.moved <= Some(288 * 15 / 100), "{name}: {}", after.reason);
        assert!(
            after.reason.imbalance <= before.reason.imbalance.max(1.05) * 1.05 / 0.95 + 1e-9,
            "{name}: {}",
            after.reason
        );
    }
}

#[test]
fn nothing_moves_when_nothing_changes() {
    let load = [9.0, 1.0, 4.0, 2.0, 2.0, 0.0];
    let replicas = allocate(&load, 4, 4, 2).unwrap();
    for policy in [Policy::Mro, Policy::Spread, Policy::Compact, Policy::Safest, Policy::Balanced] {
        let request = Request { load: Some(&load), ..request(&replicas, 4, 4, policy) };
        let matrix = place(&request).unwrap().matrix;
        let again = place(&Request { previous: Some(&matrix), ..request }).unwrap();
        assert_eq!((again.reason.moved, &again.matrix), (Some(0), &matrix), "{policy:?}");
    }
}

#[test]
fn racks_that_fail_whole_take_no_expert_with_them() {
    // Eight nodes in four racks, also of different sizes.
    let even: Vec<Vec<usize>> = vec![vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]];
    let uneven: Vec<Vec<usize>> = vec![vec![0, 1, 2], vec![3, 4, 5], vec![6], vec![7]];
    let load: Vec<f64> = (1..=12).map(f64::from).collect();
    let replicas = allocate(&load, 8, 4, 2).unwrap();
    for domains in [even, uneven] {
        for policy in [Policy::Safest, Policy::Balanced] {
            let request =
                Request { load: Some(&load), domains: Some(&domains), ..request(&replicas, 8, 4, policy) };
            let placement = place(&request).unwrap();
            check_sums(&replicas, 8, 4, &placement.matrix);
            assert!(placement.reason.spread >= 2, "{policy:?} {domains:?}: {}", placement.reason);
            let mut domain = vec![0; 8];
            domains
                .iter()
                .enumerate()
                .for_each(|(index, nodes)| nodes.iter().for_each(|&node| domain[node] = index));
            assert!(
                (enumerated(&placement.matrix, 12, &domain, 1) - 1.0).abs() < 1e-12,
                "{policy:?} {domains:?}"
            );
        }
    }
}

prop_compose! {
    fn cluster()(ranks in 1_usize..10, slots in 1_usize..9)(
        ranks in Just(ranks),
        slots in Just(slots),
        experts in 1..=ranks * slots,
        seeds in prop::collection::vec(prop_oneof![Just(0.0), 0.0..1.0, 0.0..1e9], ranks * slots),
    ) -> (usize, usize, Vec<f64>) {
        (ranks, slots, seeds[..experts].to_vec())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn allocations_fill_all_slots((ranks, slots, load) in cluster(), min_replicas in 1_usize..5) {
        let replicas = allocate(&load, ranks, slots, min_replicas).unwrap();
        prop_assert_eq!(replicas.iter().sum::<i64>(), (ranks * slots) as i64);
        let floor = min_replicas.min(ranks * slots / load.len()) as i64;
        prop_assert!(replicas.iter().all(|&count| count >= floor), "{:?} below {}", replicas, floor);
    }

    #[test]
    fn allocations_are_equation_1((ranks, slots, load) in cluster(), min_replicas in 1_usize..5) {
        let tokens: Vec<i64> = load.iter().map(|load| *load as i64).collect();
        let load: Vec<f64> = tokens.iter().map(|&tokens| tokens as f64).collect();
        let replicas = allocate(&load, ranks, slots, min_replicas).unwrap();
        prop_assert_eq!(replicas, equation_1(&tokens, ranks, slots, min_replicas));
    }

    #[test]
    fn more_load_never_means_fewer_replicas((ranks, slots, load) in cluster(), min_replicas in 1_usize..4) {
        let replicas = allocate(&load, ranks, slots, min_replicas).unwrap();
        for (a, &heavy) in load.iter().enumerate() {
            for (b, &light) in load.iter().enumerate() {
                prop_assert!(heavy <= light || replicas[a] + 1 >= replicas[b], "{:?}: {:?}", load, replicas);
            }
        }
    }

    #[test]
    fn placements_are_valid_after_any_change(
        (nodes, slots, load) in cluster(),
        (_, _, shift) in cluster(),
        racks in 1_usize..5,
        failures in 1_usize..4,
    ) {
        let racks: Vec<Vec<usize>> = (0..racks).map(|rack| (rack..nodes).step_by(racks).collect()).filter(|rack: &Vec<_>| !rack.is_empty()).collect();
        for (policy, domains) in [(Policy::Balanced, None), (Policy::Safest, None), (Policy::Balanced, Some(&racks[..]))] {
            let failures = Some(failures.min(domains.map_or(nodes, <[_]>::len)));
            let replicas = allocate(&load, nodes, slots, 2).unwrap();
            let first = Request { load: Some(&load), domains, failures, ..request(&replicas, nodes, slots, policy) };
            let before = place(&first).unwrap();
            check_sums(&replicas, nodes, slots, &before.matrix);
            let mixed: Vec<f64> = load.iter().zip(shift.iter().cycle()).map(|(load, shift)| load + shift).collect();
            let mut previous = before.matrix.clone();
            previous[..load.len()].fill(0);
            let replicas = allocate(&mixed, nodes, slots, 2).unwrap();
            let next = Request { replicas: &replicas, load: Some(&mixed), previous: Some(&previous), ..first };
            let after = place(&next).unwrap();
            check_sums(&replicas, nodes, slots, &after.matrix);
            if policy == Policy::Balanced && !matches!(after.reason.construction, Construction::Mro | Construction::Spread | Construction::Compact | Construction::Exchanged) {
                check_spread(&replicas, nodes, &after.matrix);
            }
            prop_assert_eq!(after.reason.moved.unwrap(), new_replicas(&after.matrix, &previous));
            let mut domain: Vec<usize> = (0..nodes).collect();
            for (index, rack) in domains.unwrap_or_default().iter().enumerate() {
                rack.iter().for_each(|&node| domain[node] = index);
            }
            let counted = enumerated(&after.matrix, load.len(), &domain, after.reason.failures);
            prop_assert!((after.reason.survival - counted).abs() < 1e-9, "{} but {counted}", after.reason);
            prop_assert_eq!(&after, &place(&next).unwrap());
        }
    }

    #[test]
    fn no_rows_change_places_to_move_less(
        (nodes, slots, load) in cluster(), (_, _, shift) in cluster(), racks in 1_usize..5, turn in 0_usize..8,
    ) {
        let racks: Vec<Vec<usize>> = (0..racks.min(nodes)).map(|rack| (rack..nodes).step_by(racks.min(nodes)).collect()).collect();
        let policies = [Policy::Balanced, Policy::Safest, Policy::Mro, Policy::Spread, Policy::Compact];
        for (policy, domains) in policies.into_iter().flat_map(|policy| [(policy, None), (policy, Some(&racks[..]))]) {
            let replicas = allocate(&load, nodes, slots, 2).unwrap();
            let first = Request { load: Some(&load), domains, ..request(&replicas, nodes, slots, policy) };
            let mut previous = place(&first).unwrap().matrix;
            previous.rotate_left(turn % nodes * load.len());
            let mixed: Vec<f64> = load.iter().zip(shift.iter().cycle()).map(|(load, shift)| load + shift).collect();
            let replicas = allocate(&mixed, nodes, slots, 2).unwrap();
            let next = Request { replicas: &replicas, load: Some(&mixed), previous: Some(&previous), ..first };
            let after = place(&next).unwrap();
            let migration = migrate(&previous, &after.matrix, &vec![1; load.len()], domains).unwrap();
            prop_assert_eq!(migration.nbytes, after.reason.moved.unwrap() as i128, "{:?} {}", policy, after.reason);
        }
    }

    #[test]
    fn safest_and_balanced_keep_their_word((nodes, slots, load) in cluster(), failures in 1_usize..4) {
        let replicas = allocate(&load, nodes, slots, 2).unwrap();
        let failures = Some(failures.min(nodes));
        let reason = |policy| {
            place(&Request { load: Some(&load), failures, ..request(&replicas, nodes, slots, policy) }).unwrap().reason
        };
        let papers = [Policy::Mro, Policy::Spread, Policy::Compact].map(|policy| {
            let reason = reason(policy);
            assert!(reason.imbalance >= reason.least_imbalance - 1e-9, "{reason}");
            reason.survival
        });
        let best = papers.into_iter().fold(0.0, f64::max);
        let (safest, balanced) = (reason(Policy::Safest), reason(Policy::Balanced));
        let reference = f64::max(papers[0], papers[1]);
        prop_assert!(reference < 0.5 || balanced.survival >= reference - 0.05 - 1e-9, "{balanced} but {papers:?}");
        prop_assert!(safest.survival >= best - 1e-9, "{safest} but {papers:?}");
        // Fewer losses than the least replicas are always survived.
        let least = *replicas.iter().min().unwrap() as usize;
        prop_assert_eq!(balanced.spread, least.min(nodes));
        prop_assert!(balanced.imbalance >= balanced.least_imbalance - 1e-9, "{balanced}");
        prop_assert!(safest.spread >= least.min(nodes), "{safest}");
    }
}
