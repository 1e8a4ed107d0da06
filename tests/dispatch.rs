//! The split of tokens over replicas: properties for all inputs, and exhaustive tests of small sizes.

use super::common::all;
use evermoe::dispatch::{Policy, split_expert, split_tokens};
use proptest::prelude::*;

/// `[ranks, ranks]`: tokens that the row sends to the column.
fn table(tokens: &[i64], replicas: &[i64]) -> Vec<Vec<i64>> {
    let mut table = vec![vec![0; tokens.len()]; tokens.len()];
    split_expert(tokens, replicas, |route| {
        assert_eq!(table[route.source][route.destination], 0, "a route comes once");
        table[route.source][route.destination] = route.tokens;
    });
    table
}

/// The exact share of each entry in floating point, from the formula as the paper has it.
fn shares(tokens: &[i64], replicas: &[i64]) -> Vec<Vec<f64>> {
    let [total, held]: [f64; 2] = [tokens, replicas].map(|counts| counts.iter().sum::<i64>() as f64);
    let capacity = |rank: usize| total * replicas[rank] as f64 / held;
    let kept = |rank: usize| (tokens[rank] as f64).min(capacity(rank));
    let room: Vec<f64> =
        (0..tokens.len()).map(|rank| (capacity(rank) - tokens[rank] as f64).max(0.0)).collect();
    let all_room: f64 = room.iter().sum();
    let sent = |source: usize, destination: usize| match (source == destination, all_room > 1e-9) {
        (true, _) => kept(source),
        (false, true) => (tokens[source] as f64 - kept(source)) * room[destination] / all_room,
        (false, false) => 0.0,
    };
    (0..tokens.len()).map(|source| (0..tokens.len()).map(|other| sent(source, other)).collect()).collect()
}

/// Checks one expert and returns how far the worst column total is from its exact value.
fn check(tokens: &[i64], replicas: &[i64]) -> f64 {
    let (table, shares) = (table(tokens, replicas), shares(tokens, replicas));
    for (source, row) in table.iter().enumerate() {
        assert_eq!(
            row.iter().sum::<i64>(),
            tokens[source],
            "row {source} of {tokens:?} over {replicas:?}: {table:?}"
        );
        for (destination, &count) in row.iter().enumerate() {
            let share = shares[source][destination];
            assert!(count == 0 || replicas[destination] > 0, "rank {destination} is no holder: {table:?}");
            assert!(
                count >= 0 && (count as f64 - share).abs() < 1.0 - 1e-9,
                "{count} for {share}: {table:?}"
            );
        }
    }
    let column = |rank: usize| {
        let exact: f64 = shares.iter().map(|row| row[rank]).sum();
        (table.iter().map(|row| row[rank]).sum::<i64>() as f64 - exact).abs()
    };
    (0..tokens.len()).map(column).fold(0.0, f64::max)
}

#[test]
fn everything_on_three_ranks() {
    for replicas in all(3, 2).iter().filter(|replicas| replicas.iter().sum::<i64>() > 0) {
        for tokens in all(3, 6) {
            assert!(check(&tokens, replicas) < 1.0, "column of {tokens:?} over {replicas:?}");
        }
    }
}

#[test]
fn everything_on_four_ranks() {
    for replicas in all(4, 2).iter().filter(|replicas| replicas.iter().sum::<i64>() > 0) {
        for tokens in all(4, 3) {
            assert!(check(&tokens, replicas) < 1.0, "column of {tokens:?} over {replicas:?}");
        }
    }
}

fn expert() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    (1_usize..=24).prop_flat_map(|ranks| {
        let tokens =
            prop::collection::vec(prop_oneof![2 => Just(0), 5 => 0_i64..12, 3 => 0_i64..5000], ranks);
        let replicas = prop::collection::vec(prop_oneof![3 => Just(0), 3 => 1_i64..4], ranks);
        (tokens, replicas).prop_filter("a holder", |(_, replicas)| replicas.iter().sum::<i64>() > 0)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn rows_are_kept_and_entries_and_columns_stay_near_their_exact_share((tokens, replicas) in expert()) {
        let error = check(&tokens, &replicas);
        prop_assert!(error < 2.0, "a column is off by {error}");
    }

    #[test]
    fn what_one_rank_sends_is_what_the_other_receives(experts in prop::collection::vec(
        (prop::collection::vec(0_i64..50, 5), prop::collection::vec(0_i64..3, 4)), 1..6,
    )) {
        let (ranks, count) = (5, experts.len());
        // The last rank always holds a replica, so that every expert has one.
        let held = |rank: usize, expert: usize| *experts[expert].1.get(rank).unwrap_or(&1);
        let tokens: Vec<i64> = experts.iter().flat_map(|(tokens, _)| tokens.clone()).collect();
        let matrix: Vec<i64> = (0..ranks).flat_map(|rank| (0..count).map(move |expert| held(rank, expert))).collect();
        let split: Vec<_> = (0..ranks).map(|rank| split_tokens(&tokens, &matrix, count, ranks, rank, Policy::Even).unwrap()).collect();
        for expert in 0..count {
            for source in 0..ranks {
                let sent = &split[source].send[expert * ranks..(expert + 1) * ranks];
                prop_assert_eq!(sent.iter().sum::<i64>(), tokens[expert * ranks + source]);
                for destination in 0..ranks {
                    prop_assert_eq!(sent[destination], split[destination].receive[source * count + expert]);
                }
            }
        }
    }

    #[test]
    fn huge_counts_are_split_exactly(expert in prop::collection::vec((0_i64..1 << 50, 0_i64..4), 2..8)) {
        let (tokens, mut replicas): (Vec<i64>, Vec<i64>) = expert.into_iter().unzip();
        replicas[0] += 1;
        let [total, held]: [i128; 2] = [&tokens, &replicas].map(|counts| counts.iter().map(|&n| i128::from(n)).sum());
        // Room left, or left over if negative, scaled by the replicas.
        let room: Vec<i128> = tokens.iter().zip(&replicas).map(|(&t, &r)| total * i128::from(r) - held * i128::from(t)).collect();
        let all_room: i128 = room.iter().map(|&room| room.max(0)).sum();
        for (source, row) in table(&tokens, &replicas).iter().enumerate() {
            prop_assert_eq!(row.iter().sum::<i64>(), tokens[source]);
            for (destination, &count) in row.iter().enumerate() {
                let near = if source == destination {
                    let kept = held * i128::from(tokens[source]) + room[source].min(0);
                    (held * i128::from(count) - kept).abs() < held
                } else {
                    let sent = -room[source].min(0) * room[destination].max(0);
                    let scale = held * all_room.max(1);
                    (scale * i128::from(count) - sent).abs() < scale
                };
                prop_assert!(near, "{} to {}: {}", source, destination, count);
            }
        }
    }
}
