//! Cells: disjoint sets of nodes in different failure domains, so that experts with few replicas share few fatal sets.
//!
//! An expert that a number of simultaneous losses could take is *fragile*. If its first `spread` replicas are all in
//! one cell, those losses take it only if they take the entire cell, and as many fragile experts as fit share each
//! cell. Fewer cells with fragile experts are safer; more are better balanced.

use super::layout::{Layout, Problem};
use super::rows::holders_of;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

/// Constraints that hold a layout together.
pub(super) struct Frame<'a> {
    /// Sets of `spread` nodes; those that may hold fragile experts first.
    pub(super) cells: &'a [Vec<usize>],
    /// Number of cells that may hold fragile experts.
    pub(super) fragile_cells: usize,
    /// The first cell of each node; none for nodes outside of all cells.
    pub(super) cell_of: Vec<Option<usize>>,
    /// The cell with the first replicas of an expert; none for unbound experts.
    pub(super) home: Vec<Option<usize>>,
}

impl Frame<'_> {
    /// Whether this replica is one of the expert's first, which stay together.
    pub(super) fn is_bound(&self, node: usize, expert: usize) -> bool {
        self.home[expert].is_some_and(|home| self.cells[home].contains(&node))
    }
}

/// Whether the losses that count could take all replicas of the expert.
pub(super) fn is_fragile(problem: &Problem, expert: usize) -> bool {
    problem.each[expert] == 0 && problem.wanted[expert] <= problem.failures
}

/// Whether the expert's first replicas should be in one cell. If nodes fail together this holds for all experts, as
/// cells also ensure that an expert is in different domains.
fn belongs_in_cell(problem: &Problem, expert: usize) -> bool {
    problem.each[expert] == 0 && (is_fragile(problem, expert) || !problem.nodes_fail_alone())
}

/// The minimum number of cells with room for all fragile experts; at least one.
pub(super) fn fewest_cells(problem: &Problem) -> usize {
    let fragile = (0..problem.experts).filter(|&expert| is_fragile(problem, expert)).count();
    fragile.div_ceil(problem.slots.max(1)).max(1)
}

/// Cells of `spread` nodes in `spread` domains: disjoint ones, then the windows of a ring if the nodes do not divide
/// evenly.
///
/// Nodes that held experts together previously stay together, those of the most experts first. The other cells take one
/// node from each of the domains with the most nodes left, so that domains of equal size are combined the same way
/// again. Remaining nodes form a ring with those of the last cell, as in Gemini's mixed placement.
///
/// ```text
/// 8 nodes, spread 3: (0 1 2), then the ring 3 4 5 6 7: (3 4 5) (4 5 6) (5 6 7) (6 7 3) (7 3 4)
/// ```
pub(super) fn cells(problem: &Problem, ring: bool) -> Vec<Vec<usize>> {
    let mut free = vec![true; problem.nodes];
    let mut cells = Vec::new();
    for cell in former_cells(problem) {
        if cell.iter().all(|&node| free[node]) {
            cell.iter().for_each(|&node| free[node] = false);
            cells.push(cell);
        }
    }
    let mut nodes_of: Vec<Vec<usize>> = vec![Vec::new(); problem.domains];
    for node in (0..problem.nodes).rev().filter(|&node| free[node]) {
        nodes_of[problem.domain[node]].push(node);
    }
    let occupied = (0..problem.domains).filter(|&domain| !nodes_of[domain].is_empty());
    let mut order: BTreeSet<(Reverse<usize>, usize)> =
        occupied.map(|domain| (Reverse(nodes_of[domain].len()), domain)).collect();
    while order.len() >= problem.spread {
        let widest: Vec<usize> =
            (0..problem.spread).filter_map(|_| order.pop_first()).map(|(_, domain)| domain).collect();
        let mut cell: Vec<usize> = widest.iter().filter_map(|&domain| nodes_of[domain].pop()).collect();
        let left = widest.into_iter().filter(|&domain| !nodes_of[domain].is_empty());
        order.extend(left.map(|domain| (Reverse(nodes_of[domain].len()), domain)));
        cell.sort_unstable();
        cells.push(cell);
    }
    if ring {
        close_ring(problem, &mut cells, nodes_of.into_iter().flatten());
    }
    cells
}

/// Replaces the last cell by the windows of a ring of its nodes and `left`, if each window has distinct domains.
fn close_ring(problem: &Problem, cells: &mut Vec<Vec<usize>>, left: impl Iterator<Item = usize>) {
    let Some(mut ring) = cells.last().cloned() else { return };
    ring.extend(left);
    if ring.len() == problem.spread {
        return;
    }
    let window = |start: usize| (0..problem.spread).map(|step| ring[(start + step) % ring.len()]).collect();
    let windows: Vec<Vec<usize>> = (0..ring.len()).map(window).collect();
    let is_spread = |window: &Vec<usize>| {
        let domains: BTreeSet<usize> = window.iter().map(|&node| problem.domain[node]).collect();
        domains.len() == problem.spread
    };
    if windows.iter().all(is_spread) {
        cells.pop();
        cells.extend(windows);
    }
}

/// Sets of `spread` nodes in as many domains that held the same experts exclusively, those of the most experts first.
fn former_cells(problem: &Problem) -> Vec<Vec<usize>> {
    let mut counts: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    for holders in holders_of(&problem.previous, problem.experts) {
        if holders.len() != problem.spread {
            continue;
        }
        let domains: BTreeSet<usize> = holders.iter().map(|&node| problem.domain[node]).collect();
        if domains.len() == problem.spread {
            *counts.entry(holders).or_default() += 1;
        }
    }
    let mut former: Vec<(Vec<usize>, usize)> = counts.into_iter().collect();
    former.sort_by_key(|(cell, count)| (Reverse(*count), cell[0]));
    former.into_iter().map(|(cell, _)| cell).collect()
}

/// Builds a layout in which fragile experts have their first replicas in the first `fragile_cells` cells.
///
/// First, replicas stay where they were as far as they fit. Then experts are placed by descending load per replica,
/// each where the load is the least: first unbound experts, whose replicas are usually heavy, then the others. Every
/// expert gets `wanted` distinct nodes; if nodes that fail together leave a choice, in different domains.
pub(super) fn build<'a>(
    problem: &'a Problem,
    cells: &'a [Vec<usize>],
    fragile_cells: usize,
) -> (Layout, Frame<'a>) {
    Builder::new(problem, cells, fragile_cells).build()
}

struct Builder<'a> {
    problem: &'a Problem,
    layout: Layout,
    frame: Frame<'a>,
    /// Experts bound to cells, heaviest first.
    bound: Vec<usize>,
    /// Unbound experts, heaviest first.
    free: Vec<usize>,
    /// Replicas of each expert that have no node yet.
    left: Vec<usize>,
    /// Number of experts that each cell still has to receive.
    quota: Vec<usize>,
    /// Nodes that hold each expert now, ascending.
    holders: Vec<Vec<usize>>,
}

impl<'a> Builder<'a> {
    fn new(problem: &'a Problem, cells: &'a [Vec<usize>], fragile_cells: usize) -> Self {
        let mut order: Vec<usize> =
            (0..problem.experts).filter(|&expert| problem.wanted[expert] > 0).collect();
        order.sort_by(|&a, &b| problem.weight[b].total_cmp(&problem.weight[a]).then(a.cmp(&b)));
        let (bound, free): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|&expert| belongs_in_cell(problem, expert));
        let fragile = bound.iter().filter(|&&expert| is_fragile(problem, expert)).count();
        let mut quota = vec![0; cells.len()];
        let (mut cell_of, mut windows_of) = (vec![None; problem.nodes], vec![0; problem.nodes]);
        for (index, cell) in cells.iter().enumerate() {
            for &node in cell {
                cell_of[node] = cell_of[node].or(Some(index));
                windows_of[node] += 1;
            }
        }
        share(&mut quota[..fragile_cells], cells, &windows_of, fragile, problem.spread);
        share(&mut quota, cells, &windows_of, bound.len() - fragile, problem.spread);
        Self {
            problem,
            layout: Layout::new(problem),
            frame: Frame { cells, fragile_cells, cell_of, home: vec![None; problem.experts] },
            bound,
            free,
            left: problem.wanted.clone(),
            quota,
            holders: holders_of(&problem.previous, problem.experts),
        }
    }

    fn build(mut self) -> (Layout, Frame<'a>) {
        let (bound, free) = (std::mem::take(&mut self.bound), std::mem::take(&mut self.free));
        if !self.problem.previous.is_empty() {
            bound.iter().for_each(|&expert| self.stay(expert));
            bound.iter().chain(&free).for_each(|&expert| self.keep(expert));
        }
        let set_aside = self.set_aside();
        self.scatter(free.iter(), &set_aside);
        bound.iter().for_each(|&expert| self.bind(expert));
        // Heaviest first again, now without reserved slots.
        let none = vec![0; self.problem.nodes];
        self.scatter(free.iter().chain(&bound), &none);
        free.iter().chain(&bound).for_each(|&expert| self.make_room(expert));
        (self.layout, self.frame)
    }

    fn cells_for(&self, expert: usize) -> std::ops::Range<usize> {
        0..if is_fragile(self.problem, expert) { self.frame.fragile_cells } else { self.frame.cells.len() }
    }

    fn room(&self, cell: usize) -> usize {
        self.frame.cells[cell].iter().map(|&node| self.layout.room(node)).min().unwrap_or(0)
    }

    fn load(&self, cell: usize) -> f64 {
        self.frame.cells[cell].iter().map(|&node| self.layout.load[node]).fold(0.0, f64::max)
    }

    fn settle(&mut self, expert: usize, cell: usize) {
        for &node in &self.frame.cells[cell] {
            if !self.layout.holds(node, expert) {
                self.layout.put(self.problem, node, expert);
                self.left[expert] -= 1;
            }
        }
        self.frame.home[expert] = Some(cell);
        self.quota[cell] = self.quota[cell].saturating_sub(1);
    }

    /// Leaves an expert in the cell that holds it, the lightest if there are several.
    fn stay(&mut self, expert: usize) {
        let holds = |cell: usize| self.frame.cells[cell].iter().all(|&node| self.problem.held(node, expert));
        let cell = self
            .cells_for(expert)
            .filter(|&cell| self.room(cell) > 0 && holds(cell))
            .min_by(|&a, &b| self.load(a).total_cmp(&self.load(b)));
        if let Some(cell) = cell {
            self.settle(expert, cell);
        }
    }

    /// Keeps replicas where they are, on the nodes with the least load; experts that still need a cell wait.
    fn keep(&mut self, expert: usize) {
        if self.left[expert] == 0
            || (self.frame.home[expert].is_none() && belongs_in_cell(self.problem, expert))
        {
            return;
        }
        let open = |&node: &usize| !self.layout.holds(node, expert) && self.layout.room(node) > 0;
        let mut nodes: Vec<usize> = self.holders[expert].iter().copied().filter(open).collect();
        self.sort_by_load(&mut nodes);
        self.put(expert, nodes);
    }

    fn by_load(&self, a: usize, b: usize) -> Ordering {
        self.layout.load[a].total_cmp(&self.layout.load[b]).then(a.cmp(&b))
    }

    fn sort_by_load(&self, nodes: &mut [usize]) {
        nodes.sort_unstable_by(|&a, &b| self.by_load(a, b));
    }

    /// Puts an expert on the first of `nodes`, as many as it lacks.
    fn put(&mut self, expert: usize, nodes: impl IntoIterator<Item = usize>) {
        for node in nodes.into_iter().take(self.left[expert]) {
            self.layout.put(self.problem, node, expert);
            self.left[expert] -= 1;
        }
    }

    /// Gives an expert a home: among cells with free places the one that holds most of it, then the one with the least
    /// load.
    fn bind(&mut self, expert: usize) {
        if self.frame.home[expert].is_some() {
            return;
        }
        let mut holds = vec![false; self.problem.nodes];
        self.holders[expert].iter().for_each(|&node| holds[node] = true);
        let held = |cell: usize| match self.holders[expert].is_empty() {
            true => 0,
            false => self.frame.cells[cell].iter().filter(|&&node| holds[node]).count(),
        };
        let key = |cell: usize| (self.quota[cell] == 0, Reverse(held(cell)));
        // This is the hottest loop: every key and load is computed once.
        let mut best = None;
        for cell in self.cells_for(expert).filter(|&cell| self.room(cell) > 0) {
            let found = (key(cell), self.load(cell));
            if best.is_none_or(|(best, _)| found < best) {
                best = Some((found, cell));
            }
        }
        if let Some((_, cell)) = best {
            self.settle(expert, cell);
        }
    }

    /// Slots of each node that are reserved for experts that its cells still have to receive.
    fn set_aside(&self) -> Vec<usize> {
        let mut slots = vec![0; self.problem.nodes];
        for (cell, &quota) in self.frame.cells.iter().zip(&self.quota) {
            cell.iter().for_each(|&node| slots[node] += quota);
        }
        slots
    }

    /// Puts each expert's missing replicas on the nodes with the least load that have room beyond the reserved slots,
    /// the lightest node of each new domain first.
    fn scatter<'b>(&mut self, experts: impl Iterator<Item = &'b usize>, set_aside: &[usize]) {
        let has_room = |layout: &Layout, node: usize| layout.room(node) > set_aside[node];
        // Loads are not negative, so their bit patterns are ordered.
        let key = |layout: &Layout, node: usize| (layout.load[node].to_bits(), node);
        let open = (0..self.problem.nodes).filter(|&node| has_room(&self.layout, node));
        let mut lightest: BTreeSet<(u64, usize)> = open.map(|node| key(&self.layout, node)).collect();
        for &expert in experts {
            if self.left[expert] == 0 {
                continue;
            }
            let fresh =
                lightest.iter().map(|&(_, node)| node).filter(|&node| !self.layout.holds(node, expert));
            let nodes: Vec<usize> = match self.problem.nodes_fail_alone() {
                true => fresh.take(self.left[expert]).collect(),
                false => self.new_domains_first(expert, fresh.collect()),
            };
            for node in nodes.into_iter().take(self.left[expert]) {
                lightest.remove(&key(&self.layout, node));
                self.put(expert, [node]);
                lightest.extend(has_room(&self.layout, node).then(|| key(&self.layout, node)));
            }
        }
    }

    /// The first of the nodes of each domain without the expert, then the others.
    fn new_domains_first(&self, expert: usize, mut nodes: Vec<usize>) -> Vec<usize> {
        let mut has = vec![false; self.problem.domains];
        for node in (0..self.problem.nodes).filter(|&node| self.layout.holds(node, expert)) {
            has[self.problem.domain[node]] = true;
        }
        nodes.sort_by_cached_key(|&node| std::mem::replace(&mut has[self.problem.domain[node]], true));
        nodes
    }

    /// Places replicas if all nodes with room hold the expert already: other experts move to those nodes and free a
    /// slot.
    fn make_room(&mut self, expert: usize) {
        while self.left[expert] > 0 {
            let open: Vec<usize> =
                (0..self.problem.nodes).filter(|&node| self.layout.room(node) > 0).collect();
            let mut best: Option<(bool, usize, usize, usize)> = None;
            for node in (0..self.problem.nodes).filter(|&node| !self.layout.holds(node, expert)) {
                for &other in &self.layout.rows[node] {
                    for &target in open.iter().filter(|&&target| !self.layout.holds(target, other)) {
                        let candidate = (self.frame.is_bound(node, other), node, other, target);
                        best = Some(best.map_or(candidate, |best| best.min(candidate)));
                    }
                }
            }
            let Some((bound, node, other, target)) = best else {
                // A full node without the expert has more experts than a node with room that has it, so one can move.
                unreachable!("an expert wants at most one replica on each node");
            };
            if bound {
                self.frame.home[other] = None;
            }
            self.layout.take(self.problem, node, other);
            self.layout.put(self.problem, target, other);
            self.put(expert, [node]);
        }
    }
}

/// Adds shares of `count` experts to the quotas of cells: integers, by the number of nodes that only this cell has.
fn share(quota: &mut [usize], cells: &[Vec<usize>], windows_of: &[usize], count: usize, spread: usize) {
    // A node of a ring is in `spread` windows, so a window counts for one part of `spread`.
    let alone = |cell: &Vec<usize>| windows_of[cell[0]] == 1;
    let parts: Vec<usize> =
        cells[..quota.len()].iter().map(|cell| if alone(cell) { spread } else { 1 }).collect();
    let total: usize = parts.iter().sum();
    let mut before = 0;
    for (quota, part) in quota.iter_mut().zip(parts) {
        // Shares of running sums: they add up, and the odd ones go round.
        *quota += count * (before + part) / total - count * before / total;
        before += part;
    }
}
