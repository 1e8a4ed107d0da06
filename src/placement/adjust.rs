//! The previous placement with the minimum number of exchanged replicas for the wanted counts.

use super::rows::{Rows, add};

/// Maximum (node, expert) pairs × exchanges: some tens of milliseconds.
const MAX_WORK: usize = 1 << 24;

/// Returns the previous placement with the wanted replicas: on some nodes, an expert with too many replicas gives its
/// slot to one with too few. Each exchange is made on the node that then has the least load and does not hold the
/// expert yet. None if a node has free or missing slots, as new nodes do, or if no such exchange is left.
///
/// ```text
/// replicas 2 2 2 → 1 3 2      node 0: 0 1      1 1
///                             node 1: 1 2  →   1 2
///                             node 2: 2 0      2 0
/// ```
///
/// `replicas` is `[experts]`, `weight` the load of one replica of each expert.
pub(super) fn adjusted(previous: &Rows, replicas: &[i64], slots: usize, weight: &[f64]) -> Option<Rows> {
    let counted = |row: &Vec<(usize, i64)>| row.iter().map(|&(_, count)| count).sum::<i64>();
    if previous.is_empty() || !previous.iter().all(|row| counted(row) == slots as i64) {
        return None;
    }
    let mut surplus: Vec<i64> = replicas.iter().map(|count| -count).collect();
    previous.iter().flatten().for_each(|&(expert, count)| surplus[expert] += count);
    if surplus.iter().sum::<i64>() != 0 {
        return None;
    }
    let exchanges: i64 = surplus.iter().filter(|&&more| more > 0).sum();
    if (previous.len() * replicas.len()).saturating_mul(exchanges as usize) > MAX_WORK {
        return None;
    }
    let load = |row: &Vec<(usize, i64)>| row.iter().map(|&(held, count)| count as f64 * weight[held]).sum();
    let mut loads: Vec<f64> = previous.iter().map(load).collect();
    let mut rows = previous.clone();
    while let Some(taker) = surplus.iter().position(|&more| more < 0) {
        let mut best: Option<(f64, usize, usize)> = None;
        let lacks = |row: &[(usize, i64)]| row.iter().all(|&(held, _)| held != taker);
        for (node, row) in rows.iter().enumerate().filter(|(_, row)| lacks(row)) {
            for &(giver, _) in row.iter().filter(|&&(giver, _)| surplus[giver] > 0) {
                let after = loads[node] - weight[giver] + weight[taker];
                if best.is_none_or(|(least, ..)| after < least) {
                    best = Some((after, node, giver));
                }
            }
        }
        let (after, node, giver) = best?;
        exchange(&mut rows[node], giver, taker);
        surplus[giver] -= 1;
        surplus[taker] += 1;
        loads[node] = after;
    }
    Some(rows)
}

/// Moves a slot from a replica of `giver` to one of `taker`, which the node does not hold.
fn exchange(row: &mut Vec<(usize, i64)>, giver: usize, taker: usize) {
    row.iter_mut().filter(|(held, _)| *held == giver).for_each(|(_, count)| *count -= 1);
    row.retain(|&(_, count)| count > 0);
    add(row, taker);
}

#[cfg(test)]
mod tests {
    use super::super::rows::{matrix_of, rows_of};
    use proptest::prelude::*;

    /// Matrices `[nodes, experts]` instead of rows.
    fn adjusted(previous: &[i64], replicas: &[i64], slots: usize, weight: &[f64]) -> Option<Vec<i64>> {
        let experts = replicas.len();
        let rows = super::adjusted(&rows_of(previous, experts), replicas, slots, weight)?;
        Some(matrix_of(rows.iter().map(Vec::as_slice), experts))
    }

    proptest! {
        #[test]
        fn rows_and_columns_have_their_sums_and_only_the_difference_moves(
            (nodes, experts, slots) in (1_usize..6, 2_usize..6, 1_usize..4),
            cells in prop::collection::vec(0_usize..1000, 40),
            wanted in prop::collection::vec(0_usize..1000, 40),
            weight in prop::collection::vec(0.0_f64..10.0, 6),
        ) {
            let mut previous = vec![0_i64; nodes * experts];
            let mut replicas = vec![0_i64; experts];
            for slot in 0..nodes * slots {
                previous[slot / slots * experts + cells[slot] % experts] += 1;
                replicas[wanted[slot] % experts] += 1;
            }
            if let Some(matrix) = adjusted(&previous, &replicas, slots, &weight[..experts]) {
                prop_assert!(matrix.chunks_exact(experts).all(|row| row.iter().sum::<i64>() == slots as i64));
                for expert in 0..experts {
                    let column = |of: &[i64]| of.iter().skip(expert).step_by(experts).sum::<i64>();
                    prop_assert_eq!(column(&matrix), replicas[expert]);
                    let gained: i64 = (0..nodes).map(|n| (matrix[n * experts + expert] - previous[n * experts + expert]).max(0)).sum();
                    prop_assert_eq!(gained, (column(&matrix) - column(&previous)).max(0));
                }
            }
        }
    }

    #[test]
    fn an_exchange_is_where_the_load_is_least_and_the_expert_is_not() {
        let previous = [1, 1, 0, 0, 1, 1, 1, 0, 1];
        assert_eq!(adjusted(&previous, &[2, 2, 2], 2, &[1.0; 3]).unwrap(), previous);
        // Expert 1 is missing only on node 2, which gives up expert 0.
        assert_eq!(adjusted(&previous, &[1, 3, 2], 2, &[1.0; 3]).unwrap(), [1, 1, 0, 0, 1, 1, 0, 1, 1]);
        assert_eq!(adjusted(&previous, &[1, 4, 1], 2, &[1.0; 3]), None, "it would be on a node twice");
        assert_eq!(adjusted(&[0; 9], &[2, 2, 2], 2, &[1.0; 3]), None, "nodes are new");
    }
}
