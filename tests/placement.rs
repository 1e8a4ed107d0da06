//! Allocation and placement: what must hold for all inputs, and everything on small sizes.

use evermoe::placement::{allocate, place};
use proptest::prelude::*;

fn check_allocation(load: &[f64], ranks: usize, slots: usize, min_replicas: usize) {
    let replicas = allocate(load, ranks, slots, min_replicas).unwrap();
    let places = ranks * slots;
    assert_eq!(replicas.iter().sum::<i64>(), places as i64);
    let floor = min_replicas.min(places / load.len()).min(ranks) as i64;
    assert!(replicas.iter().all(|&count| count >= floor), "{replicas:?} below {floor}");
    let above = replicas.iter().any(|&count| count > ranks as i64);
    let all_full = replicas.iter().all(|&count| count >= ranks as i64);
    assert!(!above || all_full, "{replicas:?}: more than {ranks} although others have fewer");
}

fn check_placement(replicas: &[i64], ranks: usize, slots: usize, matrix: &[i64]) {
    let experts = replicas.len();
    for rank in 0..ranks {
        assert_eq!(
            matrix[rank * experts..(rank + 1) * experts].iter().sum::<i64>(),
            slots as i64,
            "rank {rank}"
        );
    }
    for expert in 0..experts {
        let column: Vec<i64> = (0..ranks).map(|rank| matrix[rank * experts + expert]).collect();
        let (least, most) = (column.iter().min().unwrap(), column.iter().max().unwrap());
        assert_eq!(column.iter().sum::<i64>(), replicas[expert], "expert {expert}");
        assert!(most - least <= 1 && *least >= 0, "expert {expert} is uneven: {column:?}");
        let distinct = column.iter().filter(|&&count| count > 0).count();
        assert_eq!(distinct, ranks.min(replicas[expert] as usize), "expert {expert}: {column:?}");
    }
}

fn fetches(matrix: &[i64], previous: &[i64]) -> usize {
    matrix.iter().zip(previous).filter(|&(&now, &before)| now > 0 && before == 0).count()
}

/// The fewest fetches of any valid placement, by trying the subsets of ranks of one expert after the other.
fn fewest(
    replicas: &[i64],
    ranks: usize,
    room: &mut [i64],
    expert: usize,
    previous: &[i64],
) -> Option<usize> {
    let experts = replicas.len();
    if expert == experts {
        return room.iter().all(|&left| left == 0).then_some(0);
    }
    let (each, rest) = (replicas[expert] / ranks as i64, replicas[expert] % ranks as i64);
    let mut best = None;
    for subset in (0_u32..1 << ranks).filter(|subset| i64::from(subset.count_ones()) == rest) {
        let held: Vec<i64> = (0..ranks).map(|rank| each + i64::from(subset >> rank & 1)).collect();
        let new = (0..ranks).filter(|&rank| held[rank] > 0 && previous[rank * experts + expert] == 0).count();
        room.iter_mut().zip(&held).for_each(|(room, held)| *room -= held);
        if room.iter().all(|&left| left >= 0) {
            let rest = fewest(replicas, ranks, room, expert + 1, previous).map(|rest| rest + new);
            best = [best, rest].into_iter().flatten().min();
        }
        room.iter_mut().zip(&held).for_each(|(room, held)| *room += held);
    }
    best
}

/// All lists of `size` numbers of at least 1 that sum to `sum`.
fn compositions(size: usize, sum: i64) -> Vec<Vec<i64>> {
    match size {
        0 => {
            if sum == 0 {
                vec![Vec::new()]
            } else {
                Vec::new()
            }
        }
        _ => (1..=sum)
            .flat_map(|first| {
                compositions(size - 1, sum - first)
                    .into_iter()
                    .map(move |rest| [&[first], rest.as_slice()].concat())
            })
            .collect(),
    }
}

#[test]
fn every_placement_of_small_sizes_is_valid_and_cheapest() {
    for (ranks, slots) in [(2, 3), (3, 2), (3, 3), (4, 2)] {
        for experts in 1..=4 {
            let all = compositions(experts, (ranks * slots) as i64);
            for (position, replicas) in all.iter().enumerate() {
                let fresh = place(replicas, ranks, slots, None).unwrap();
                check_placement(replicas, ranks, slots, &fresh);
                // From the placement of another composition, with the last rank replaced.
                let other = &all[(position * 7 + 3) % all.len()];
                let mut previous = place(other, ranks, slots, None).unwrap();
                previous[(ranks - 1) * experts..].fill(0);
                let matrix = place(replicas, ranks, slots, Some(&previous)).unwrap();
                check_placement(replicas, ranks, slots, &matrix);
                let best = fewest(replicas, ranks, &mut vec![slots as i64; ranks], 0, &previous);
                assert_eq!(
                    Some(fetches(&matrix, &previous)),
                    best,
                    "{replicas:?} after {previous:?}: {matrix:?}"
                );
            }
        }
    }
}

#[test]
fn nothing_moves_when_nothing_changes() {
    let replicas = allocate(&[9.0, 1.0, 4.0, 2.0, 2.0, 0.0], 4, 4, 2).unwrap();
    let matrix = place(&replicas, 4, 4, None).unwrap();
    assert_eq!(place(&replicas, 4, 4, Some(&matrix)).unwrap(), matrix);
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
        check_allocation(&load, ranks, slots, min_replicas);
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
    fn placements_are_valid_after_any_change((ranks, slots, load) in cluster(), (_, _, shift) in cluster()) {
        let replicas = allocate(&load, ranks, slots, 2).unwrap();
        let before = place(&replicas, ranks, slots, None).unwrap();
        check_placement(&replicas, ranks, slots, &before);
        let mixed: Vec<f64> = load.iter().zip(shift.iter().cycle()).map(|(load, shift)| load + shift).collect();
        let mut previous = before.clone();
        previous[..load.len()].fill(0);
        let replicas = allocate(&mixed, ranks, slots, 2).unwrap();
        let after = place(&replicas, ranks, slots, Some(&previous)).unwrap();
        check_placement(&replicas, ranks, slots, &after);
        prop_assert!(fetches(&after, &previous) <= fetches(&place(&replicas, ranks, slots, None).unwrap(), &previous));
        prop_assert_eq!(after, place(&replicas, ranks, slots, Some(&previous)).unwrap());
    }
}
