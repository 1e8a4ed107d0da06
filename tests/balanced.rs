//! The balanced split and the imbalance, compared with the bound of every set of ranks.

use super::common::all;
use evermoe::dispatch::{Policy, imbalance, split_tokens};
use proptest::prelude::*;

/// Tokens of each expert on each rank, and the replicas of each expert on each rank.
#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    /// `[experts][ranks]`.
    tokens: Vec<Vec<i64>>,
    /// `[experts][ranks]`.
    replicas: Vec<Vec<i64>>,
}

impl Case {
    fn experts(&self) -> usize {
        self.tokens.len()
    }

    fn load(&self) -> Vec<i64> {
        self.tokens.iter().map(|row| row.iter().sum()).collect()
    }

    /// `[ranks, experts]`, flat.
    fn matrix(&self) -> Vec<i64> {
        (0..self.ranks).flat_map(|rank| self.replicas.iter().map(move |row| row[rank])).collect()
    }

    /// Every set of ranks, and the load that has no holder outside of it.
    fn sets(&self) -> impl Iterator<Item = (u32, i64)> {
        (1..1_u32 << self.ranks).map(|set| {
            let outside = |row: &Vec<i64>| (0..self.ranks).any(|rank| row[rank] > 0 && set & 1 << rank == 0);
            let bound = self
                .load()
                .iter()
                .zip(&self.replicas)
                .filter(|(_, row)| !outside(row))
                .map(|(load, _)| load)
                .sum();
            (set.count_ones(), bound)
        })
    }

    /// `[experts][source][destination]`, from what every rank says that it sends; checked against what it receives.
    fn table(&self, policy: Policy) -> Vec<Vec<Vec<i64>>> {
        let (experts, ranks) = (self.experts(), self.ranks);
        let (tokens, matrix) = (self.tokens.concat(), self.matrix());
        let split = |rank| split_tokens(&tokens, &matrix, experts, ranks, rank, policy).unwrap();
        let splits: Vec<_> = (0..ranks).map(split).collect();
        let mut table = vec![vec![vec![0; ranks]; ranks]; experts];
        for (expert, rows) in table.iter_mut().enumerate() {
            for (source, row) in rows.iter_mut().enumerate() {
                row.copy_from_slice(&splits[source].send[expert * ranks..(expert + 1) * ranks]);
                for (destination, &count) in row.iter().enumerate() {
                    assert_eq!(count, splits[destination].receive[source * experts + expert], "{self:?}");
                }
            }
        }
        table
    }

    /// Tokens that the busiest rank computes.
    fn busiest(&self, table: &[Vec<Vec<i64>>]) -> i64 {
        let column = |rank: usize| table.iter().flatten().map(|row| row[rank]).sum();
        (0..self.ranks).map(column).max().unwrap()
    }
}

fn check(case: &Case) {
    let table = case.table(Policy::Balanced);
    for (expert, rows) in table.iter().enumerate() {
        let (mut sources, mut holders, mut routes) = (0, 0, 0);
        for (source, row) in rows.iter().enumerate() {
            assert_eq!(row.iter().sum::<i64>(), case.tokens[expert][source], "a row of {case:?}: {table:?}");
            for (destination, &count) in row.iter().enumerate() {
                let held = case.replicas[expert][destination] > 0;
                assert!(count == 0 || count > 0 && held, "rank {destination} of {case:?}: {table:?}");
                routes += usize::from(count > 0 && destination != source);
            }
            let received: i64 = rows.iter().map(|row| row[source]).sum();
            let kept = case.tokens[expert][source].min(received);
            assert_eq!(row[source], kept, "rank {source} does not keep its own of {case:?}: {table:?}");
            sources += usize::from(case.tokens[expert][source] > 0);
            holders += usize::from(case.replicas[expert][source] > 0);
        }
        assert!(routes < (sources + holders).max(1), "{routes} routes of expert {expert}: {table:?}");
    }
    let least = case.sets().map(|(ranks, load)| (load as u64).div_ceil(u64::from(ranks)) as i64).max();
    assert_eq!(Some(case.busiest(&table)), least, "{case:?}: {table:?}");
}

#[test]
fn every_placement_of_two_experts_on_three_ranks() {
    let placements = || all(3, 1).into_iter().filter(|row| row.iter().any(|&held| held > 0));
    for counts in all(6, 2) {
        for replicas in
            placements().flat_map(|first| placements().map(move |other| vec![first.clone(), other]))
        {
            let tokens = counts.chunks(3).map(<[i64]>::to_vec).collect();
            check(&Case { ranks: 3, tokens, replicas });
        }
    }
}

#[test]
fn every_placement_of_four_experts_on_three_ranks() {
    for held in all(4, 6) {
        for load in [[1, 1, 1, 1], [7, 1, 0, 2], [5, 4, 3, 1], [2, 9, 9, 3]] {
            let replicas =
                held.iter().map(|held| (0..3).map(|rank| (held + 1) >> rank & 1).collect()).collect();
            let tokens =
                load.iter().map(|&load| vec![load - load / 3 - load / 2, load / 2, load / 3]).collect();
            check(&Case { ranks: 3, tokens, replicas });
        }
    }
}

/// Experts whose one holder is drawn when they have none by chance.
fn case(most: i64) -> impl Strategy<Value = Case> {
    (1_usize..=7, 1_usize..=9).prop_flat_map(move |(ranks, experts)| {
        let count = prop_oneof![2 => Just(0), 4 => 0..=most.min(9), 3 => 0..=most];
        let tokens = prop::collection::vec(prop::collection::vec(count, ranks), experts);
        let row = prop::collection::vec(prop_oneof![5 => Just(0), 3 => 1_i64..3], ranks);
        let replicas = prop::collection::vec((row, 0..ranks), experts).prop_map(|rows| {
            rows.into_iter()
                .map(|(mut row, holder)| {
                    row[holder] += i64::from(row.iter().all(|&held| held == 0));
                    row
                })
                .collect()
        });
        (tokens, replicas).prop_map(move |(tokens, replicas)| Case { ranks, tokens, replicas })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_busiest_rank_computes_as_little_as_any_set_of_ranks_allows(case in case(3000)) {
        check(&case);
    }

    #[test]
    fn huge_counts_are_balanced_exactly(case in case(1 << 54)) {
        check(&case);
    }

    #[test]
    fn what_no_rank_has_too_much_of_stays(mut case in case(60)) {
        // Rank 0 computes the hot expert and nothing else; the others have their own tokens, none more than rank 0.
        for (tokens, replicas) in case.tokens.iter_mut().zip(&mut case.replicas) {
            (tokens[0], replicas[0]) = (0, i64::from(replicas[1..].iter().all(|&held| held == 0)));
            tokens.iter_mut().zip(replicas).filter(|(_, held)| **held == 0).for_each(|(count, _)| *count = 0);
        }
        let own = |rank: usize| case.tokens.iter().map(|row| row[rank]).sum::<i64>();
        let mut hot = vec![0; case.ranks];
        hot[0] = (0..case.ranks).map(own).max().unwrap();
        case.tokens.push(hot);
        case.replicas.push((0..case.ranks).map(|rank| i64::from(rank == 0)).collect());
        for rows in case.table(Policy::Balanced) {
            for (source, row) in rows.iter().enumerate() {
                prop_assert_eq!(row.iter().sum::<i64>(), row[source], "{:?}", case);
            }
        }
    }

    #[test]
    fn balanced_imbalance_is_the_bound_of_the_worst_set(case in case(3000), scale in 1e-3_f64..1e3) {
        let load: Vec<f64> = case.load().iter().map(|&load| load as f64 * scale).collect();
        let found = imbalance(&case.matrix(), &load, case.ranks, Policy::Balanced).unwrap();
        let mean = case.load().iter().sum::<i64>() as f64 / case.ranks as f64;
        let worst = case.sets().map(|(ranks, load)| load as f64 / f64::from(ranks)).fold(0.0, f64::max);
        let expected = if mean == 0.0 { 1.0 } else { worst / mean };
        prop_assert!((found / expected - 1.0).abs() < 1e-9, "{} for {}", found, expected);
    }

    #[test]
    fn even_imbalance_is_what_the_even_split_does(case in case(3000)) {
        let large = Case { tokens: case.tokens.iter().map(|row| row.iter().map(|count| count << 30).collect()).collect(), ..case };
        let load = large.load();
        let found = imbalance(&large.matrix(), &load.iter().map(|&load| load as f64).collect::<Vec<_>>(), large.ranks, Policy::Even).unwrap();
        let mean = load.iter().sum::<i64>() as f64 / large.ranks as f64;
        let expected = if mean == 0.0 { 1.0 } else { large.busiest(&large.table(Policy::Even)) as f64 / mean };
        prop_assert!((found / expected - 1.0).abs() < 1e-6, "{} for {}", found, expected);
    }
}
