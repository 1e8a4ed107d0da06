//! Protection plan of a session: the copies of all units by its preset.

use super::choose::choose_copies;
use super::copy_constants::{FAILURE, LOG_STEPS, LOGGED_STEPS, MAX_PERIOD, OWN_VERSIONS, RECORD_BYTES};
use super::plan::CopyKind;
use super::preset::{Copying, Preset};
use super::request::{CopyNode, CopyRequest, CopyUnit};
use crate::error::Result;
use crate::placement::{CopyPolicy, copy_holders, primaries, training_copy_holders, unit_copy_holders};
use crate::schedule::Link;
use std::collections::{BTreeMap, BTreeSet};

/// Assumed seconds of a step that is not profiled yet.
const UNKNOWN_SECONDS: f64 = 1e6;
/// Assumed link until one is measured: 50 µs and 1 GB/s.
pub const DEFAULT_LINK: Link = Link { alpha: 50e-6, beta: 1e9 };
/// Steps between two persisted versions.
const PERSIST_PERIOD: usize = 1000;

/// A unit to protect.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitInfo {
    /// Bytes of its state.
    pub state_bytes: u64,
    /// Bytes of its gradient as it is sent.
    pub gradient_bytes: u64,
    /// Ranks that train on it.
    pub active: Vec<usize>,
    /// Tokens that it receives in a step.
    pub tokens: f64,
    /// Whether its optimizer's steps can be repeated bit for bit.
    pub replayable: bool,
    /// Whether training can continue with an older version of it, as with an expert.
    pub may_lag: bool,
}

/// Capacity of a rank, as it reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct RankInfo {
    /// Its node, or the rack or zone over which copies are spread. Ranks with the same one fail together, unless all have it.
    pub node: String,
    /// Host memory that it may use.
    pub free_bytes: u64,
    /// False for a replica node, which keeps copies of units that too few nodes train.
    pub trains: bool,
    /// Seconds of its step; none before it is profiled.
    pub step_seconds: Option<f64>,
    /// Idle seconds of its network in a step; none if unknown.
    pub network_seconds: Option<f64>,
    /// Capacity of its log of gradients.
    pub log_bytes: u64,
    /// Measured link; none before enough was sent to measure it.
    pub link: Option<Link>,
    /// Measured bytes per second from the state to host memory; none before the first snapshot.
    pub host_speed: Option<f64>,
}

/// Protection of one unit in addition to its active holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitProtection {
    /// Kind of the copies; [`CopyKind::Active`] without copies.
    pub kind: CopyKind,
    /// The active rank that sends.
    pub primary: usize,
    /// Other ranks that keep copies. Of a snapshot, the primary keeps one as well.
    pub holders: Vec<usize>,
    /// Ranks that train the unit and keep snapshots of it in the memory of their own nodes: on `copies` nodes, or on all that
    /// train it if they are fewer. Empty if `holders` keep snapshots.
    pub own: Vec<usize>,
}

impl UnitProtection {
    fn active(primary: usize) -> Self {
        Self { kind: CopyKind::Active, primary, holders: Vec::new(), own: Vec::new() }
    }

    fn snapshot(primary: usize, holders: Vec<usize>) -> Self {
        Self { kind: CopyKind::Snapshot { period: 1 }, primary, holders, own: Vec::new() }
    }
}

/// Protection of all units.
#[derive(Clone, Debug, PartialEq)]
pub struct ProtectionPlan {
    /// By unit.
    pub units: Vec<UnitProtection>,
    /// Summary in one sentence.
    pub summary: String,
    /// Seconds by which `choose_copies` expects copies to delay a step; 0 for other presets.
    pub delay_seconds: f64,
}

/// Units, ranks and options of a session.
#[derive(Clone, Copy, Debug)]
pub struct ProtectionRequest<'a> {
    /// The preset, which says which copies are kept.
    pub preset: &'static Preset,
    /// All units.
    pub units: &'a [UnitInfo],
    /// All ranks.
    pub ranks: &'a [RankInfo],
    /// Number of nodes that should hold each unit; 0 or 1 for no copies.
    pub copies: usize,
    /// Share of a step by which copies may delay it (`auto`).
    pub budget: f64,
}

/// Plans which rank keeps which copies in a session.
///
/// If there are replica nodes, copies go to them. In `auto`, units whose gradients do not fit into the logs of their
/// holders get a snapshot in each step instead. Essential units (those that may not lag) of one node alone get a snapshot in
/// each step at any cost. Units that several nodes train have snapshots in the memory of `copies` of these nodes, so that
/// one survives a crash of all processes and the loss of fewer nodes. Each node makes its own, and nothing is sent.
///
/// ```
/// use evermoe::protection::{CopyKind, PresetName, RankInfo, ProtectionRequest, UnitInfo, plan_protection};
/// let rank = |node: &str| RankInfo {
///     node: node.into(), free_bytes: 1 << 30, trains: true, step_seconds: None, network_seconds: None,
///     log_bytes: 1 << 30, link: None, host_speed: None,
/// };
/// let unit = |active: &[usize], may_lag| UnitInfo {
///     state_bytes: 1200, gradient_bytes: 400, active: active.to_vec(), tokens: 64.0, replayable: may_lag, may_lag,
/// };
/// // An expert on each of two nodes, a router on both: each expert is replayed on the other, the router needs nothing.
/// let units = [unit(&[0], true), unit(&[1], true), unit(&[0, 1], false)];
/// let ranks = [rank("a"), rank("b")];
/// let request = ProtectionRequest {
///     preset: PresetName::Auto.preset(), units: &units, ranks: &ranks, copies: 2, budget: 0.01,
/// };
/// let found = plan_protection(&request)?;
/// assert_eq!(found.units[0].kind, CopyKind::Replayed);
/// assert_eq!((&found.units[0].holders[..], &found.units[1].holders[..]), (&[1][..], &[0][..]));
/// assert_eq!(found.units[2].kind, CopyKind::Active);
/// assert_eq!((&found.units[0].own[..], &found.units[2].own[..]), (&[0][..], &[0, 1][..]));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) as of [`choose_copies`] and
/// [`unit_copy_holders`](crate::placement::unit_copy_holders).
pub fn plan_protection(request: &ProtectionRequest<'_>) -> Result<ProtectionPlan> {
    let mut found = match request.preset.copying {
        Copying::Chosen => request.chosen()?,
        Copying::Nothing => request.active_only("no copies beyond the nodes that train each unit")?,
        _ if request.copies < 2 => request.active_only("no copies beyond the nodes that train each unit")?,
        Copying::Uncovered => request.uncovered()?,
        Copying::Everything | Copying::ToPrevious => request.everything()?,
    };
    request.use_replica_nodes(&mut found);
    if request.preset.copying == Copying::Chosen {
        request.keep_within_logs(&mut found);
    }
    for (unit, kept) in request.units.iter().zip(&mut found.units) {
        if !matches!(kept.kind, CopyKind::Snapshot { .. }) {
            kept.own = request.own_keepers(kept.primary, &unit.active);
        }
    }
    Ok(found)
}

impl ProtectionRequest<'_> {
    fn active(&self) -> Vec<Vec<usize>> {
        self.units.iter().map(|unit| unit.active.clone()).collect()
    }

    /// The rank that sends each unit: one that trains it, chosen so that the bytes to send are balanced.
    fn primaries(&self) -> Result<Vec<usize>> {
        let sizes: Vec<u64> = self.units.iter().map(|unit| unit.state_bytes).collect();
        primaries(&self.active(), &sizes, self.ranks.len())
    }

    /// The failure domain of each rank, numbered from 0. If all ranks share one node, each rank is a domain of its own.
    fn domains(&self) -> Vec<usize> {
        let mut numbers = BTreeMap::new();
        for rank in self.ranks {
            let next = numbers.len();
            numbers.entry(rank.node.as_str()).or_insert(next);
        }
        match numbers.len() {
            1 => (0..self.ranks.len()).collect(),
            _ => self.ranks.iter().map(|rank| numbers[rank.node.as_str()]).collect(),
        }
    }

    fn active_only(&self, summary: &str) -> Result<ProtectionPlan> {
        let units = self.primaries()?.into_iter().map(UnitProtection::active).collect();
        Ok(ProtectionPlan {
            units,
            summary: format!("{}: {summary}", self.preset.name.name()),
            delay_seconds: 0.0,
        })
    }

    /// Gemini and BAFT: snapshots of all units; each unit is sent by one of the ranks that have it.
    fn everything(&self) -> Result<ProtectionPlan> {
        let nodes: Vec<&str> = self.ranks.iter().map(|rank| rank.node.as_str()).collect();
        let primaries = self.primaries()?;
        let holders: Vec<Vec<usize>> = if self.preset.copying == Copying::ToPrevious {
            let previous = copy_holders(&nodes, self.copies, CopyPolicy::Previous)?;
            primaries.iter().map(|&rank| previous[rank].clone()).collect()
        } else {
            unit_copy_holders(&primaries, &self.active(), &nodes, self.copies)?
        };
        let kept = primaries.into_iter().zip(holders);
        let units: Vec<UnitProtection> =
            kept.map(|(primary, holders)| UnitProtection::snapshot(primary, holders[1..].to_vec())).collect();
        let sent =
            self.units.iter().zip(&units).map(|(unit, kept)| unit.state_bytes * kept.holders.len() as u64);
        let (megabytes, count) = (sent.sum::<u64>() as f64 / 1e6, units.len());
        let summary = format!(
            "{}: snapshots of all {count} units, {megabytes:.1} MB to peers each step",
            self.preset.name.name()
        );
        Ok(ProtectionPlan { units, summary, delay_seconds: 0.0 })
    }

    /// MoEtion: copies of units until `copies` nodes hold each, including those that train it. Copies are replayed if that is
    /// exact.
    ///
    /// Ranks are data-parallel peers. A unit of one rank alone, an expert or a module that it owns, is like a shard of a ZeRO
    /// state: [`training_copy_holders`] chooses its holders. Essential units are copied at each step.
    fn uncovered(&self) -> Result<ProtectionPlan> {
        let (domains, primaries) = (self.domains(), self.primaries()?);
        let holders = unit_copy_holders(&primaries, &self.active(), &domains, self.copies)?;
        let wanted = self.copies.min(distinct(domains.iter().copied()));
        let ranks: Vec<usize> = (0..self.ranks.len()).collect();
        let own = training_copy_holders(&domains, &ranks, &vec![0; ranks.len()], wanted, 1)?.optimizer;
        let are_peers = self.ranks.iter().all(|rank| rank.trains);
        let kept = self.units.iter().zip(primaries).zip(&holders).map(|((unit, primary), holders)| {
            let found = if are_peers && unit.active.len() == 1 { &own[primary] } else { holders };
            let missing = wanted.saturating_sub(distinct(unit.active.iter().map(|&rank| domains[rank])));
            let holders: Vec<usize> = found[1..].iter().copied().take(missing).collect();
            if holders.is_empty() {
                return UnitProtection::active(primary);
            }
            let is_replayed = unit.replayable || unit.may_lag;
            let kind = if is_replayed { CopyKind::Replayed } else { CopyKind::Snapshot { period: 1 } };
            UnitProtection { kind, holders, ..UnitProtection::active(primary) }
        });
        let units: Vec<UnitProtection> = kept.collect();
        let is_chosen =
            |(unit, kept): &(&UnitInfo, &UnitProtection)| unit.may_lag && kept.kind == CopyKind::Replayed;
        let chosen = self.units.iter().zip(&units).filter(is_chosen).count();
        let always = units.iter().filter(|kept| !kept.holders.is_empty()).count() - chosen;
        let mut summary = format!(
            "{}: copies of up to {chosen} of {} units within the budget",
            self.preset.name.name(),
            units.len()
        );
        if always > 0 {
            summary += &format!("; of {always} more essential units at each step");
        }
        Ok(ProtectionPlan { units, summary, delay_seconds: 0.0 })
    }

    fn chosen(&self) -> Result<ProtectionPlan> {
        let domains = self.domains();
        if self.copies < 2 || distinct(domains.iter().copied()) < 2 {
            return self.active_only("one node alone keeps no copies");
        }
        let primaries = self.primaries()?;
        let nodes = self.copy_nodes(&domains, &primaries);
        let units: Vec<CopyUnit> = self.units.iter().map(copy_unit).collect();
        let plan = choose_copies(&CopyRequest {
            units: &units,
            nodes: &nodes,
            network: self.network(),
            host_link: self.host_link(),
            step_seconds: self.step_seconds(),
            copies: self.copies,
            budget: self.budget,
            max_period: MAX_PERIOD,
            persist_period: PERSIST_PERIOD,
            log_steps: LOG_STEPS,
        })?;
        let kept = plan.units.iter().zip(&primaries).map(|(choice, &primary)| match choice.kind {
            CopyKind::Active | CopyKind::Uncovered => UnitProtection {
                holders: choice.holders.iter().map(|holder| holder.node).collect(),
                ..UnitProtection::active(primary)
            },
            kind => UnitProtection {
                kind,
                holders: choice.holders.iter().map(|holder| holder.node).collect(),
                ..UnitProtection::active(choice.sender)
            },
        });
        let mut found = ProtectionPlan {
            units: kept.collect(),
            summary: format!("{}: {}", self.preset.name.name(), plan.summary),
            delay_seconds: plan.delay_seconds,
        };
        self.always_copy(&mut found, &domains, &primaries)?;
        Ok(found)
    }

    fn copy_nodes(&self, domains: &[usize], primaries: &[usize]) -> Vec<CopyNode> {
        let mut own = vec![0; self.ranks.len()];
        for (unit, &primary) in self.units.iter().zip(primaries) {
            for rank in self.own_keepers(primary, &unit.active) {
                own[rank] += OWN_VERSIONS * unit.state_bytes;
            }
        }
        let step_seconds = self.step_seconds();
        let node = |((&domain, rank), own): ((&usize, &RankInfo), u64)| CopyNode {
            failure: FAILURE,
            domain,
            host_bytes: rank.free_bytes.saturating_sub(own),
            device_bytes: 0,
            network_seconds: rank.network_seconds.unwrap_or(step_seconds),
            host_link_seconds: step_seconds,
        };
        domains.iter().zip(self.ranks).zip(own).map(node).collect()
    }

    /// The slowest measured link.
    fn network(&self) -> Link {
        let slowest =
            |one: Link, two: Link| Link { alpha: one.alpha.max(two.alpha), beta: one.beta.min(two.beta) };
        self.ranks.iter().filter_map(|rank| rank.link).reduce(slowest).unwrap_or(DEFAULT_LINK)
    }

    /// The slowest measured path from the state to host memory.
    fn host_link(&self) -> Link {
        let slowest = self.ranks.iter().filter_map(|rank| rank.host_speed).reduce(f64::min);
        Link { beta: slowest.unwrap_or(DEFAULT_LINK.beta), ..DEFAULT_LINK }
    }

    /// Step seconds of the slowest training member. Until all are profiled: a large value, so that no copy is too slow.
    fn step_seconds(&self) -> f64 {
        let training = self.ranks.iter().filter(|rank| rank.trains);
        let known: Option<Vec<f64>> = training.map(|rank| rank.step_seconds).collect();
        let slowest = known.and_then(|steps| steps.into_iter().reduce(f64::max));
        slowest.unwrap_or(UNKNOWN_SECONDS)
    }

    /// Adds a snapshot in each step, at any cost, of essential units that one node alone has.
    fn always_copy(&self, found: &mut ProtectionPlan, domains: &[usize], primaries: &[usize]) -> Result<()> {
        let holders = unit_copy_holders(primaries, &self.active(), domains, self.copies)?;
        let mut number = 0;
        for ((unit, kept), holders) in self.units.iter().zip(&mut found.units).zip(holders) {
            let is_alone = !unit.may_lag && distinct(unit.active.iter().map(|&rank| domains[rank])) == 1;
            if is_alone && (kept.holders.is_empty() || kept.kind.period() > 1) {
                let (primary, others) = (holders[0], holders[1..].to_vec());
                *kept = UnitProtection::snapshot(primary, others);
                number += 1;
            }
        }
        if number > 0 {
            found.summary += &format!("; snapshots of {number} more essential units, beyond the budget");
        }
        Ok(())
    }

    /// Moves copies to replica nodes, evenly; the planned holders keep the rest. As far as possible, each copy is on another
    /// domain than those that train the unit or have a copy already.
    fn use_replica_nodes(&self, found: &mut ProtectionPlan) {
        let replicas = self.ranks.iter().enumerate().filter(|(_, rank)| !rank.trains);
        let mut load: Vec<(u64, usize)> = replicas.map(|(rank, _)| (0, rank)).collect();
        if load.is_empty() {
            return;
        }
        let domains = self.domains();
        for (unit, kept) in self.units.iter().zip(&mut found.units) {
            let count = kept.holders.len();
            load.sort_unstable();
            let ranks = load.iter().map(|&(_, rank)| rank).chain(kept.holders.iter().copied());
            let candidates: Vec<usize> = ranks.collect();
            let mut covered: BTreeSet<usize> = unit.active.iter().map(|&rank| domains[rank]).collect();
            let mut holders: Vec<usize> = Vec::with_capacity(count);
            for is_fresh in [true, false] {
                for &rank in &candidates {
                    let is_free = holders.len() < count && !holders.contains(&rank);
                    if is_free && covered.insert(domains[rank]) == is_fresh {
                        holders.push(rank);
                    }
                }
            }
            for (bytes, rank) in &mut load {
                *bytes += if holders.contains(rank) { unit.state_bytes } else { 0 };
            }
            kept.holders = holders;
        }
    }

    /// Ranks that keep snapshots of a unit that they train in the memory of their own nodes. They are on `copies` of the
    /// nodes that train it, in a ring from the primary's, so that bytes are balanced for units that all train.
    fn own_keepers(&self, primary: usize, active: &[usize]) -> Vec<usize> {
        let node = |rank: usize| self.ranks[rank].node.as_str();
        let mut ranks_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for &rank in active {
            ranks_of.entry(node(rank)).or_default().push(rank);
        }
        let own =
            ranks_of.get(node(primary)).and_then(|ranks| ranks.iter().position(|&rank| rank == primary));
        let nodes: Vec<(&str, Vec<usize>)> = ranks_of.into_iter().collect();
        let first = nodes.iter().position(|(name, _)| *name == node(primary));
        let (Some(place), Some(first)) = (own, first) else { return Vec::new() };
        let ring = nodes.iter().cycle().skip(first).take(self.copies.min(nodes.len()));
        ring.map(|(_, ranks)| ranks[place % ranks.len()]).collect()
    }

    /// Replaces replay by a snapshot in each step for units whose gradients do not fit into the logs of their holders.
    fn keep_within_logs(&self, found: &mut ProtectionPlan) {
        let mut room: Vec<u64> = self.ranks.iter().map(|rank| rank.log_bytes).collect();
        let mut number = 0;
        for (unit, kept) in self.units.iter().zip(&mut found.units) {
            if kept.kind != CopyKind::Replayed {
                continue;
            }
            let bytes = LOGGED_STEPS * (unit.gradient_bytes + RECORD_BYTES);
            if kept.holders.iter().any(|&holder| room[holder] < bytes) {
                kept.kind = CopyKind::Snapshot { period: 1 };
                number += 1;
            } else {
                kept.holders.iter().for_each(|&holder| room[holder] -= bytes);
            }
        }
        if number > 0 {
            found.summary +=
                &format!("; snapshots of {number} more, whose gradients are too large for replay_log_bytes");
        }
    }
}

fn copy_unit(unit: &UnitInfo) -> CopyUnit {
    CopyUnit {
        state_bytes: unit.state_bytes,
        gradient_bytes: unit.gradient_bytes,
        active: unit.active.clone(),
        tokens: unit.tokens.max(1.0),
        replayable: unit.replayable,
    }
}

fn distinct(domains: impl Iterator<Item = usize>) -> usize {
    domains.collect::<BTreeSet<usize>>().len()
}
