//! Protection after a change: the engine's plan, and the time that its first copies take.

use super::account::{Cause, nanoseconds};
use super::job::Job;
use super::units::active;
use super::world::Flow;
use crate::engine::{Members, Network, Sends, busiest};
use crate::error::Result;
use crate::protection::{RankInfo, UnitInfo};
use crate::protocol::Event;
use crate::schedule::Link;

impl Job<'_> {
    /// Plans the holders of copies, and begins to make the missing ones.
    pub(super) fn protect(&mut self, version: u64, mut waits: bool) -> Result<Event> {
        if self.send_weights()? == Flow::Lost {
            return self.lost();
        }
        let nodes: Vec<usize> = self.rank_units.iter().map(|own_units| own_units.node).collect();
        let (units, ranks) = (self.unit_infos(), self.rank_infos(&nodes));
        let members = Members { nodes: &nodes, ranks: &ranks, units: &units };
        let first = match self.keep_plan(&members, version)? {
            Some(first) => first,
            None => {
                let planned = self.engine.plan(&members, version)?;
                waits |= !planned.has_room;
                self.tally.missing_copy_bytes = self.tally.missing_copy_bytes.max(planned.missing_bytes);
                self.record_memory();
                planned.first
            }
        };
        self.tally.first_bytes += first.values().map(|&bytes| u128::from(bytes)).sum::<u128>();
        let seconds = busiest(&first) as f64 / self.scenario.cluster.network_bytes_per_second;
        let model = &self.scenario.model;
        let network = Network {
            link: self.link(),
            layers: model.layers,
            step_seconds: self.step_seconds(),
            idle: model.network_idle,
        };
        self.pace.copies = self.engine.pace(&network)?;
        let waits = waits || self.scenario.session.copies == 0;
        self.pace.first_copies = if waits { 0.0 } else { seconds };
        if waits {
            let late = std::mem::take(&mut self.pace.late_state);
            if self.world.spend(Cause::Fetch, nanoseconds(late))? == Flow::Lost {
                return self.lost();
            }
            let flow = self.world.spend(Cause::Protect, nanoseconds(seconds))?;
            self.engine.release();
            return self.unless_lost(flow, Event::Protected { is_whole: true });
        }
        Ok(Event::Protected { is_whole: false })
    }

    /// Keeps the former plan, with newcomers in place of lost nodes; none if all copies must be planned again.
    fn keep_plan(&mut self, members: &Members<'_>, version: u64) -> Result<Option<Sends>> {
        if self.scenario.session.replans {
            return Ok(None);
        }
        let is_member = |node: usize| self.agreed.binary_search(&node).is_ok();
        let now = |node| self.substitutes.get(&node).copied().or(is_member(node).then_some(node));
        self.engine.keep_plan(members, now, version)
    }

    /// Sends the owners' weights to all, once to each node.
    fn send_weights(&mut self) -> Result<Flow> {
        let others = self.rank_units.len().saturating_sub(1);
        if self.engine.units().owned().is_empty() || others == 0 {
            return Ok(Flow::Done);
        }
        let (weights, cluster) = (self.scenario.model.dense_weight_bytes, &self.scenario.cluster);
        let seconds = weights as f64 / cluster.network_bytes_per_second + cluster.network_latency_seconds;
        self.tally.recovery_bytes += u128::from(weights) * others as u128;
        self.world.spend(Cause::Fetch, nanoseconds(seconds))
    }

    fn unit_infos(&self) -> Vec<UnitInfo> {
        let (units, tokens) = (self.engine.units(), self.scenario.model.tokens_per_step as f64);
        let experts = units.num_experts();
        let info = |(unit, active): (usize, Vec<usize>)| UnitInfo {
            state_bytes: units.bytes[unit],
            gradient_bytes: units.gradients[unit],
            active,
            tokens: self.loads.shares().get(unit).map_or(tokens, |share| tokens * share),
            replayable: self.scenario.model.replayable && (unit < experts || units.owned().contains(&unit)),
            may_lag: unit < experts,
        };
        active(&self.rank_units, units).into_iter().enumerate().map(info).collect()
    }

    fn rank_infos(&self, nodes: &[usize]) -> Vec<RankInfo> {
        let (cluster, session) = (&self.scenario.cluster, &self.scenario.session);
        let step = self.step_seconds();
        let mut domain = vec![0; nodes.len()];
        for (number, ranks) in self.domains(nodes).iter().enumerate() {
            ranks.iter().for_each(|&rank| domain[rank] = number);
        }
        let rank = |domain: usize| RankInfo {
            node: format!("{domain:07}"),
            free_bytes: cluster.host_bytes,
            trains: true,
            step_seconds: Some(step),
            network_seconds: Some(step * self.scenario.model.network_idle),
            log_bytes: session.replay_log_bytes,
            link: Some(self.link()),
            host_speed: self.host_speed,
        };
        domain.into_iter().map(rank).collect()
    }

    fn link(&self) -> Link {
        let cluster = &self.scenario.cluster;
        Link { alpha: cluster.network_latency_seconds, beta: cluster.network_bytes_per_second }
    }

    /// Records the memory of the fullest node: the units that it trains, and copies.
    fn record_memory(&mut self) {
        let (units, mut by_node) = (self.engine.units(), self.engine.host_bytes());
        let devices = self.scenario.cluster.devices as u64;
        let weights = if units.owned().is_empty() { 0 } else { self.scenario.model.dense_weight_bytes };
        let everywhere = devices * (units.sum(units.everywhere()) + weights);
        let owned = units.sum(units.owned());
        for own_units in &self.rank_units {
            let held = units.sum(own_units.units(units.experts));
            let mine = units.sum(own_units.owned.iter().copied()); // their weights are counted above
            let twice = (u128::from(weights) * u128::from(mine) / u128::from(owned.max(1))) as u64;
            *by_node.entry(own_units.node).or_default() += everywhere + held - twice;
        }
        let most = by_node.into_values().max().unwrap_or(0);
        self.tally.memory_bytes = self.tally.memory_bytes.max(most);
    }
}
