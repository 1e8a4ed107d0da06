//! Which rank holds which expert: exactly full ranks, the widest spread, the fewest fetches.

use super::flow::Table;
use crate::ensure;
use crate::error::Result;

/// Places `replicas[e]` replicas of each expert: `[ranks, experts]`, how many replicas each rank holds.
///
/// Every rank gets exactly `slots` replicas and every expert `min(replicas, ranks)` distinct ranks; an expert with more
/// replicas than ranks is on all of them, as evenly as can be. Among all such placements it returns one in which the
/// fewest (rank, expert) pairs are new since `previous`, a `[ranks, experts]` matrix whose rows are zero for new ranks.
///
/// ```
/// // 3 ranks × 2 slots, experts with 3, 2 and 1 replicas.
/// let matrix = evermoe::placement::place(&[3, 2, 1], 3, 2, None)?;
/// assert_eq!(matrix, [1, 1, 0,  1, 1, 0,  1, 0, 1]);
/// // Rank 2 held experts 0 and 1, rank 1 held 0 and 2, rank 0 is new: it fetches two, nobody else moves.
/// let previous = [0, 0, 0,  1, 0, 1,  1, 1, 0];
/// let matrix = evermoe::placement::place(&[3, 2, 1], 3, 2, Some(&previous))?;
/// assert_eq!(matrix, [1, 1, 0,  1, 0, 1,  1, 1, 0]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) when the replicas do not sum to `ranks · slots`, an expert has
/// none, or `previous` has another size.
pub fn place(replicas: &[i64], ranks: usize, slots: usize, previous: Option<&[i64]>) -> Result<Vec<i64>> {
    let experts = replicas.len();
    check(replicas, ranks, slots, previous)?;
    // Every rank holds `each[e]`; the rest of an expert's replicas go to distinct ranks, one for each.
    let each: Vec<usize> = replicas.iter().map(|&count| count as usize / ranks).collect();
    let rest: Vec<usize> = replicas.iter().map(|&count| count as usize % ranks).collect();
    let room = slots - each.iter().sum::<usize>();
    let table = Table::new(rest, vec![room; ranks], costs(&each, ranks, previous)).fill();
    let mut matrix = vec![0; ranks * experts];
    for rank in 0..ranks {
        for expert in 0..experts {
            matrix[rank * experts + expert] = each[expert] as i64 + i64::from(table[expert * ranks + rank]);
        }
    }
    Ok(matrix)
}

fn check(replicas: &[i64], ranks: usize, slots: usize, previous: Option<&[i64]>) -> Result<()> {
    let experts = replicas.len();
    ensure!(ranks > 0 && slots > 0, "ranks, slots: expected 1 or more, got {ranks} ranks × {slots} slots");
    if let Some(expert) = replicas.iter().position(|&count| count < 1) {
        ensure!(false, "replicas: expert {expert} has {}; expected 1 or more", replicas[expert]);
    }
    let sum: i128 = replicas.iter().map(|&count| i128::from(count)).sum();
    let places = ranks as i128 * slots as i128;
    ensure!(sum == places, "replicas: they sum to {sum}; expected {ranks} ranks × {slots} slots = {places}");
    let size = previous.map_or(ranks * experts, <[i64]>::len);
    ensure!(
        size == ranks * experts,
        "previous: expected {ranks} ranks × {experts} experts, got {size} numbers"
    );
    Ok(())
}

/// `[experts, ranks]`: true where one more replica makes the rank fetch the expert, which it neither held nor gets anyway.
/// Without a previous placement all are equal.
fn costs(each: &[usize], ranks: usize, previous: Option<&[i64]>) -> Vec<bool> {
    let experts = each.len();
    let Some(previous) = previous.filter(|previous| previous.iter().any(|&held| held > 0)) else {
        return vec![false; experts * ranks];
    };
    let is_new = |expert: usize, rank: usize| each[expert] == 0 && previous[rank * experts + expert] <= 0;
    (0..experts * ranks).map(|cell| is_new(cell / ranks, cell % ranks)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_replicas_than_ranks_are_spread_evenly() {
        assert_eq!(place(&[5, 3], 2, 4, None).unwrap(), [3, 1, 2, 2]);
    }

    #[test]
    fn one_replica_more_is_one_fetch() {
        // Expert 2 gains the replica that expert 0 loses: one fetch, by the rank that gives expert 0 up.
        let previous = [1, 1, 0, 1, 1, 0, 1, 0, 1];
        assert_eq!(place(&[2, 2, 2], 3, 2, Some(&previous)).unwrap(), [0, 1, 1, 1, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |replicas: &[i64], previous| place(replicas, 2, 2, previous).unwrap_err().to_string();
        assert!(message(&[2, 1], None).contains("replicas: they sum to 3; expected 2 ranks × 2 slots = 4"));
        assert!(message(&[4, 0], None).contains("replicas: expert 1 has 0"));
        assert!(message(&[2, 2], Some(&[1, 1])).contains("previous: expected 2 ranks × 2 experts, got 2"));
    }
}
