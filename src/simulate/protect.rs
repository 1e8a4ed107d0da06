//! Protection after a change: holders, first copies, and the delay of each step by copies.

use super::account::{Cause, nanoseconds};
use super::copies::{Copies, UnitCopies};
use super::job::Job;
use super::units::active;
use super::world::Flow;
use crate::error::Result;
use crate::protection::{CopyKind, Copying, FAILURE, ProtectionRequest, RankInfo, UnitInfo};
use crate::protocol::Event;
use crate::schedule::{CopyItem, Link, Receiver, Request, forecast_memory, synthetic_windows};
use std::collections::BTreeMap;

/// Maximum number of steps over which a version may be copied.
const MAX_VERSION_STEPS: usize = 64;

/// Bytes from a node to another in a step.
type Sends = BTreeMap<(usize, usize), u64>;

impl Job<'_> {
    /// Plans the holders of copies, and begins to make the missing ones.
    pub(super) fn protect(&mut self, version: u64, mut waits: bool) -> Result<Event> {
        if self.send_weights()? == Flow::Lost {
            return self.lost();
        }
        let active = active(&self.rank_units, &self.units);
        let step = self.step_seconds();
        if let Some(turns) = &mut self.turns {
            let speed = self.scenario.cluster.network_bytes_per_second;
            turns.replan(&active, step, &vec![Some(speed); self.rank_units.len()], &self.units)?;
        }
        let mut copies = match self.kept_copies(&active, version) {
            Some(copies) => copies,
            None => {
                let mut copies = self.plan_protection(&active, version)?;
                waits |= !self.make_room(&copies);
                let room = self.scenario.cluster.host_bytes;
                let missing = copies.fit(room, &self.units, self.preset.per_expert_versions);
                self.tally.missing_copy_bytes = self.tally.missing_copy_bytes.max(missing);
                self.note_memory(&copies);
                copies
            }
        };
        let first = self.first_sends(&copies);
        let first_bytes: u64 = first.values().sum();
        self.tally.first_bytes += u128::from(first_bytes);
        let seconds = self.busiest(&first) as f64 / self.scenario.cluster.network_bytes_per_second;
        copies.steps = self.pace_copies(&copies)?;
        self.copies = Some(copies);
        let waits = waits || self.scenario.session.copies == 0;
        self.pace.first_copies = if waits { 0.0 } else { seconds };
        if waits {
            let late = std::mem::take(&mut self.pace.late_state);
            if self.world.spend(Cause::Fetch, nanoseconds(late))? == Flow::Lost {
                return self.lost();
            }
            let flow = self.world.spend(Cause::Protect, nanoseconds(seconds))?;
            self.former = None;
            return self.unless_lost(flow, Event::Protected { is_whole: true });
        }
        Ok(Event::Protected { is_whole: false })
    }

    /// Whether all nodes have memory for new copies next to the previous ones, so that training can continue meanwhile.
    /// If even the snapshots do not fit, the previous copies are removed first.
    fn make_room(&mut self, copies: &Copies) -> bool {
        let room = self.scenario.cluster.host_bytes;
        let mut wanted = copies.host_bytes(&self.units);
        let Some(former) = &self.former else { return wanted.values().all(|&bytes| bytes <= room) };
        for (node, bytes) in former.host_bytes(&self.units) {
            *wanted.entry(node).or_default() += bytes;
        }
        let is_roomy = wanted.into_iter().all(|(node, bytes)| !self.world.members[node] || bytes <= room);
        if !is_roomy {
            self.former = self.former.take().map(Copies::removed);
        }
        is_roomy
    }

    /// Sends the owners' weights to all, once to each node.
    fn send_weights(&mut self) -> Result<Flow> {
        let others = self.rank_units.len().saturating_sub(1);
        if self.units.owned().is_empty() || others == 0 {
            return Ok(Flow::Done);
        }
        let (weights, cluster) = (self.scenario.model.dense_weight_bytes, &self.scenario.cluster);
        let seconds = weights as f64 / cluster.network_bytes_per_second + cluster.network_latency_seconds;
        self.tally.recovery_bytes += u128::from(weights) * others as u128;
        self.world.spend(Cause::Fetch, nanoseconds(seconds))
    }

    fn plan_protection(&mut self, active: &[Vec<usize>], version: u64) -> Result<Copies> {
        let experts = self.units.num_experts();
        let tokens = self.scenario.model.tokens_per_step as f64;
        let unit = |unit: usize| UnitInfo {
            state_bytes: self.units.bytes[unit],
            gradient_bytes: self.units.gradients[unit],
            active: active[unit].clone(),
            tokens: match unit < experts {
                true => tokens * self.loads.of_class(unit / self.units.experts)[unit % self.units.experts],
                false => tokens,
            },
            replayable: self.scenario.model.replayable
                && (unit < experts || self.units.owned().contains(&unit)),
            may_lag: unit < experts,
        };
        let units: Vec<UnitInfo> = (0..self.units.bytes.len()).map(unit).collect();
        let nodes: Vec<usize> = self.rank_units.iter().map(|own_units| own_units.node).collect();
        let ranks = self.session_ranks(&nodes);
        let plan = self.planners.plan_protection(&ProtectionRequest {
            preset: self.preset,
            units: &units,
            ranks: &ranks,
            copies: self.scenario.session.copies,
            budget: self.scenario.session.copy_budget,
        })?;
        self.pace.chosen_delay = plan.delay_seconds;
        let takes_turns = self.turns.is_some();
        Ok(Copies::new(&plan, &nodes, version, takes_turns, &self.units))
    }

    fn session_ranks(&self, nodes: &[usize]) -> Vec<RankInfo> {
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
            host_speed: None,
        };
        domain.into_iter().map(rank).collect()
    }

    fn link(&self) -> Link {
        let cluster = &self.scenario.cluster;
        Link { alpha: cluster.network_latency_seconds, beta: cluster.network_bytes_per_second }
    }

    /// The previous copies, with newcomers in place of lost nodes; none if the copies must be planned again.
    fn kept_copies(&self, active: &[Vec<usize>], version: u64) -> Option<Copies> {
        let former = self.former.as_ref().filter(|_| !self.scenario.session.replans)?;
        let is_member = |node: &usize| self.agreed.binary_search(node).is_ok();
        let now = |node: &usize| self.substitutes.get(node).copied().or(is_member(node).then_some(*node));
        let wanted = self.scenario.session.copies.min(self.rank_units.len());
        let mut units = Vec::with_capacity(former.units.len());
        for (each, active) in former.units.iter().zip(active) {
            let holders: Vec<usize> = each.holders.iter().filter_map(now).collect();
            let is_covered = holders.len() == each.holders.len();
            if !is_covered || (holders.is_empty() && active.len() < wanted) {
                return None;
            }
            let primary =
                now(&each.primary).or_else(|| active.first().map(|&rank| self.rank_units[rank].node))?;
            let takes_turns = self.turns.is_some() && units.len() < self.units.num_experts();
            let version = takes_turns.then_some(version);
            let own = each.own.iter().filter_map(now).collect();
            units.push(UnitCopies { primary, holders, own, version, ..each.clone() });
        }
        Some(Copies { units, begun: version, steps: 1 })
    }

    /// Bytes of copies that are missing under the new plan.
    fn first_sends(&self, copies: &Copies) -> Sends {
        let mut sends = Sends::new();
        let has = |unit: usize, node: usize| {
            let Some(former) = &self.former else { return false };
            former.units[unit].holders.contains(&node) && former.version(unit, &self.line) == copies.begun
        };
        for (unit, each) in copies.units.iter().enumerate() {
            for &holder in each.holders.iter().filter(|&&holder| !has(unit, holder)) {
                *sends.entry((each.primary, holder)).or_default() += self.units.bytes[unit];
            }
        }
        sends
    }

    /// Bytes of the node that sends or receives the most.
    fn busiest(&self, sends: &Sends) -> u64 {
        let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
        for (&(sender, receiver), &bytes) in sends {
            *sent.entry(sender).or_insert(0) += bytes;
            *received.entry(receiver).or_insert(0) += bytes;
        }
        sent.into_values().chain(received.into_values()).max().unwrap_or(0)
    }

    /// Sets the delay of each step by copies and the bytes they send; returns the number of steps over which a version
    /// is copied.
    fn pace_copies(&mut self, copies: &Copies) -> Result<u64> {
        let sends = self.sends(copies);
        let is_late = copies.late(&self.line).is_some();
        let (delay, steps) =
            match self.preset.schedule.filter(|_| self.preset.copying != Copying::Chosen || is_late) {
                Some(policy) if !sends.is_empty() => self.chunk_delay(&sends, policy)?,
                _ => (self.pace.chosen_delay, 1),
            };
        let unit_bytes = |(unit, each): (usize, &UnitCopies)| {
            self.bytes_per_step(unit, each.kind) * each.holders.len() as u64
        };
        let chosen = self.turns.as_ref().map_or(0, |_| self.units.num_experts()); // counted when they are selected
        let all: u64 = copies.units.iter().enumerate().skip(chosen).map(unit_bytes).sum();
        self.pace.copy_bytes = all / steps;
        self.pace.copy_seconds = delay;
        Ok(steps)
    }

    /// Bytes from node to node in a step.
    fn sends(&self, copies: &Copies) -> Sends {
        let mut sends = Sends::new();
        let part = self.turns.as_ref().map_or(1.0, |turns| turns.followed_part(copies, &self.units));
        for (unit, each) in copies.units.iter().enumerate() {
            let bytes = self.bytes_per_step(unit, each.kind);
            let part = if unit < self.units.num_experts() { part } else { 1.0 };
            for &holder in each.holders.iter().filter(|_| bytes > 0) {
                *sends.entry((each.primary, holder)).or_default() += (bytes as f64 * part) as u64;
            }
        }
        sends
    }

    /// Bytes that each copy of a unit gets in a step.
    fn bytes_per_step(&self, unit: usize, kind: CopyKind) -> u64 {
        match kind {
            CopyKind::Replayed => self.units.gradients[unit],
            CopyKind::Snapshot { period } => self.units.bytes[unit] / period as u64,
            CopyKind::Active | CopyKind::Uncovered => 0,
        }
    }

    /// Seconds by which the chunks of the busiest node delay a step, and the number of steps over which they send a
    /// version.
    fn chunk_delay(&self, sends: &Sends, policy: crate::schedule::Policy) -> Result<(f64, u64)> {
        let mut traffic: BTreeMap<usize, u64> = BTreeMap::new();
        for (&(sender, receiver), &bytes) in sends {
            *traffic.entry(sender).or_default() += bytes;
            *traffic.entry(receiver).or_default() += bytes;
        }
        let busiest = traffic.iter().max_by_key(|(node, bytes)| (**bytes, std::cmp::Reverse(**node)));
        let Some((&node, &bytes)) = busiest else { return Ok((0.0, 1)) };
        let own = |(&(sender, receiver), &bytes): (&(usize, usize), &u64)| {
            let peer = if sender == node { receiver } else { sender };
            let name = format!("{sender} to {receiver}");
            (sender == node || receiver == node).then(|| CopyItem {
                unit: name,
                bytes,
                destinations: vec![peer],
            })
        };
        let pieces: Vec<CopyItem> = sends.iter().filter_map(own).collect();
        let model = &self.scenario.model;
        let windows = synthetic_windows(model.layers, self.step_seconds(), model.network_idle)?;
        let mut peers: Vec<usize> = pieces.iter().flat_map(|piece| piece.destinations.clone()).collect();
        peers.sort_unstable();
        peers.dedup();
        let receiver = |rank| Receiver { rank, windows: windows.clone(), clock_offset: 0.0 };
        let receivers: Vec<Receiver> = peers.into_iter().map(receiver).collect();
        let request = Request {
            pieces: &pieces,
            windows: &windows,
            receivers: &receivers,
            link: self.link(),
            memory: forecast_memory(bytes),
            policy,
            max_steps: MAX_VERSION_STEPS,
            version_steps: 1,
        };
        let steps = match (self.scenario.session.snapshot_interval, &self.turns) {
            (_, Some(_)) => 1, // experts that take turns have their own versions
            (Some(steps), None) => steps,
            (None, None) => self.version_steps(&request)?,
        };
        let plan = self.planners.plan_chunks(&Request { version_steps: steps, ..request })?;
        Ok((plan.reason.delay_seconds, steps as u64))
    }

    /// Number of steps over which a version is sent: the minimum that the windows need, or the one that loses the least
    /// time.
    fn version_steps(&self, request: &Request<'_>) -> Result<usize> {
        let steps = self.planners.version_steps(request, MAX_VERSION_STEPS)?;
        let found = self.planners.plan_chunks(&Request { version_steps: steps, ..*request })?.reason;
        let pace = found.pace(request.windows.step_seconds, request.link, FAILURE, MAX_VERSION_STEPS)?;
        Ok(pace.map_or(steps, |period| period.steps))
    }

    /// Records the memory of the fullest node: the units that it trains, and copies.
    fn note_memory(&mut self, copies: &Copies) {
        let mut by_node: BTreeMap<usize, u64> = BTreeMap::new();
        let devices = self.scenario.cluster.devices as u64;
        let weights = if self.units.owned().is_empty() { 0 } else { self.scenario.model.dense_weight_bytes };
        let everywhere = devices * (self.units.sum(self.units.everywhere()) + weights);
        let owned = self.units.sum(self.units.owned());
        for own_units in &self.rank_units {
            let held = self.units.sum(own_units.units(self.units.experts));
            let mine = self.units.sum(own_units.owned.iter().copied()); // their weights are counted above
            let twice = (u128::from(weights) * u128::from(mine) / u128::from(owned.max(1))) as u64;
            *by_node.entry(own_units.node).or_default() += everywhere + held - twice;
        }
        for (node, bytes) in copies.host_bytes(&self.units) {
            *by_node.entry(node).or_default() += bytes;
        }
        let most = by_node.into_values().max().unwrap_or(0);
        self.tally.memory_bytes = self.tally.memory_bytes.max(most);
    }
}
