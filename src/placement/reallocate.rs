//! Replicas per expert after a change of load, with as few changes as necessary.

use super::allocate::{allocate, floor, integers};
use crate::ensure;
use crate::error::Result;
use std::cmp::Ordering;

/// Factor, as a fraction, by which a replica may exceed the tokens of the busiest one of [`allocate`]: loads that each
/// drift by 5 % up or down differ by 1.05 / 0.95.
const TOLERATED: (u128, u128) = (21, 19);

/// Returns the replicas of each expert for its load, like [`allocate`], starting from the current ones.
///
/// The busiest expert takes a replica from the expert that loses least by it, until no replica has more than 1.105
/// times the tokens of the busiest one of [`allocate`]. If the current replicas do not fill the slots, as when nodes
/// come or go, or an expert has fewer than it must, the result is that of [`allocate`].
///
/// ```
/// use evermoe::placement::{allocate, reallocate};
/// // 4 nodes × 2 slots. A drift by 5 % moves nothing, though a new allocation would.
/// assert_eq!(allocate(&[21.0, 19.0, 20.0], 4, 2, 1)?, [4, 2, 2]);
/// assert_eq!(reallocate(&[21.0, 19.0, 20.0], 4, 2, 1, &[2, 3, 3])?, [2, 3, 3]);
/// // Where the first has more, it gets replicas one by one: 30 over 2 is too much, and 20 over 2 is not.
/// assert_eq!(reallocate(&[30.0, 20.0, 20.0], 4, 2, 1, &[2, 3, 3])?, [3, 2, 3]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// As [`allocate`]; also [`Error::Invalid`](crate::Error::Invalid) if `previous` differs in length from the
/// loads, or has a negative number.
pub fn reallocate(
    load: &[f64],
    nodes: usize,
    slots: usize,
    min_replicas: usize,
    previous: &[i64],
) -> Result<Vec<i64>> {
    let fresh = allocate(load, nodes, slots, min_replicas)?;
    ensure!(
        previous.len() == load.len(),
        "previous: expected one number for each of {} experts, got {}",
        load.len(),
        previous.len()
    );
    if let Some(expert) = previous.iter().position(|&count| count < 0) {
        ensure!(false, "previous: expert {expert} has {}; expected 0 or more", previous[expert]);
    }
    let (places, loads) = (nodes * slots, integers(load));
    let least = floor(load.len(), places, min_replicas) as i64;
    let sum: i128 = previous.iter().map(|&count| i128::from(count)).sum();
    if sum != places as i128 || previous.iter().any(|&count| count < least) {
        return Ok(fresh);
    }
    let mut counts = previous.to_vec();
    let limit = busiest(&loads, &fresh);
    let limit = (loads[limit] * TOLERATED.0, fresh[limit] as u128 * TOLERATED.1);
    loop {
        let taker = busiest(&loads, &counts);
        if compare((loads[taker], counts[taker] as u128), limit).is_le() {
            return Ok(counts);
        }
        let giver = giver(&loads, &counts, least).filter(|&giver| {
            // After the exchange the giver must have fewer tokens per replica than the busiest now, or the two would
            // only swap.
            giver != taker
                && compare((loads[giver], counts[giver] as u128 - 1), (loads[taker], counts[taker] as u128))
                    .is_lt()
        });
        let Some(giver) = giver else { return Ok(fresh) };
        counts[giver] -= 1;
        counts[taker] += 1;
    }
}

/// The expert with the most tokens per replica.
fn busiest(loads: &[u128], counts: &[i64]) -> usize {
    let each = |&expert: &usize| (loads[expert], counts[expert] as u128);
    (0..loads.len()).rev().max_by(|a, b| compare(each(a), each(b))).unwrap_or(0)
}

/// The expert with the fewest tokens per replica after giving one up.
fn giver(loads: &[u128], counts: &[i64], least: i64) -> Option<usize> {
    let each = |&expert: &usize| (loads[expert], counts[expert] as u128 - 1);
    (0..loads.len()).filter(|&expert| counts[expert] > least).min_by(|a, b| compare(each(a), each(b)))
}

/// Compares two fractions, of terms below 2^64.
fn compare(one: (u128, u128), two: (u128, u128)) -> Ordering {
    (one.0 * two.1).cmp(&(two.0 * one.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn most(load: &[f64], counts: &[i64]) -> f64 {
        load.iter().zip(counts).map(|(load, &count)| load / count as f64).fold(0.0, f64::max)
    }

    proptest! {
        #[test]
        fn it_is_an_allocation_within_the_tolerance(
            (load, before) in (2_usize..20).prop_flat_map(|experts| {
                let loads = || prop::collection::vec(prop_oneof![Just(0.0), 0.1_f64..100.0, 1e3_f64..1e6], experts);
                (loads(), loads())
            }),
            nodes in 1_usize..12,
            slots in 1_usize..8,
            min_replicas in 1_usize..4,
        ) {
            prop_assume!(nodes * slots >= load.len());
            let previous = allocate(&before, nodes, slots, min_replicas).unwrap();
            let fresh = allocate(&load, nodes, slots, min_replicas).unwrap();
            let counts = reallocate(&load, nodes, slots, min_replicas, &previous).unwrap();
            prop_assert_eq!(counts.iter().sum::<i64>(), (nodes * slots) as i64);
            let least = min_replicas.min(nodes * slots / load.len()) as i64;
            prop_assert!(counts.iter().all(|&count| count >= least), "{:?}", counts);
            prop_assert!(most(&load, &counts) <= most(&load, &fresh) * 21.0 / 19.0 * (1.0 + 1e-9));
            prop_assert_eq!(&reallocate(&load, nodes, slots, min_replicas, &counts).unwrap(), &counts);
        }

        #[test]
        fn a_load_that_doubles_gets_what_it_needs(hot in 0_usize..8, base in 1.0_f64..1e6) {
            let mut load = [base; 8];
            let before = allocate(&load, 8, 4, 1).unwrap();
            load[hot] *= 2.0;
            let after = reallocate(&load, 8, 4, 1, &before).unwrap();
            prop_assert!(after[hot] > before[hot]);
        }
    }

    #[test]
    fn other_slots_or_too_few_replicas_are_allocated_anew() {
        for previous in [[2, 2, 2, 2], [0, 0, 0, 0], [i64::MAX, i64::MAX, 2, 2], [6, 1, 3, 2]] {
            let fresh = allocate(&[8.0, 9.0, 8.0, 8.0], 3, 4, 2).unwrap();
            assert_eq!(reallocate(&[8.0, 9.0, 8.0, 8.0], 3, 4, 2, &previous).unwrap(), fresh);
        }
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |previous: &[i64]| reallocate(&[1.0, 1.0], 2, 2, 1, previous).unwrap_err().to_string();
        assert!(message(&[1]).contains("previous: expected one number for each of 2 experts, got 1"));
        assert!(message(&[1, -1]).contains("previous: expert 1 has -1"));
    }
}
