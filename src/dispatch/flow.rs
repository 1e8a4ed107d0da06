//! Minimum capacity of the ranks for the tokens of all experts, and each rank's tokens at that capacity: maximum flow
//! from experts to ranks by Dinic's algorithm.
//!
//! If the tokens do not fit, the failed search has visited a set of full ranks. All tokens on these ranks, and all that
//! remain, have no holder elsewhere. So these ranks need at least that number of tokens, evenly shared, and the search
//! starts again with this capacity. Only such steps are taken, so the final capacity is the minimum. Each step involves
//! fewer ranks, so there are few steps.
//!
//! ```text
//! experts with 6, 2, 1 tokens on ranks {0}, {0, 1}, {2}   9 tokens on 3 ranks: room 3 at least
//! room 3: 3 of 6 are left, and their one holder is full   rank 0 needs 3 + 3 = 6
//! room 6: rank 0 takes 6, rank 1 takes 2, rank 2 takes 1
//! ```

/// Level of a node that the search has not visited.
const UNSEEN: u32 = u32::MAX;

/// An edge between an expert and a rank that holds it, as seen from one of the two.
#[derive(Clone, Copy)]
struct Link {
    /// The node at the other end.
    to: usize,
    /// Index of the pair in `Flow::tokens`.
    pair: usize,
}

/// Tokens on pairs of an expert and a rank that holds it. Nodes are numbered experts first, then ranks.
pub(super) struct Flow {
    experts: usize,
    /// Links of node n: `links[first[n]..first[n + 1]]`; those of experts are in order of pairs, ranks ascending.
    first: Vec<usize>,
    links: Vec<Link>,
    /// Tokens that the pair's rank computes of its expert.
    tokens: Vec<i64>,
    /// Unassigned tokens of each expert, then remaining room of each rank.
    spare: Vec<i64>,
    /// Distance from an expert with unassigned tokens.
    level: Vec<u32>,
    /// Next link to try of each node; earlier ones lead nowhere.
    next: Vec<usize>,
    queue: Vec<usize>,
    path: Vec<Link>,
}

impl Flow {
    /// `replicas` is `[experts, ranks]`.
    pub(super) fn new(replicas: &[i64], experts: usize, ranks: usize) -> Self {
        let nodes = experts + ranks;
        let mut first = vec![0; nodes + 1];
        for (cell, _) in replicas.iter().enumerate().filter(|(_, count)| **count > 0) {
            first[cell / ranks + 1] += 1;
            first[experts + cell % ranks + 1] += 1;
        }
        for node in 0..nodes {
            first[node + 1] += first[node];
        }
        let mut next = first[..nodes].to_vec();
        let mut links = vec![Link { to: 0, pair: 0 }; first[nodes]];
        for (cell, _) in replicas.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (expert, rank) = (cell / ranks, experts + cell % ranks);
            let pair = next[expert];
            for (node, to) in [(expert, rank), (rank, expert)] {
                links[next[node]] = Link { to, pair };
                next[node] += 1;
            }
        }
        let tokens = vec![0; first[experts]];
        let (spare, level) = (vec![0; nodes], vec![UNSEEN; nodes]);
        Self { experts, first, links, tokens, spare, level, next, queue: Vec::new(), path: Vec::new() }
    }

    /// The ranks that hold `expert`, ascending.
    pub(super) fn holders(&self, expert: usize) -> impl Iterator<Item = usize> {
        let links = &self.links[self.first[expert]..self.first[expert + 1]];
        links.iter().map(|link| link.to - self.experts)
    }

    /// The tokens of `expert` that each of its holders computes.
    pub(super) fn shares(&self, expert: usize) -> &[i64] {
        &self.tokens[self.first[expert]..self.first[expert + 1]]
    }

    /// Assigns all tokens so that the busiest rank computes as few as possible; returns its number of tokens.
    ///
    /// `load[e]` is the number of tokens of expert e, `local` those that each holder has itself, pair by pair. Holders
    /// start with these, and give them away only if other tokens find no room.
    pub(super) fn balance(&mut self, load: &[i64], local: &[i64]) -> i64 {
        let mut room = ceil_div(load.iter().sum(), self.spare.len() - self.experts);
        loop {
            self.start(load, local, room);
            let short = self.fill();
            if short == 0 {
                return room;
            }
            let full = self.level[self.experts..].iter().filter(|level| **level != UNSEEN).count();
            room += ceil_div(short, full);
        }
    }

    /// Every holder takes its local tokens, as far as it has room.
    fn start(&mut self, load: &[i64], local: &[i64], room: i64) {
        self.spare[..self.experts].copy_from_slice(load);
        self.spare[self.experts..].fill(room);
        for expert in 0..self.experts {
            let pairs = self.first[expert]..self.first[expert + 1];
            for (pair, &count) in pairs.clone().zip(&local[pairs]) {
                let rank = self.links[pair].to;
                let count = count.min(self.spare[rank]);
                self.tokens[pair] = count;
                self.spare[expert] -= count;
                self.spare[rank] -= count;
            }
        }
    }

    /// Assigns as many tokens as fit and returns the number of the others; `level` then marks the nodes that could not
    /// help these.
    fn fill(&mut self) -> i64 {
        while self.label() {
            self.next.copy_from_slice(&self.first[..self.level.len()]);
            for expert in 0..self.experts {
                while self.spare[expert] > 0 && self.push(expert) {}
            }
        }
        self.spare[..self.experts].iter().sum()
    }

    /// Computes levels up to the nearest ranks with room; false if none can be reached.
    fn label(&mut self) -> bool {
        self.level.fill(UNSEEN);
        self.queue.clear();
        for expert in (0..self.experts).filter(|&expert| self.spare[expert] > 0) {
            self.level[expert] = 0;
            self.queue.push(expert);
        }
        let mut nearest = UNSEEN;
        let mut seen = 0;
        while let Some(&node) = self.queue.get(seen).filter(|&&node| self.level[node] < nearest) {
            seen += 1;
            for &Link { to, pair } in &self.links[self.first[node]..self.first[node + 1]] {
                if self.level[to] == UNSEEN && (node < self.experts || self.tokens[pair] > 0) {
                    self.level[to] = self.level[node] + 1;
                    self.queue.push(to);
                    if to >= self.experts && self.spare[to] > 0 {
                        nearest = self.level[to];
                    }
                }
            }
        }
        nearest != UNSEEN
    }

    /// Assigns tokens of `start` by one chain "go to rank a; an expert frees room on it and goes to rank b; …"; false
    /// if there is none at these levels.
    fn push(&mut self, start: usize) -> bool {
        self.path.clear();
        let mut node = start;
        while node < self.experts || self.spare[node] == 0 {
            if let Some(link) = self.advance(node) {
                self.path.push(link);
                node = link.to;
            } else {
                self.level[node] = UNSEEN;
                if self.path.pop().is_none() {
                    return false;
                }
                node = self.path.last().map_or(start, |link| link.to);
            }
        }
        let leaving = self.path.iter().skip(1).step_by(2).map(|link| self.tokens[link.pair]);
        let count = leaving.fold(self.spare[start].min(self.spare[node]), i64::min);
        self.spare[start] -= count;
        self.spare[node] -= count;
        for (step, link) in self.path.iter().enumerate() {
            self.tokens[link.pair] += if step % 2 == 0 { count } else { -count };
        }
        true
    }

    /// The next link of `node` that leads one level further.
    fn advance(&mut self, node: usize) -> Option<Link> {
        while self.next[node] < self.first[node + 1] {
            let link = self.links[self.next[node]];
            let open = node < self.experts || self.tokens[link.pair] > 0;
            if open && self.level[link.to] == self.level[node] + 1 {
                return Some(link);
            }
            self.next[node] += 1;
        }
        None
    }
}

fn ceil_div(tokens: i64, ranks: usize) -> i64 {
    (tokens as u64).div_ceil(ranks as u64) as i64
}
