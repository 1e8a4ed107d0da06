//! A recovery: the surviving state, the version to continue from, and the costs.

use super::account::{Cause, nanoseconds, seconds};
use super::job::Job;
use super::units::RankUnits;
use super::world::Flow;
use crate::error::Result;
use crate::protocol::{Event, step_of};
use crate::recovery::{Holding, Kind, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// The version to continue from, and its properties.
struct Found {
    version: Option<u64>,
    may_lag: bool,
    stale: Vec<(usize, u64)>,
}

/// Bytes that a recovery moves, by node.
#[derive(Clone, Debug, Default)]
struct Traffic {
    sent: BTreeMap<usize, u64>,
    received: BTreeMap<usize, (u64, usize)>,
    /// Optimizer state that is sent and received during the next step.
    late_sent: BTreeMap<usize, u64>,
    late_received: BTreeMap<usize, u64>,
    local: BTreeMap<usize, u64>,
    read: BTreeMap<usize, u64>,
    /// Bytes that the busiest of a node's processes digests.
    verified: BTreeMap<usize, u64>,
}

impl Job<'_> {
    /// Surveys the surviving state and fetches the units that each member needs.
    pub(super) fn restore(&mut self, version: u64) -> Result<Event> {
        let since = self.surveying_since.take().unwrap_or(self.world.now);
        let done = seconds(self.world.now - since);
        let survey = self.scenario.costs.survey_seconds + (self.survey_digests() - done).max(0.0);
        if self.world.spend(Cause::Survey, nanoseconds(survey))? == Flow::Lost {
            return self.lost();
        }
        self.finish_writing();
        let old = self.old_rank_units();
        let found = self.find_version(&old)?;
        let is_patient = self.is_patient();
        if found.version.is_none() && is_patient {
            self.missing_since.get_or_insert(self.world.now);
            return Ok(Event::Missing);
        }
        let stored = self.stored.filter(|&stored| found.version.is_none_or(|version| stored > version));
        match (stored, found.version) {
            (Some(stored), _) => self.read_checkpoint(stored, &old),
            (None, Some(_)) => self.fetch(version, found, &old),
            (None, None) => Ok(Event::Unrecoverable),
        }
    }

    /// The units of each agreed node; none for a node that was no member.
    fn old_rank_units(&self) -> Vec<Option<RankUnits>> {
        let mut rank_units = self.rank_units.iter().peekable();
        let mut seat_of = |node: usize| {
            while rank_units.next_if(|own_units| own_units.node < node).is_some() {}
            rank_units.next_if(|own_units| own_units.node == node).cloned()
        };
        self.agreed.iter().map(|&node| seat_of(node)).collect()
    }

    fn is_patient(&self) -> bool {
        let limit = nanoseconds(self.scenario.session.rejoin_timeout);
        self.missing_since.is_none_or(|since| self.world.now < since + limit)
    }

    /// A version from which all can continue, without lagging experts if possible.
    fn find_version(&self, old: &[Option<RankUnits>]) -> Result<Found> {
        let holdings = self.survey(old, usize::from(self.is_whole(old)));
        let nothing = vec![Vec::new(); old.len()];
        let plan = |may_lag: &[usize]| -> Result<Plan> {
            self.planners.plan_recovery(&self.engine.units().bytes, &holdings, &nothing, may_lag)
        };
        let (found, may_lag) = self.engine.version_left(plan)?;
        Ok(Found { version: found.version, may_lag, stale: found.stale })
    }

    fn experts(&self) -> Vec<usize> {
        (0..self.engine.units().num_experts()).collect()
    }

    /// Whether every unit is trained by one of those that are left.
    fn is_whole(&self, old: &[Option<RankUnits>]) -> bool {
        let mut has = vec![false; self.engine.units().bytes.len()];
        self.engine.units().everywhere().for_each(|unit| has[unit] = true);
        for own_units in old.iter().flatten() {
            own_units.units(self.engine.units().experts).for_each(|unit| has[unit] = true);
        }
        has.into_iter().all(|has| has) && old.iter().any(Option::is_some)
    }

    /// Holdings of each member, by rank. If `most` is above 0, only that number of each unit's active holders is
    /// listed: they are equivalent, and no plan with fewer transfers uses more.
    fn survey(&self, old: &[Option<RankUnits>], most: usize) -> Vec<Vec<Holding>> {
        let (engine, mut holdings) = (&self.engine, vec![Vec::new(); old.len()]);
        if let Some(first) = holdings.first_mut() {
            // the first member lists what every process can make, and the experts that are saved one by one
            if self.rank_units.is_empty() {
                first.extend((0..engine.units().bytes.len()).map(|unit| holding(unit, 0, Kind::Active)));
            }
            first.extend(engine.saved().map(|(unit, version)| holding(unit, version, Kind::Persisted)));
        }
        let most = if most == 0 { usize::MAX } else { most };
        let mut counted = vec![0; engine.units().bytes.len()];
        for (rank, own_units) in old.iter().enumerate() {
            let Some(own_units) = own_units else { continue };
            for unit in own_units.units(engine.units().experts).chain(engine.units().everywhere()) {
                counted[unit] += 1;
                if counted[unit] <= most {
                    holdings[rank].push(holding(unit, engine.history().newest, Kind::Active));
                }
            }
        }
        let rank_of = |node: usize| self.agreed.binary_search(&node).ok().filter(|&rank| old[rank].is_some());
        let copied = engine.copies().into_iter().flat_map(|copies| copies.held(engine.history()));
        for (unit, node, version, kind) in copied {
            if let Some(rank) = rank_of(node) {
                holdings[rank].push(holding(unit, version, kind));
            }
        }
        holdings
    }

    fn fetch(&mut self, before: u64, found: Found, old: &[Option<RankUnits>]) -> Result<Event> {
        let Found { version: Some(version), may_lag, .. } = found else { return Ok(Event::Unrecoverable) };
        let is_newest =
            version == self.engine.history().newest && !self.rank_units.is_empty() && found.stale.is_empty();
        let rank_units = self.place(old, version)?;
        if version == 0 && self.rank_units.is_empty() {
            self.undo(0);
            return Ok(self.adopt(version, rank_units)); // each initialises its own state
        }
        let mut needs = Vec::with_capacity(rank_units.len());
        for (own_units, old) in rank_units.iter().zip(old) {
            needs.push(self.needs(own_units, old.as_ref().filter(|_| is_newest)));
        }
        let wanted: usize = needs.iter().map(Vec::len).sum();
        let holdings = self.survey(old, if is_newest { wanted.max(1) } else { 0 });
        let may_lag = if may_lag { self.experts() } else { Vec::new() };
        let plan = self.planners.plan_recovery(&self.engine.units().bytes, &holdings, &needs, &may_lag)?;
        let traffic = self.traffic(&plan);
        if !self.spend_traffic(&traffic)? {
            return self.lost();
        }
        if step_of(version) < step_of(before) {
            self.undo(step_of(version));
        }
        self.stale = plan.stale;
        Ok(self.adopt(version, rank_units))
    }

    /// Units that a member runs and does not have.
    fn needs(&self, own_units: &RankUnits, old: Option<&RankUnits>) -> Vec<usize> {
        if old.is_some_and(|old| old.held == own_units.held && old.owned == own_units.owned) {
            return Vec::new();
        }
        let everywhere = self.engine.units().everywhere().filter(|_| old.is_none());
        let has = |unit: usize| old.is_some_and(|old| old.has(unit, self.engine.units()));
        own_units.units(self.engine.units().experts).filter(|&unit| !has(unit)).chain(everywhere).collect()
    }

    fn traffic(&self, plan: &Plan) -> Traffic {
        let mut found = Traffic::default();
        let goes_whole: BTreeSet<usize> = plan
            .transfers
            .iter()
            .filter(|each| each.source != each.destination && each.kind != Kind::Active)
            .map(|each| each.unit)
            .collect();
        for transfer in &plan.transfers {
            let mut bytes = self.engine.units().bytes[transfer.unit];
            let is_away = transfer.source != transfer.destination;
            if is_away && plan.stale.is_empty() && !goes_whole.contains(&transfer.unit) {
                let late = bytes - self.weights(transfer.unit);
                *found.late_sent.entry(transfer.source).or_default() += late;
                *found.late_received.entry(transfer.destination).or_default() += late;
                bytes -= late;
            } else {
                *found.verified.entry(transfer.destination).or_default() += self.verified(transfer.unit);
            }
            if transfer.kind == Kind::Persisted {
                *found.read.entry(transfer.destination).or_default() += bytes;
            } else if transfer.source == transfer.destination {
                *found.local.entry(transfer.destination).or_default() += bytes;
            } else {
                *found.sent.entry(transfer.source).or_default() += bytes;
                let (received, count) = found.received.entry(transfer.destination).or_default();
                (*received, *count) = (*received + bytes, *count + 1);
            }
        }
        found
    }

    /// Bytes of a unit that a forward pass needs: the weights' share of state that is no expert.
    fn weights(&self, unit: usize) -> u64 {
        let model = &self.scenario.model;
        let dense: u64 = model.dense_modules.iter().sum();
        if dense == 0 {
            return self.engine.units().bytes[unit];
        }
        (u128::from(self.engine.units().bytes[unit]) * u128::from(model.dense_weight_bytes)
            / u128::from(dense)) as u64
    }

    /// Bytes of a unit that one process of a node digests: each digests all units that every node has, and a part of
    /// the rest.
    fn verified(&self, unit: usize) -> u64 {
        let parts = if self.engine.units().everywhere().contains(&unit) {
            1
        } else {
            self.scenario.cluster.devices as u64
        };
        self.engine.units().bytes[unit].div_ceil(parts)
    }

    /// Seconds in which all processes compute digests of their units, from when they notice a loss, or connect.
    fn survey_digests(&self) -> f64 {
        let everywhere = self.engine.units().everywhere();
        let of = |own_units: &RankUnits| -> u64 {
            own_units
                .units(self.engine.units().experts)
                .chain(everywhere.clone())
                .map(|unit| self.verified(unit))
                .sum()
        };
        let most = self.rank_units.iter().map(of).max().unwrap_or(0);
        most as f64 / self.scenario.costs.digest_bytes_per_second
    }

    /// Spends the time of the transfers, except those during the next step; false if a member is lost meanwhile.
    ///
    /// Digests are computed while bytes arrive.
    fn spend_traffic(&mut self, traffic: &Traffic) -> Result<bool> {
        let (costs, cluster) = (&self.scenario.costs, &self.scenario.cluster);
        let most = |by_node: &BTreeMap<usize, u64>| by_node.values().copied().max().unwrap_or(0) as f64;
        let received = traffic.received.values().map(|&(bytes, _)| bytes).max().unwrap_or(0) as f64;
        let messages = traffic.received.values().map(|&(_, count)| count).max().unwrap_or(0) as f64;
        let network = most(&traffic.sent).max(received) / cluster.network_bytes_per_second
            + messages * cluster.network_latency_seconds;
        let own = most(&traffic.local) / costs.capture_bytes_per_second;
        let read = costs.read(most(&traffic.read), traffic.read.len());
        let digests = most(&traffic.verified) / costs.digest_bytes_per_second;
        let verify = (digests - network - own - read).max(0.0);
        let late = most(&traffic.late_sent).max(most(&traffic.late_received));
        self.pace.late_state = late / cluster.network_bytes_per_second;
        let received =
            traffic.received.values().map(|(bytes, _)| bytes).chain(traffic.late_received.values());
        self.tally.recovery_bytes += received.map(|&bytes| u128::from(bytes)).sum::<u128>();
        self.tally.local_bytes += traffic.local.values().map(|&bytes| u128::from(bytes)).sum::<u128>();
        self.tally.read_bytes += traffic.read.values().map(|&bytes| u128::from(bytes)).sum::<u128>();
        for (cause, seconds) in [(Cause::Fetch, network + own + read), (Cause::Verify, verify)] {
            if self.world.spend(cause, nanoseconds(seconds))? == Flow::Lost {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Loads all units from the newest checkpoint.
    fn read_checkpoint(&mut self, version: u64, old: &[Option<RankUnits>]) -> Result<Event> {
        let nothing: Vec<Option<RankUnits>> = vec![None; old.len()];
        let rank_units = self.place(&nothing, version)?;
        let mut traffic = Traffic::default();
        for (rank, own_units) in rank_units.iter().enumerate() {
            let needs = self.needs(own_units, None);
            traffic.read.insert(rank, self.engine.units().sum(needs.iter().copied()));
            traffic.verified.insert(rank, needs.iter().map(|&unit| self.verified(unit)).sum());
        }
        if !self.spend_traffic(&traffic)? {
            return self.lost();
        }
        self.tally.checkpoint_loads += 1;
        self.undo(step_of(version));
        self.stale.clear();
        Ok(self.adopt(version, rank_units))
    }

    pub(super) fn adopt(&mut self, version: u64, rank_units: Vec<RankUnits>) -> Event {
        self.missing_since = None;
        self.engine.restore(version);
        self.rank_units = rank_units;
        self.vacated.clear();
        self.tally.recoveries += 1;
        self.tally.note_members(self.rank_units.len());
        Event::Restored { version, is_stale: !self.stale.is_empty() }
    }

    /// Counts the tokens lost by experts that returned to older copies.
    pub(super) fn count_losses(&mut self) -> Result<()> {
        let stale = std::mem::take(&mut self.stale);
        let step = step_of(self.engine.history().newest);
        if let Some(lost) = self.engine.lose(&stale)? {
            self.tally.lost_tokens += lost;
            return Ok(());
        }
        let (tokens, experts) = (self.scenario.model.tokens_per_step as f64, self.engine.units().experts);
        for (unit, at) in stale {
            let steps = step.saturating_sub(step_of(at)) as f64;
            self.tally.lost_tokens += steps * tokens * self.loads.of_class(unit / experts)[unit % experts];
        }
        Ok(())
    }
}

fn holding(unit: usize, version: u64, kind: Kind) -> Holding {
    Holding { unit, version, digest: 0, kind }
}
