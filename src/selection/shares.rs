//! Selection of each layer's experts so that no rank copies more than its share: a flow from layers to ranks.
//!
//! ```text
//! layer ──(experts of the layer on the rank)──► rank ──(share)──►      each layer sends K, or all that it has
//! ```
//!
//! First any flow is found, with the smallest share that allows one. Then candidates are taken one by one: a unit of
//! the flow is fixed to the candidate's layer and rank, and the rest of the flow is rerouted if possible.

use super::Selection;

/// An expert with unsaved tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Its index in the matrix.
    pub(super) cell: usize,
    /// Whether it has waited so long that it is selected regardless of the ranks' shares.
    pub(super) is_must: bool,
}

use std::collections::VecDeque;

/// Experts of a layer on a rank.
#[derive(Clone, Copy, Debug)]
struct Edge {
    layer: usize,
    rank: usize,
    /// Number that may be selected.
    most: usize,
    /// Number selected by the current flow.
    flow: usize,
    /// Number that is selected for good.
    fixed: usize,
    /// Whether no more can be selected: the flow cannot be rerouted, now or later.
    is_full: bool,
}

impl Edge {
    fn can_give(&self) -> bool {
        self.flow > self.fixed
    }

    fn can_take(&self) -> bool {
        self.flow < self.most
    }
}

/// Number of experts that each layer and rank may copy.
pub(super) struct Shares {
    experts: usize,
    each: usize,
    /// Number of each cell's rank, from 0.
    rank: Vec<usize>,
    ranks: usize,
    share: usize,
}

impl Shares {
    /// `ranks` is `[layers, experts]`, negative for none; `each` is K.
    pub(super) fn new(ranks: &[i64], [layers, experts]: [usize; 2], each: usize) -> Self {
        let mut names: Vec<i64> = ranks.iter().copied().filter(|&rank| rank >= 0).collect();
        names.sort_unstable();
        names.dedup();
        let rank = ranks.iter().map(|rank| names.binary_search(rank).unwrap_or(0)).collect();
        let share = (layers * each).div_ceil(names.len().max(1));
        Self { experts, each, rank, ranks: names.len(), share }
    }

    /// Selects experts in this order; all of them have ranks.
    pub(super) fn choose(&self, order: &[Candidate]) -> Selection {
        let mut flow = Flow::new(self, order);
        let mut chosen = vec![Vec::new(); self.rank.len() / self.experts];
        let (musts, rest) = order.split_at(order.partition_point(|found| found.is_must));
        let mut take = |flow: &Flow, found: &Candidate| {
            let edge = flow.edges[flow.edge_of(found.cell)];
            chosen[edge.layer].push(found.cell % self.experts);
        };
        for found in musts {
            if flow.force(flow.edge_of(found.cell)) {
                take(&flow, found);
            }
        }
        flow.fill(rest);
        for found in rest {
            if flow.fix(flow.edge_of(found.cell)) {
                take(&flow, found);
            }
        }
        chosen.iter_mut().for_each(|row| row.sort_unstable());
        chosen
    }
}

struct Flow<'a> {
    shares: &'a Shares,
    /// By layer, then by rank.
    edges: Vec<Edge>,
    /// Start of each layer's edges; one more than there are layers.
    starts: Vec<usize>,
    by_rank: Vec<Vec<usize>>,
    /// Experts of each rank, and their maximum.
    load: Vec<usize>,
    share: usize,
    /// Experts that each layer lacks, and its experts that are not fixed yet.
    lacks: Vec<usize>,
    open: Vec<usize>,
}

impl<'a> Flow<'a> {
    fn new(shares: &'a Shares, order: &[Candidate]) -> Self {
        let layers = shares.rank.len() / shares.experts;
        let mut places: Vec<(usize, usize)> =
            order.iter().map(|found| (found.cell / shares.experts, shares.rank[found.cell])).collect();
        places.sort_unstable();
        let mut edges: Vec<Edge> = Vec::new();
        for (layer, rank) in places {
            match edges.last_mut() {
                Some(last) if (last.layer, last.rank) == (layer, rank) => last.most += 1,
                _ => edges.push(Edge { layer, rank, most: 1, flow: 0, fixed: 0, is_full: false }),
            }
        }
        let starts: Vec<usize> =
            (0..=layers).map(|layer| edges.partition_point(|edge| edge.layer < layer)).collect();
        let mut by_rank = vec![Vec::new(); shares.ranks];
        edges.iter().enumerate().for_each(|(at, edge)| by_rank[edge.rank].push(at));
        let each = |row: &[usize]| {
            let all: usize = edges[row[0]..row[1]].iter().map(|edge| edge.most).sum();
            all.min(shares.each)
        };
        let lacks: Vec<usize> = starts.windows(2).map(each).collect();
        let (load, open) = (vec![0; shares.ranks], lacks.clone());
        Self { shares, starts, by_rank, load, share: shares.share, lacks, open, edges }
    }

    fn edge_of(&self, cell: usize) -> usize {
        let row = self.row(cell / self.shares.experts);
        row.start + self.edges[row].partition_point(|edge| edge.rank < self.shares.rank[cell])
    }

    fn row(&self, layer: usize) -> std::ops::Range<usize> {
        self.starts[layer]..self.starts[layer + 1]
    }

    fn add(&mut self, at: usize) {
        let Edge { layer, rank, .. } = self.edges[at];
        self.edges[at].flow += 1;
        self.load[rank] += 1;
        self.lacks[layer] -= 1;
    }

    fn remove(&mut self, at: usize) {
        let Edge { layer, rank, .. } = self.edges[at];
        self.edges[at].flow -= 1;
        self.load[rank] -= 1;
        self.lacks[layer] += 1;
    }

    fn has_room(&self, rank: usize) -> bool {
        self.load[rank] < self.share
    }

    /// Fixes a new unit regardless of the rank's share; false if the layer has used all of its units.
    fn force(&mut self, at: usize) -> bool {
        let layer = self.edges[at].layer;
        if self.open[layer] == 0 {
            return false;
        }
        self.add(at);
        self.note_fixed(at);
        true
    }

    fn note_fixed(&mut self, at: usize) {
        self.edges[at].fixed += 1;
        self.open[self.edges[at].layer] -= 1;
    }

    /// Gives each layer the units that it lacks, in this order within the shares, and raises the share by the minimum
    /// needed.
    fn fill(&mut self, order: &[Candidate]) {
        for found in order {
            let at = self.edge_of(found.cell);
            let Edge { layer, rank, .. } = self.edges[at];
            if self.lacks[layer] > 0 && self.has_room(rank) && self.edges[at].can_take() {
                self.add(at);
            }
        }
        for layer in 0..self.lacks.len() {
            while self.lacks[layer] > 0 {
                let seen = match self.way_from(layer) {
                    Ok(way) => {
                        self.shift(&way);
                        continue;
                    }
                    Err(seen) => seen,
                };
                // Only these ranks, which are full, can take the units that the layers leading to them lack.
                let full = seen.iter().filter(|is_seen| **is_seen).count();
                self.share += self.lacks[layer].div_ceil(full.max(1));
            }
        }
    }

    /// Fixes a unit if the rest of the flow can be rerouted; false if it cannot, or if the layer has used all of its
    /// units.
    fn fix(&mut self, at: usize) -> bool {
        let Edge { layer, rank, is_full, .. } = self.edges[at];
        if is_full || self.open[layer] == 0 {
            return false;
        }
        if !self.edges[at].can_give() && !self.make_way(at, layer, rank) {
            self.edges[at].is_full = true;
            return false;
        }
        self.note_fixed(at);
        true
    }

    /// Moves one of the layer's units to this edge.
    fn make_way(&mut self, at: usize, layer: usize, rank: usize) -> bool {
        let way = if self.has_room(rank) { Some(Vec::new()) } else { self.way_out(rank, layer) };
        let Some(way) = way else { return false };
        let end = way.last().map_or(rank, |&(_, to)| self.edges[to].rank);
        // Of the layer's other units, take one at the end of the path, if that edge is full.
        let mut others = self.row(layer).filter(|&other| other != at && self.edges[other].can_give());
        let given = match self.has_room(end) {
            true => others.next(),
            false => others.find(|&other| self.edges[other].rank == end),
        };
        let Some(given) = given else { return false };
        self.remove(given);
        self.shift(&way);
        self.add(at);
        true
    }

    /// Moves a unit along each pair of edges; without a source edge it is new.
    fn shift(&mut self, way: &[(Option<usize>, usize)]) {
        for &(from, to) in way {
            if let Some(from) = from {
                self.remove(from);
            }
            self.add(to);
        }
    }

    /// A path for one more unit of a layer to a rank with room; otherwise the reachable ranks.
    fn way_from(&self, layer: usize) -> std::result::Result<Vec<(Option<usize>, usize)>, Vec<bool>> {
        let mut search = Search::new(self);
        search.leave(layer, None);
        match search.run(|rank| self.has_room(rank)) {
            Some(rank) => Ok(search.way(rank)),
            None => Err(search.seen),
        }
    }

    /// A path for a unit of another layer out of a full rank: to a rank with room, or to one where this layer can make
    /// room.
    fn way_out(&self, rank: usize, layer: usize) -> Option<Vec<(Option<usize>, usize)>> {
        let mut gives = vec![false; self.load.len()];
        let row = &self.edges[self.row(layer)];
        row.iter().filter(|edge| edge.can_give()).for_each(|edge| gives[edge.rank] = true);
        let mut search = Search::new(self);
        search.has_left[layer] = true; // its own units are at the end of the path
        search.begin(rank);
        let end = search.run(|rank| self.has_room(rank) || gives[rank])?;
        Some(search.way(end))
    }
}

/// Breadth-first search over ranks: a unit of a layer that can leave a rank goes to others that can take it.
struct Search<'a> {
    flow: &'a Flow<'a>,
    seen: Vec<bool>,
    has_left: Vec<bool>,
    /// How each rank was reached: the source edge, none for a new unit, and the target edge.
    came: Vec<Option<(Option<usize>, usize)>>,
    queue: VecDeque<usize>,
}

impl<'a> Search<'a> {
    fn new(flow: &'a Flow<'a>) -> Self {
        let (ranks, layers) = (flow.load.len(), flow.lacks.len());
        let (seen, came) = (vec![false; ranks], vec![None; ranks]);
        Self { flow, seen, has_left: vec![false; layers], came, queue: VecDeque::new() }
    }

    fn begin(&mut self, rank: usize) {
        self.seen[rank] = true;
        self.queue.push_back(rank);
    }

    /// A unit of the layer leaves this edge, or is new.
    fn leave(&mut self, layer: usize, from: Option<usize>) {
        if std::mem::replace(&mut self.has_left[layer], true) {
            return;
        }
        for to in self.flow.row(layer) {
            let edge = &self.flow.edges[to];
            if edge.can_take() && !self.seen[edge.rank] {
                self.came[edge.rank] = Some((from, to));
                self.begin(edge.rank);
            }
        }
    }

    fn run(&mut self, is_end: impl Fn(usize) -> bool) -> Option<usize> {
        let flow = self.flow;
        while let Some(rank) = self.queue.pop_front() {
            if is_end(rank) {
                return Some(rank);
            }
            for &from in flow.by_rank[rank].iter().filter(|&&from| flow.edges[from].can_give()) {
                self.leave(flow.edges[from].layer, Some(from));
            }
        }
        None
    }

    /// The moves from the start to a rank.
    fn way(&self, rank: usize) -> Vec<(Option<usize>, usize)> {
        let mut way = Vec::new();
        let mut at = rank;
        while let Some((from, to)) = self.came[at] {
            way.push((from, to));
            let Some(from) = from else { break };
            at = self.flow.edges[from].rank;
        }
        way.reverse();
        way
    }
}
