//! The placements of the Lazarus paper: maximum rank overlap, and the two baselines.
//!
//! Nodes that fail together count as one place with the sum of their slots; its replicas are then dealt to its nodes:
//! "if a node has multiple GPUs, Lazarus distributes the assigned replicas among all GPUs on that node" (§4.1).

use super::domains::nodes_of;
use super::layout::Problem;
use super::rows::{Rows, add};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Maximum rank overlap (Lazarus §4.2) as in the paper: replicas of each node.
///
/// Experts by ascending replicas form groups, each of as many experts as a place has slots. Group i takes as many
/// places as its first expert has replicas, each with one replica of every expert of the group. Remaining replicas fill
/// the places with the most room, those without the expert first.
///
/// ```text
/// 4 nodes × 2 slots, replicas 2 2 1 3: the groups are (2, 0) and (1, 3)
/// experts 2 and 0 → node 0; experts 1 and 3 → nodes 1 and 2; left over 0, 3 → node 3
/// ```
pub(super) fn mro(problem: &Problem, replicas: &[i64]) -> Rows {
    let mut places = Places::new(problem, replicas);
    let places_count = problem.domains;
    let mut ascending: Vec<usize> = (0..replicas.len()).collect();
    ascending.sort_by_key(|&expert| (replicas[expert], expert));
    let mut taken = 0_usize;
    for group in ascending.chunks(places.room.iter().copied().min().unwrap_or(1)) {
        let wanted = usize::try_from(replicas[group[0]]).unwrap_or(usize::MAX);
        let last = places_count.min(taken.saturating_add(wanted));
        for place in taken..last {
            group.iter().for_each(|&expert| places.put(place, expert));
        }
        taken = last;
    }
    ascending.into_iter().for_each(|expert| places.fill(expert, i64::MAX));
    places.dealt(problem)
}

/// Replicas in the order of the experts, dealt to the nodes in turn. If places differ in size, they are dealt by
/// remaining room, starting with those that every expert must have in different places.
///
/// ```text
/// 3 nodes × 2 slots, replicas 3 2 1: 0 0 0 1 1 2 → node 0: 0 1, node 1: 0 1, node 2: 0 2
/// ```
pub(super) fn spread(problem: &Problem, replicas: &[i64]) -> Rows {
    if problem.nodes_fail_alone() {
        return deal(replicas, problem.nodes, |position| position % problem.nodes);
    }
    let mut places = Places::new(problem, replicas);
    for most in [problem.spread as i64, i64::MAX] {
        (0..replicas.len()).for_each(|expert| places.fill(expert, most));
    }
    places.dealt(problem)
}

/// Replicas in the order of the experts, node after node: the minimum number of nodes for each expert.
///
/// ```text
/// 3 nodes × 2 slots, replicas 3 2 1: 0 0 | 0 1 | 1 2
/// ```
pub(super) fn compact(replicas: &[i64], nodes: usize, slots: usize) -> Rows {
    deal(replicas, nodes, |position| position / slots)
}

fn deal(replicas: &[i64], nodes: usize, node_of: impl Fn(usize) -> usize) -> Rows {
    let mut rows = vec![Vec::new(); nodes];
    let each = replicas.iter().enumerate().flat_map(|(expert, &count)| (0..count).map(move |_| expert));
    for (position, expert) in each.enumerate() {
        add(&mut rows[node_of(position)], expert);
    }
    rows
}

/// Failure domains, each as one place for replicas.
struct Places {
    /// Replicas of each domain.
    rows: Rows,
    /// Remaining slots of each domain.
    room: Vec<usize>,
    /// Remaining replicas of each expert.
    left: Vec<i64>,
}

impl Places {
    fn new(problem: &Problem, replicas: &[i64]) -> Self {
        let mut room = vec![0; problem.domains];
        problem.domain.iter().for_each(|&domain| room[domain] += problem.slots_of_node());
        Self { rows: vec![Vec::new(); problem.domains], room, left: replicas.to_vec() }
    }

    fn put(&mut self, place: usize, expert: usize) {
        add(&mut self.rows[place], expert);
        self.left[expert] -= 1;
        self.room[place] -= 1;
    }

    /// Puts up to `most` of an expert's remaining replicas where the most room is, places without it first.
    fn fill(&mut self, expert: usize, most: i64) {
        let wanted = self.left[expert].min(most).max(0) as usize;
        if wanted == 0 {
            return;
        }
        let lacks = |place: usize| self.rows[place].iter().all(|&(held, _)| held != expert);
        let open = |&place: &usize| self.room[place] > 0 && lacks(place);
        let mut fresh: Vec<usize> = (0..self.room.len()).filter(open).collect();
        if wanted < fresh.len() {
            fresh.select_nth_unstable_by_key(wanted, |&place| (Reverse(self.room[place]), place));
            fresh.truncate(wanted);
        }
        fresh.iter().for_each(|&place| self.put(place, expert));
        if fresh.len() < wanted {
            let rooms = self.room.iter().enumerate().map(|(place, &room)| (room, Reverse(place)));
            let mut heap: BinaryHeap<(usize, Reverse<usize>)> = rooms.collect();
            for _ in fresh.len()..wanted {
                let Some((room, Reverse(place))) = heap.pop() else { return };
                self.put(place, expert);
                heap.push((room - 1, Reverse(place)));
            }
        }
    }

    /// Distributes each place's replicas over its nodes, heaviest first to the node with the least load.
    fn dealt(mut self, problem: &Problem) -> Rows {
        if problem.nodes_fail_alone() {
            // A place is a node; domains are numbered as nodes only if none was named.
            return problem.domain.iter().map(|&place| std::mem::take(&mut self.rows[place])).collect();
        }
        let mut rows = vec![Vec::new(); problem.nodes];
        for (mut row, nodes) in self.rows.into_iter().zip(nodes_of(&problem.domain)) {
            row.sort_by(|&(a, _), &(b, _)| problem.weight[b].total_cmp(&problem.weight[a]).then(a.cmp(&b)));
            // Loads are not negative, so their bit patterns are ordered.
            let rooms = nodes.into_iter().map(|node| Reverse((0, Reverse(problem.slots_of_node()), node)));
            let mut lightest: BinaryHeap<Reverse<(u64, Reverse<usize>, usize)>> = rooms.collect();
            for (expert, count) in row {
                for _ in 0..count {
                    let Some(Reverse((load, Reverse(room), node))) = lightest.pop() else {
                        unreachable!("a place has its nodes' slots");
                    };
                    add(&mut rows[node], expert);
                    if room > 1 {
                        let load = f64::from_bits(load) + problem.weight[expert];
                        lightest.push(Reverse((load.to_bits(), Reverse(room - 1), node)));
                    }
                }
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::super::place::{Policy, Request, problem_of};
    use super::super::rows::matrix_of;
    use super::*;

    fn of(replicas: &[i64], nodes: usize, slots: usize, domains: Option<&[Vec<usize>]>) -> Problem {
        let (policy, load, previous, failures) = (Policy::Mro, None, None, None);
        problem_of(&Request { replicas, nodes, slots, policy, load, previous, domains, failures }).unwrap()
    }

    fn matrix(rows: Rows, experts: usize) -> Vec<i64> {
        matrix_of(rows.iter().map(Vec::as_slice), experts)
    }

    #[test]
    fn the_examples_of_the_documentation() {
        let replicas = [2, 2, 1, 3];
        assert_eq!(
            matrix(mro(&of(&replicas, 4, 2, None), &replicas), 4),
            [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1]
        );
        let replicas = [3, 2, 1];
        assert_eq!(matrix(spread(&of(&replicas, 3, 2, None), &replicas), 3), [1, 1, 0, 1, 1, 0, 1, 0, 1]);
        assert_eq!(matrix(compact(&replicas, 3, 2), 3), [2, 0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn mro_is_cut_when_the_nodes_run_out() {
        // Theorem 1 of the paper fails here: the last group gets one node for an expert with two replicas.
        assert_eq!(matrix(mro(&of(&[2, 2, 2], 3, 2, None), &[2, 2, 2]), 3), [1, 1, 0, 1, 1, 0, 0, 0, 2]);
    }

    #[test]
    fn nodes_that_fail_together_share_what_their_domain_gets() {
        // Two machines of two ranks with two slots: four experts on each, one of each pair of ranks has each.
        let machines = [vec![0, 2], vec![1, 3]];
        for place in [mro, spread] {
            let rows = place(&of(&[2, 2, 2, 2], 4, 2, Some(&machines)), &[2, 2, 2, 2]);
            assert_eq!(matrix(rows, 4), [1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1]);
        }
        // A machine of one rank and one of two: all experts are on both.
        let machines = [vec![0], vec![1, 2]];
        assert_eq!(matrix(spread(&of(&[3, 3, 3], 3, 3, Some(&machines)), &[3, 3, 3]), 3), [1; 9]);
    }
}
