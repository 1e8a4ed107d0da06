//! The placements of the Lazarus paper: maximum rank overlap, and the two it is compared with.
//!
//! Nodes that fail together are one place of as many slots as they have together; what it gets is then dealt to its
//! nodes: "if a node has multiple GPUs, Lazarus distributes the assigned replicas among all GPUs on that node" (§4.1).

use super::domains::nodes_of;
use super::layout::Problem;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Maximum rank overlap (Lazarus §4.2) as printed: `[nodes, experts]` replicas.
///
/// Experts ascending by replicas form groups of as many as a place has slots; group i takes as many places as its first
/// expert has replicas, each with one replica of every expert of the group; replicas that are left fill up the places
/// with the most room, those without the expert first.
///
/// ```text
/// 4 nodes × 2 slots, replicas 2 2 1 3: the groups are (2, 0) and (1, 3)
/// experts 2 and 0 → node 0; experts 1 and 3 → nodes 1 and 2; left over 0, 3 → node 3
/// ```
pub(super) fn mro(problem: &Problem, replicas: &[i64]) -> Vec<i64> {
    let experts = replicas.len();
    let mut places = Places::new(problem, replicas);
    let places_count = problem.domains;
    let mut ascending: Vec<usize> = (0..experts).collect();
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

/// Replicas in the order of the experts, dealt to the nodes in turn: `[nodes, experts]`. To places of different sizes
/// they are dealt by the room that is left: first those that every expert must have in different ones.
///
/// ```text
/// 3 nodes × 2 slots, replicas 3 2 1: 0 0 0 1 1 2 → node 0: 0 1, node 1: 0 1, node 2: 0 2
/// ```
pub(super) fn spread(problem: &Problem, replicas: &[i64]) -> Vec<i64> {
    if problem.nodes_fail_alone() {
        return deal(replicas, problem.nodes, |position| position % problem.nodes);
    }
    let mut places = Places::new(problem, replicas);
    for most in [problem.spread as i64, i64::MAX] {
        (0..replicas.len()).for_each(|expert| places.fill(expert, most));
    }
    places.dealt(problem)
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

/// Failure domains, each as one place for replicas.
struct Places {
    experts: usize,
    /// `[domains, experts]` replicas.
    matrix: Vec<i64>,
    /// Slots of each domain that are left.
    room: Vec<usize>,
    /// Replicas of each expert that are left.
    left: Vec<i64>,
}

impl Places {
    fn new(problem: &Problem, replicas: &[i64]) -> Self {
        let mut room = vec![0; problem.domains];
        problem.domain.iter().for_each(|&domain| room[domain] += problem.slots_of_node());
        let experts = replicas.len();
        Self { experts, matrix: vec![0; problem.domains * experts], room, left: replicas.to_vec() }
    }

    fn put(&mut self, place: usize, expert: usize) {
        self.matrix[place * self.experts + expert] += 1;
        self.left[expert] -= 1;
        self.room[place] -= 1;
    }

    /// Puts up to `most` of what is left of an expert where the most room is, places without it first.
    fn fill(&mut self, expert: usize, most: i64) {
        let wanted = self.left[expert].min(most).max(0) as usize;
        let open = |&place: &usize| self.room[place] > 0 && self.matrix[place * self.experts + expert] == 0;
        let mut fresh: Vec<usize> = (0..self.room.len()).filter(open).collect();
        fresh.sort_by_key(|&place| (Reverse(self.room[place]), place));
        fresh.truncate(wanted);
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

    /// `[nodes, experts]`: each place's replicas on its nodes, heaviest first to the node with the least load.
    fn dealt(self, problem: &Problem) -> Vec<i64> {
        if problem.nodes_fail_alone() {
            // A place is a node, and domains are numbered as nodes are only where none was named.
            return (0..problem.nodes).flat_map(|node| self.row(problem.domain[node]).to_vec()).collect();
        }
        let experts = self.experts;
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| problem.weight[b].total_cmp(&problem.weight[a]).then(a.cmp(&b)));
        let mut matrix = vec![0; problem.nodes * experts];
        for (place, nodes) in nodes_of(&problem.domain).into_iter().enumerate() {
            // Loads are not negative, so their bits are in order.
            let rooms = nodes.into_iter().map(|node| Reverse((0, Reverse(problem.slots_of_node()), node)));
            let mut lightest: BinaryHeap<Reverse<(u64, Reverse<usize>, usize)>> = rooms.collect();
            for &expert in &order {
                for _ in 0..self.row(place)[expert] {
                    let Some(Reverse((load, Reverse(room), node))) = lightest.pop() else {
                        unreachable!("a place has its nodes' slots");
                    };
                    matrix[node * experts + expert] += 1;
                    if room > 1 {
                        let load = f64::from_bits(load) + problem.weight[expert];
                        lightest.push(Reverse((load.to_bits(), Reverse(room - 1), node)));
                    }
                }
            }
        }
        matrix
    }

    fn row(&self, place: usize) -> &[i64] {
        &self.matrix[place * self.experts..][..self.experts]
    }
}

#[cfg(test)]
mod tests {
    use super::super::place::{Policy, Request, problem_of};
    use super::*;

    fn of(replicas: &[i64], nodes: usize, slots: usize, domains: Option<&[Vec<usize>]>) -> Problem {
        let (policy, load, previous, failures) = (Policy::Mro, None, None, None);
        problem_of(&Request { replicas, nodes, slots, policy, load, previous, domains, failures }).unwrap()
    }

    #[test]
    fn the_examples_of_the_documentation() {
        let replicas = [2, 2, 1, 3];
        assert_eq!(
            mro(&of(&replicas, 4, 2, None), &replicas),
            [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1]
        );
        let replicas = [3, 2, 1];
        assert_eq!(spread(&of(&replicas, 3, 2, None), &replicas), [1, 1, 0, 1, 1, 0, 1, 0, 1]);
        assert_eq!(compact(&replicas, 3, 2), [2, 0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn mro_is_cut_when_the_nodes_run_out() {
        // Theorem 1 of the paper fails here: the last group gets one node for an expert with two replicas.
        assert_eq!(mro(&of(&[2, 2, 2], 3, 2, None), &[2, 2, 2]), [1, 1, 0, 1, 1, 0, 0, 0, 2]);
    }

    #[test]
    fn nodes_that_fail_together_share_what_their_domain_gets() {
        // Two machines of two ranks with two slots: four experts on each, one of each pair of ranks has each.
        let machines = [vec![0, 2], vec![1, 3]];
        for place in [mro, spread] {
            let matrix = place(&of(&[2, 2, 2, 2], 4, 2, Some(&machines)), &[2, 2, 2, 2]);
            assert_eq!(matrix, [1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1]);
        }
        // A machine of one rank and one of two: all experts are on both.
        let machines = [vec![0], vec![1, 2]];
        assert_eq!(spread(&of(&[3, 3, 3], 3, 3, Some(&machines)), &[3, 3, 3]), [1; 9]);
    }
}
