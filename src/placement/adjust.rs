//! The previous placement with as few replicas exchanged as the wanted numbers of replicas need.

/// (node, expert) pairs times exchanges up to which it is looked for: some tens of milliseconds.
const MOST_WORK: usize = 1 << 24;

/// The previous placement with the wanted replicas: on some nodes an expert that has too many gives its slot to one that
/// has too few. Each exchange is where the node then has the least load, and the expert is not yet. None where a node
/// has free slots or too few, as new nodes do, or where no such exchange is left.
///
/// ```text
/// replicas 2 2 2 → 1 3 2      node 0: 0 1      1 1
///                             node 1: 1 2  →   1 2
///                             node 2: 2 0      2 0
/// ```
///
/// `previous` is `[nodes, experts]`, `replicas` `[experts]`, `weight` the load of one replica of each expert.
pub(super) fn adjusted(previous: &[i64], replicas: &[i64], slots: usize, weight: &[f64]) -> Option<Vec<i64>> {
    let experts = replicas.len();
    let mut matrix = previous.to_vec();
    if !matrix.chunks_exact(experts).all(|row| row.iter().sum::<i64>() == slots as i64) {
        return None;
    }
    let now = |expert: usize| previous.iter().skip(expert).step_by(experts).sum::<i64>();
    let mut surplus: Vec<i64> = (0..experts).map(|expert| now(expert) - replicas[expert]).collect();
    if surplus.iter().sum::<i64>() != 0 {
        return None;
    }
    let exchanges: i64 = surplus.iter().filter(|&&more| more > 0).sum();
    if previous.len().saturating_mul(exchanges as usize) > MOST_WORK {
        return None;
    }
    let load = |row: &[i64]| row.iter().zip(weight).map(|(&count, weight)| count as f64 * weight).sum();
    let mut loads: Vec<f64> = matrix.chunks_exact(experts).map(load).collect();
    while let Some(taker) = surplus.iter().position(|&more| more < 0) {
        let mut best: Option<(f64, usize, usize)> = None;
        for (node, row) in matrix.chunks_exact(experts).enumerate().filter(|(_, row)| row[taker] == 0) {
            for giver in (0..experts).filter(|&giver| surplus[giver] > 0 && row[giver] > 0) {
                let after = loads[node] - weight[giver] + weight[taker];
                if best.is_none_or(|(least, ..)| after < least) {
                    best = Some((after, node, giver));
                }
            }
        }
        let (after, node, giver) = best?;
        matrix[node * experts + giver] -= 1;
        matrix[node * experts + taker] += 1;
        surplus[giver] -= 1;
        surplus[taker] += 1;
        loads[node] = after;
    }
    Some(matrix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        // Expert 1 is not on node 2 alone, which gives up expert 0.
        assert_eq!(adjusted(&previous, &[1, 3, 2], 2, &[1.0; 3]).unwrap(), [1, 1, 0, 0, 1, 1, 0, 1, 1]);
        assert_eq!(adjusted(&previous, &[1, 4, 1], 2, &[1.0; 3]), None, "it would be on a node twice");
        assert_eq!(adjusted(&[0; 9], &[2, 2, 2], 2, &[1.0; 3]), None, "nodes are new");
    }
}
