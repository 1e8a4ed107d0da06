//! Assignment of nodes to the positions of a new placement with the fewest bytes moved.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Maximum number of nodes for an exact assignment, which takes time with the cube of the nodes; beyond it is greedy.
const MAX_EXACT: usize = 512;

/// Nodes that hold experts, and positions that need them.
pub(super) struct Assignment<'a> {
    /// Bytes of each expert; their sum fits.
    pub(super) nbytes: &'a [i64],
    /// The nodes that hold each expert, ascending.
    pub(super) holders: &'a [Vec<usize>],
    /// The positions that need each expert, ascending.
    pub(super) needers: &'a [Vec<usize>],
    pub(super) nodes: usize,
    pub(super) positions: usize,
    /// Nodes that stay together: the positions in one group go to the nodes of one group of the same size. Each node is
    /// in one group, and there are as many positions as nodes. Without groups, or if each has one node, a position may
    /// go to any node.
    pub(super) groups: &'a [Vec<usize>],
}

impl Assignment<'_> {
    /// Returns the node of each position. Up to [`MAX_EXACT`] nodes the fewest bytes move, and among such assignments
    /// the most positions stay on the node of the same number. Beyond, at most as many bytes move as if all stayed, and
    /// each group keeps its own nodes.
    pub(super) fn solve(&self) -> Vec<usize> {
        if self.groups.iter().any(|group| group.len() > 1) {
            return if self.nodes <= MAX_EXACT { self.groups_exchanged() } else { self.groups_kept() };
        }
        if self.nodes <= MAX_EXACT {
            return cheapest(&self.costs(), self.positions, self.nodes);
        }
        let greedy = self.greedy();
        let own: Vec<usize> = (0..self.positions).collect();
        if self.common(&own) >= self.common(&greedy) { own } else { greedy }
    }

    /// Groups of the same size exchange nodes, each by its best assignment to them.
    fn groups_exchanged(&self) -> Vec<usize> {
        let costs = self.costs();
        let within = |from: &[usize], to: &[usize]| -> (i128, Vec<usize>) {
            let cost = |position: usize, node: usize| costs[position * self.nodes + node];
            let block: Vec<i128> =
                from.iter().flat_map(|&position| to.iter().map(move |&node| cost(position, node))).collect();
            let taken = cheapest(&block, from.len(), to.len());
            (taken.iter().zip(from).map(|(&place, &position)| cost(position, to[place])).sum(), taken)
        };
        let mut node_map = vec![0; self.positions];
        let mut sizes: Vec<usize> = self.groups.iter().map(Vec::len).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            let equal: Vec<&Vec<usize>> = self.groups.iter().filter(|group| group.len() == size).collect();
            let pairs: Vec<(i128, Vec<usize>)> =
                equal.iter().flat_map(|from| equal.iter().map(|to| within(from, to))).collect();
            let totals: Vec<i128> = pairs.iter().map(|(total, _)| *total).collect();
            for (from, to) in cheapest(&totals, equal.len(), equal.len()).into_iter().enumerate() {
                let (_, taken) = &pairs[from * equal.len() + to];
                for (&position, &place) in equal[from].iter().zip(taken) {
                    node_map[position] = equal[to][place];
                }
            }
        }
        node_map
    }

    /// Each group's positions go to its own nodes.
    fn groups_kept(&self) -> Vec<usize> {
        let mut node_map = vec![0; self.positions];
        for group in self.groups {
            let within = |rows: &[Vec<usize>]| -> Vec<Vec<usize>> {
                let places = |row: &Vec<usize>| {
                    (0..group.len()).filter(|&at| row.binary_search(&group[at]).is_ok()).collect()
                };
                rows.iter().map(places).collect()
            };
            let own = Assignment {
                nbytes: self.nbytes,
                holders: &within(self.holders),
                needers: &within(self.needers),
                nodes: group.len(),
                positions: group.len(),
                groups: &[],
            };
            for (place, node) in own.solve().into_iter().enumerate() {
                node_map[group[place]] = group[node];
            }
        }
        node_map
    }

    /// `[positions, nodes]`: the bytes that would move, minus all that the position needs, scaled by more than the
    /// number of positions, plus 1 off the diagonal.
    fn costs(&self) -> Vec<i128> {
        let scale = self.positions as i128 + 1;
        let cells = 0..self.positions * self.nodes;
        let mut costs: Vec<i128> =
            cells.map(|cell| i128::from(cell / self.nodes != cell % self.nodes)).collect();
        for ((&bytes, holders), needers) in self.nbytes.iter().zip(self.holders).zip(self.needers) {
            for position in needers {
                for node in holders {
                    costs[position * self.nodes + node] -= i128::from(bytes) * scale;
                }
            }
        }
        costs
    }

    /// Bytes that are where they are needed already.
    fn common(&self, node_map: &[usize]) -> i128 {
        let present = |holders: &[usize], needers: &[usize]| {
            needers.iter().filter(|&&position| holders.binary_search(&node_map[position]).is_ok()).count()
        };
        let rows = self.nbytes.iter().zip(self.holders).zip(self.needers);
        rows.map(|((&bytes, holders), needers)| i128::from(bytes) * present(holders, needers) as i128).sum()
    }

    /// Assigns the position and the free node with the most bytes in common first.
    fn greedy(&self) -> Vec<usize> {
        let needs = transposed(self.needers, self.positions);
        let held = transposed(self.holders, self.nodes);
        // A node that holds exactly what its own position needs keeps it: no assignment loses by that, whatever other
        // positions had in common with the node.
        let own = |position: usize| (needs[position] == held[position]).then_some(position);
        let mut node_map: Vec<Option<usize>> = (0..self.positions).map(own).collect();
        let mut is_free = vec![true; self.nodes];
        node_map.iter().flatten().for_each(|&node| is_free[node] = false);
        let mut groups = Groups::new(&held, &is_free, self.holders.len());
        let mut common = vec![0; groups.free.len()];
        let mut candidate = |position: usize, is_free: &[bool], groups: &Groups| {
            let own = is_free[position].then(|| groups.of_node[position]);
            // Among nodes with the most bytes its own node, or else the first. The bytes of a group grow, so its last
            // key is its highest.
            let mut best = (0, false, Reverse(usize::MAX));
            for &expert in &needs[position] {
                for &group in &groups.of_expert[expert] {
                    let Some(&first) = groups.free[group].first() else { continue };
                    common[group] += self.nbytes[expert];
                    let is_own = own == Some(group);
                    best = best.max((common[group], is_own, Reverse(if is_own { position } else { first })));
                }
            }
            let reached = needs[position].iter().flat_map(|&expert| &groups.of_expert[expert]);
            reached.for_each(|&group| common[group] = 0);
            let (most, _, Reverse(nearest)) = best;
            let node = match most {
                0 if is_free[position] => position,
                0 => is_free.iter().position(|&is_free| is_free)?,
                _ => nearest,
            };
            Some((most, Reverse(position), node))
        };
        let waiting = (0..self.positions).filter(|&position| node_map[position].is_none());
        let mut queue: BinaryHeap<(i64, Reverse<usize>, usize)> =
            waiting.filter_map(|position| candidate(position, &is_free, &groups)).collect();
        while let Some((_, Reverse(position), node)) = queue.pop() {
            if is_free[node] {
                node_map[position] = Some(node);
                is_free[node] = false;
                groups.free[groups.of_node[node]].remove(&node);
            } else {
                queue.extend(candidate(position, &is_free, &groups));
            }
        }
        node_map.into_iter().flatten().collect()
    }
}

/// Initially free nodes that hold the same experts: with respect to bytes they are equivalent.
struct Groups {
    /// The nodes of each group that are still free.
    free: Vec<BTreeSet<usize>>,
    /// The group of each initially free node.
    of_node: Vec<usize>,
    /// The groups that hold each expert.
    of_expert: Vec<Vec<usize>>,
}

impl Groups {
    fn new(held: &[Vec<usize>], is_free: &[bool], experts: usize) -> Self {
        let mut numbers: BTreeMap<&[usize], usize> = BTreeMap::new();
        let (mut free, mut of_node) = (Vec::new(), vec![0; held.len()]);
        let mut of_expert = vec![Vec::new(); experts];
        for node in (0..held.len()).filter(|&node| is_free[node]) {
            let group = *numbers.entry(&held[node]).or_insert_with(|| {
                held[node].iter().for_each(|&expert| of_expert[expert].push(free.len()));
                free.push(BTreeSet::new());
                free.len() - 1
            });
            free[group].insert(node);
            of_node[node] = group;
        }
        Self { free, of_node, of_expert }
    }
}

/// For each row that occurs in the lists, the lists that contain it.
fn transposed(lists: &[Vec<usize>], rows: usize) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); rows];
    for (list, members) in lists.iter().enumerate() {
        members.iter().for_each(|&row| found[row].push(list));
    }
    found
}

/// Returns the column of each row, all different, with the minimum sum of `costs`: `[rows, columns]`, at most as many
/// rows as columns.
///
/// Shortest augmenting paths (Jonker and Volgenant): each row in turn takes the column where the cheapest chain "take a
/// column; its row moves to another; …" ends. Prices keep all reduced costs non-negative, and zero for those taken.
fn cheapest(costs: &[i128], rows: usize, columns: usize) -> Vec<usize> {
    let mut prices = vec![0_i128; columns];
    let mut row_prices = vec![0_i128; rows];
    let mut owner: Vec<Option<usize>> = vec![None; columns];
    for start in 0..rows {
        let mut reached = vec![(i128::MAX, None); columns];
        let mut open: Vec<usize> = (0..columns).collect();
        let mut done = Vec::new();
        let (mut row, mut base, mut last) = (start, 0, None);
        let end = loop {
            for &column in &open {
                let cost = costs[row * columns + column] - row_prices[row] - prices[column];
                if base + cost < reached[column].0 {
                    reached[column] = (base + cost, last);
                }
            }
            let nearest = (0..open.len()).min_by_key(|&at| (reached[open[at]].0, open[at]));
            let Some(nearest) = nearest else { unreachable!("there are at most as many rows as columns") };
            let column = open.swap_remove(nearest);
            base = reached[column].0;
            let Some(next) = owner[column] else { break column };
            done.push(column);
            (row, last) = (next, Some(column));
        };
        row_prices[start] += base;
        for column in done {
            let slack = base - reached[column].0;
            prices[column] -= slack;
            if let Some(row) = owner[column] {
                row_prices[row] += slack;
            }
        }
        let mut column = end;
        while let (_, Some(before)) = reached[column] {
            owner[column] = owner[before];
            column = before;
        }
        owner[column] = Some(start);
    }
    let mut taken = vec![0; rows];
    for (column, row) in owner.into_iter().enumerate() {
        if let Some(row) = row {
            taken[row] = column;
        }
    }
    taken
}
