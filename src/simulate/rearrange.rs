//! Assignment of experts to members: after a change, and when the load has shifted.

use super::job::Job;
use super::units::{RankUnits, matrix};
use crate::error::Result;
use crate::placement::{Request, Rows, is_worth_moving, rows_of, session_slots};
use crate::protection::CopyKind;
use std::collections::BTreeMap;

impl Job<'_> {
    /// Units of the agreed nodes; experts stay where they or their copies are if possible.
    pub(super) fn place(&mut self, old: &[Option<RankUnits>], version: u64) -> Result<Vec<RankUnits>> {
        if !self.scenario.session.replans
            && let Some(rank_units) = self.take_over(old)
        {
            return Ok(rank_units);
        }
        self.substitutes.clear();
        let in_memory = self.in_memory(version);
        let old: Vec<Option<&RankUnits>> = old.iter().map(Option::as_ref).collect();
        let nodes = self.agreed.clone();
        let (rows, imbalances) = self.plan_rows(&nodes, &old, Some(&in_memory))?;
        self.pace.imbalance = imbalances.into_iter().fold(1.0, f64::max);
        let mut rank_units = rank_units(&nodes, rows);
        self.place_owners(&mut rank_units, &old, version, &in_memory)?;
        Ok(rank_units)
    }

    /// Assigns each module with an owner to a member: one that trained it or has a copy, if the load stays even.
    fn place_owners(
        &self,
        rank_units: &mut [RankUnits],
        old: &[Option<&RankUnits>],
        version: u64,
        in_memory: &[Vec<usize>],
    ) -> Result<()> {
        let owned = self.engine.units().owned();
        if owned.is_empty() {
            return Ok(());
        }
        let (mut active, mut copies) = (vec![Vec::new(); owned.len()], vec![Vec::new(); owned.len()]);
        for (rank, own_units) in old.iter().enumerate().filter(|_| version == self.engine.history().newest) {
            let units = own_units.iter().flat_map(|own_units| &own_units.owned);
            units.for_each(|&unit| active[unit - owned.start].push(rank));
        }
        for (rank, units) in in_memory.iter().enumerate() {
            let units = units.iter().filter(|unit| owned.contains(unit));
            units.for_each(|&unit| copies[unit - owned.start].push(rank));
        }
        let loads: Vec<u64> = rank_units
            .iter()
            .map(|own_units| self.engine.units().sum(own_units.units(self.engine.units().experts)))
            .collect();
        let owners = self.planners.place_owners(
            &self.engine.units().bytes[owned.clone()],
            &active,
            &copies,
            &loads,
        )?;
        owned.zip(owners).for_each(|(unit, owner)| rank_units[owner].owned.push(unit));
        Ok(())
    }

    /// Assigns the units of lost nodes to newcomers; none if an expert would have no node, or a node no expert.
    fn take_over(&mut self, old: &[Option<RankUnits>]) -> Option<Vec<RankUnits>> {
        let mut lost = self.vacated.iter();
        let mut substitutes = BTreeMap::new();
        let mut rank_units = Vec::with_capacity(old.len());
        for (&node, own_units) in self.agreed.iter().zip(old) {
            if let Some(own_units) = own_units {
                rank_units.push(own_units.clone());
                continue;
            }
            let taken = lost.next()?;
            substitutes.insert(taken.node, node);
            rank_units.push(RankUnits { node, ..taken.clone() });
        }
        let mut has = vec![false; self.engine.units().bytes.len()];
        self.engine.units().everywhere().for_each(|unit| has[unit] = true);
        rank_units
            .iter()
            .flat_map(|own_units| own_units.units(self.engine.units().experts))
            .for_each(|unit| has[unit] = true);
        if !has.into_iter().all(|has| has) {
            return None;
        }
        self.substitutes = substitutes;
        Some(rank_units)
    }

    /// Rows of each class for these nodes, and their imbalance.
    fn plan_rows(
        &self,
        nodes: &[usize],
        old: &[Option<&RankUnits>],
        in_memory: Option<&[Vec<usize>]>,
    ) -> Result<(Vec<Rows>, Vec<f64>)> {
        let (experts, session) = (self.engine.units().experts, &self.scenario.session);
        let replicas = self.active_replicas();
        let slots = session_slots(experts, &vec![1; nodes.len()], session.slots, replicas)?;
        let slots =
            session.most_slots.map_or(slots, |most| slots.min(most.max(experts.div_ceil(nodes.len()))));
        let domains = self.domains(nodes);
        let fail_together = domains.len() < nodes.len();
        let (mut found, mut imbalances) = (Vec::new(), Vec::new());
        for class in 0..self.engine.units().classes {
            let load = self.loads.of_class(class);
            let previous = matrix(old, class, experts);
            let mut now = vec![0; experts];
            for (expert, count) in old.iter().flatten().flat_map(|own_units| &own_units.held[class]) {
                now[*expert] += count;
            }
            let counts = self.planners.allocate(load, nodes.len(), slots, replicas, Some(&now))?;
            let placement = self.planners.place(&Request {
                replicas: &counts,
                nodes: nodes.len(),
                slots,
                policy: self.preset.placement,
                load: Some(load),
                previous: Some(&previous),
                domains: fail_together.then_some(&domains[..]), // nodes that fail independently need no list
                failures: None,
            })?;
            imbalances.push(self.imbalance(&placement.matrix, class, nodes.len())?);
            let mut rows = rows_of(&placement.matrix, experts);
            if let Some(in_memory) = in_memory {
                let mut held = previous;
                for (row, units) in held.chunks_exact_mut(experts).zip(in_memory) {
                    let own = units.iter().filter(|&&unit| unit / experts == class);
                    own.for_each(|&unit| row[unit % experts] = 1);
                }
                let sizes = self.engine.units().of_class(class);
                let ranks = self.planners.ranks_in_place(&held, &placement.matrix, &sizes, &domains)?;
                let mut kept = vec![Vec::new(); rows.len()];
                rows.into_iter().zip(ranks).for_each(|(row, rank)| kept[rank] = row);
                rows = kept;
            }
            found.push(rows);
        }
        Ok((found, imbalances))
    }

    /// Load of the busiest node over the mean, for this placement of a class.
    fn imbalance(&self, matrix: &[i64], class: usize, nodes: usize) -> Result<f64> {
        self.planners.imbalance(matrix, self.loads.of_class(class), nodes, self.preset.token_split)
    }

    /// Wanted number of active replicas of each expert.
    fn active_replicas(&self) -> usize {
        let session = &self.scenario.session;
        self.preset.replicas(session.copies, session.min_replicas)
    }

    /// Units of which each agreed node has a copy of this version, by rank.
    fn in_memory(&self, version: u64) -> Vec<Vec<usize>> {
        let mut found = vec![Vec::new(); self.agreed.len()];
        let Some(copies) = self.engine.copies() else { return found };
        for (unit, each) in copies.units.iter().enumerate() {
            let is_copied = !matches!(each.kind, CopyKind::Active | CopyKind::Uncovered);
            if is_copied && copies.version(unit, self.engine.history()) == version {
                let ranks = each.keepers().filter_map(|node| self.agreed.binary_search(&node).ok());
                ranks.for_each(|rank| found[rank].push(unit));
            }
        }
        found
    }

    /// Nodes that fail together, by rank: racks if there are enough of them for all copies, or else nodes.
    pub(super) fn domains(&self, nodes: &[usize]) -> Vec<Vec<usize>> {
        let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (rank, &node) in nodes.iter().enumerate() {
            found.entry(self.domain_of(node)).or_default().push(rank);
        }
        if self.scenario.cluster.nodes_per_rack > 0 && found.len() < self.scenario.session.copies.max(2) {
            return (0..nodes.len()).map(|rank| vec![rank]).collect();
        }
        found.into_values().collect()
    }

    pub(super) fn domain_of(&self, node: usize) -> usize {
        match self.scenario.cluster.nodes_per_rack {
            0 => node,
            nodes => node / nodes,
        }
    }

    /// Whether the load has shifted enough for experts to move.
    pub(super) fn should_move(&mut self) -> Result<bool> {
        if !self.scenario.session.replans || !self.loads.has_changed() {
            return Ok(false);
        }
        let nodes: Vec<usize> = self.rank_units.iter().map(|own_units| own_units.node).collect();
        let old: Vec<Option<&RankUnits>> = self.rank_units.iter().map(Some).collect();
        let (_, planned) = self.plan_rows(&nodes, &old, None)?;
        let (mut is_worth, mut worst) = (false, 1.0_f64);
        for (class, then) in planned.into_iter().enumerate() {
            let now =
                self.imbalance(&matrix(&old, class, self.engine.units().experts), class, nodes.len())?;
            is_worth |= is_worth_moving(now, then);
            worst = worst.max(now);
        }
        self.pace.imbalance = worst;
        self.tally.moves += u64::from(is_worth);
        if is_worth {
            self.agreed = nodes;
        }
        Ok(is_worth)
    }
}

fn rank_units(nodes: &[usize], rows: Vec<Rows>) -> Vec<RankUnits> {
    let mut rank_units: Vec<RankUnits> =
        nodes.iter().map(|&node| RankUnits { node, held: Vec::new(), owned: Vec::new() }).collect();
    for class in rows {
        for (own_units, row) in rank_units.iter_mut().zip(class) {
            own_units.held.push(row);
        }
    }
    rank_units
}
