//! The placements of the Lazarus paper: maximum rank overlap, and the two it is compared with.

use std::cmp::Reverse;

/// Maximum rank overlap (Lazarus §4.2) as printed: `[nodes, experts]` replicas.
///
/// Experts ascending by replicas form groups of `slots`; group i takes as many nodes as its first expert has replicas,
/// each with one replica of every expert of the group; replicas that are left fill up the nodes with the most room,
/// those without the expert first.
///
/// ```text
/// 4 nodes × 2 slots, replicas 2 2 1 3: the groups are (2, 0) and (1, 3)
/// experts 2 and 0 → node 0; experts 1 and 3 → nodes 1 and 2; left over 0, 3 → node 3
/// ```
pub(super) fn mro(replicas: &[i64], nodes: usize, slots: usize) -> Vec<i64> {
    let experts = replicas.len();
    let mut ascending: Vec<usize> = (0..experts).collect();
    ascending.sort_by_key(|&expert| (replicas[expert], expert));
    let mut left = replicas.to_vec();
    let mut matrix = vec![0; nodes * experts];
    let mut room = vec![slots; nodes];
    let mut taken = 0_usize;
    for group in ascending.chunks(slots) {
        let wanted = usize::try_from(replicas[group[0]]).unwrap_or(usize::MAX);
        let last = nodes.min(taken.saturating_add(wanted));
        for node in taken..last {
            for &expert in group {
                matrix[node * experts + expert] = 1;
                left[expert] -= 1;
            }
            room[node] -= group.len();
        }
        taken = last;
    }
    for expert in ascending {
        while left[expert] > 0 {
            let open = (0..nodes).filter(|&node| room[node] > 0);
            let Some(node) =
                open.min_by_key(|&node| (matrix[node * experts + expert] > 0, Reverse(room[node]), node))
            else {
                unreachable!("replicas fill the slots exactly");
            };
            matrix[node * experts + expert] += 1;
            room[node] -= 1;
            left[expert] -= 1;
        }
    }
    matrix
}

/// Replicas in the order of the experts, dealt to the nodes in turn: `[nodes, experts]`.
///
/// ```text
/// 3 nodes × 2 slots, replicas 3 2 1: 0 0 0 1 1 2 → node 0: 0 1, node 1: 0 1, node 2: 0 2
/// ```
pub(super) fn spread(replicas: &[i64], nodes: usize) -> Vec<i64> {
    deal(replicas, nodes, |position| position % nodes)
}

/// Replicas in the order of the experts, node after node: as few nodes for each expert as can be. `[nodes, experts]`.
///
/// ```text
/// 3 nodes × 2 slots, replicas 3 2 1: 0 0 | 0 1 | 1 2
/// ```
pub(super) fn compact(replicas: &[i64], nodes: usize, slots: usize) -> Vec<i64> {
    deal(replicas, nodes, |position| position / slots)
}

fn deal(replicas: &[i64], nodes: usize, node_of: impl Fn(usize) -> usize) -> Vec<i64> {
    let experts = replicas.len();
    let mut matrix = vec![0; nodes * experts];
    let each = replicas.iter().enumerate().flat_map(|(expert, &count)| (0..count).map(move |_| expert));
    for (position, expert) in each.enumerate() {
        matrix[node_of(position) * experts + expert] += 1;
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_documentation() {
        assert_eq!(mro(&[2, 2, 1, 3], 4, 2), [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1]);
        assert_eq!(spread(&[3, 2, 1], 3), [1, 1, 0, 1, 1, 0, 1, 0, 1]);
        assert_eq!(compact(&[3, 2, 1], 3, 2), [2, 0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn mro_is_cut_when_the_nodes_run_out() {
        // Theorem 1 of the paper fails here: the last group gets one node for an expert with two replicas.
        assert_eq!(mro(&[2, 2, 2], 3, 2), [1, 1, 0, 1, 1, 0, 0, 0, 2]);
    }
}
