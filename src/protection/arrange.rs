//! Copies of all units of a session, as its preset wants them.

use super::choose::choose_copies;
use super::plan::CopyKind;
use super::request::{CopyNode, CopyRequest, CopyUnit};
use crate::error::Result;
use crate::placement::{CopyPolicy, copy_holders, primaries, training_copy_holders, unit_copy_holders};
use crate::schedule::Link;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Versions of its own snapshots that a rank has room for.
pub const OWN_VERSIONS: u64 = 2;
/// Steps that a log needs room for: the newest, which can still be undone, and the one that is voted on.
pub const LOGGED_STEPS: u64 = 2;
/// What a logged gradient counts for beside its bytes, at most.
pub const RECORD_BYTES: u64 = 256;
/// Probability that a node fails in a step; the same for all, it only weighs units against each other.
pub const FAILURE: f64 = 1e-4;
/// Seconds of a step that was not profiled yet.
const UNKNOWN_SECONDS: f64 = 1e6;
/// The link that is assumed until one is measured: 50 µs and 1 GB a second.
pub const DEFAULT_LINK: Link = Link { alpha: 50e-6, beta: 1e9 };
/// Steps between two snapshots of a unit at most.
const MAX_PERIOD: usize = 64;
/// Steps between two persisted versions.
const PERSIST_PERIOD: usize = 1000;
/// Gradients that a replayed copy keeps before it applies them.
pub const LOG_STEPS: u64 = 8;

/// The copies that a preset keeps beside active holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Copying {
    /// What [`choose_copies`] says (`auto`).
    Chosen,
    /// Snapshots of all units to peers (`gemini`).
    Everything,
    /// Snapshots of all units to the nodes before (`baft`).
    ToPrevious,
    /// Replayed copies of what too few nodes train (`moetion`).
    Uncovered,
    /// None on other nodes (`lazarus`, `pec`).
    Nothing,
}

/// A unit to protect.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionUnit {
    /// Bytes of its state.
    pub state_bytes: u64,
    /// Bytes of its gradient as it is sent.
    pub gradient_bytes: u64,
    /// Ranks that train on it.
    pub active: Vec<usize>,
    /// Tokens that it gets in a step.
    pub tokens: f64,
    /// Whether its optimizer's steps can be repeated to the bit.
    pub replayable: bool,
    /// Whether the rest can go on with an older version of it, as with an expert's.
    pub may_lag: bool,
}

/// What a rank offers, as it reports itself.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRank {
    /// Its node, or the rack or zone over which copies are spread. Ranks of one fail together, if there are several.
    pub node: String,
    /// Host memory that it may take.
    pub free_bytes: u64,
    /// False for a replica node, which then keeps what is not trained on several nodes.
    pub trains: bool,
    /// Seconds of its step; none before a profile was made.
    pub step_seconds: Option<f64>,
    /// Idle seconds of its network in a step; none if not known.
    pub network_seconds: Option<f64>,
    /// Capacity of its log of gradients.
    pub log_bytes: u64,
    /// Measured link; none before there was enough to measure.
    pub link: Option<Link>,
    /// Measured bytes per second from where the state is to host memory; none before a snapshot was made.
    pub host_speed: Option<f64>,
}

/// Protection of one unit beside its active holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// [`CopyKind::Active`] where there are no copies.
    pub kind: CopyKind,
    /// The rank that sends, one of the active ones.
    pub primary: usize,
    /// Ranks that keep copies; of snapshots the primary keeps its own, too, without it.
    pub holders: Vec<usize>,
    /// Ranks that train the unit and keep snapshots of it in the memory of their own nodes: on `copies` nodes, if as many
    /// train it. None where `holders` keep snapshots.
    pub own: Vec<usize>,
}

impl Kept {
    fn active(primary: usize) -> Self {
        Self { kind: CopyKind::Active, primary, holders: Vec::new(), own: Vec::new() }
    }

    fn snapshot(primary: usize, holders: Vec<usize>) -> Self {
        Self { kind: CopyKind::Snapshot { period: 1 }, primary, holders, own: Vec::new() }
    }
}

/// Protection of all units.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrangement {
    /// By unit.
    pub units: Vec<Kept>,
    /// Summary in one sentence.
    pub summary: String,
    /// Seconds by which `choose_copies` expects copies to delay a step; 0 for other presets.
    pub delay_seconds: f64,
}

/// Units, ranks and wishes of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionRequest<'a> {
    /// Name of the preset, for the summary.
    pub name: &'a str,
    /// The copies that the preset keeps.
    pub copying: Copying,
    /// All units.
    pub units: &'a [SessionUnit],
    /// All ranks.
    pub ranks: &'a [SessionRank],
    /// Nodes that are to hold each unit; 0 or 1 for no copies.
    pub copies: usize,
    /// Share of a step by which copies may delay it (`auto`).
    pub budget: f64,
}

/// Arranges who keeps copies of what in a session.
///
/// Copies go to replica nodes where there are some. Of `auto`, units whose gradients do not fit into the logs of their
/// holders get snapshots of each step instead; and what one node alone has, and the rest cannot go on without, gets
/// snapshots of each step whatever they cost. What several nodes train has snapshots in the memory of `copies` of them,
/// so that a crash of all processes and the loss of fewer nodes leave one; each makes its own, and nothing is sent.
///
/// ```
/// use evermoe::protection::{CopyKind, Copying, SessionRank, SessionRequest, SessionUnit, arrange};
/// let rank = |node: &str| SessionRank {
///     node: node.into(), free_bytes: 1 << 30, trains: true, step_seconds: None, network_seconds: None,
///     log_bytes: 1 << 30, link: None, host_speed: None,
/// };
/// let unit = |active: &[usize], may_lag| SessionUnit {
///     state_bytes: 1200, gradient_bytes: 400, active: active.to_vec(), tokens: 64.0, replayable: may_lag, may_lag,
/// };
/// // An expert on each of two nodes, a router on both: each expert is replayed on the other, the router needs nothing.
/// let units = [unit(&[0], true), unit(&[1], true), unit(&[0, 1], false)];
/// let ranks = [rank("a"), rank("b")];
/// let request = SessionRequest {
///     name: "auto", copying: Copying::Chosen, units: &units, ranks: &ranks, copies: 2, budget: 0.01,
/// };
/// let found = arrange(&request)?;
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
pub fn arrange(request: &SessionRequest<'_>) -> Result<Arrangement> {
    let mut found = match request.copying {
        Copying::Chosen => request.chosen()?,
        Copying::Nothing => request.active_only("no copies on other nodes beside the active ones")?,
        _ if request.copies < 2 => request.active_only("no copies on other nodes beside the active ones")?,
        Copying::Uncovered => request.uncovered()?,
        Copying::Everything | Copying::ToPrevious => request.everything()?,
    };
    request.use_replica_nodes(&mut found);
    if request.copying == Copying::Chosen {
        request.keep_within_logs(&mut found);
    }
    for (unit, kept) in request.units.iter().zip(&mut found.units) {
        if !matches!(kept.kind, CopyKind::Snapshot { .. }) {
            kept.own = request.own_keepers(kept.primary, &unit.active);
        }
    }
    Ok(found)
}

impl SessionRequest<'_> {
    fn active(&self) -> Vec<Vec<usize>> {
        self.units.iter().map(|unit| unit.active.clone()).collect()
    }

    /// The rank that sends each unit: one that trains it, so that all have as many bytes to send as can be.
    fn primaries(&self) -> Result<Vec<usize>> {
        let sizes: Vec<u64> = self.units.iter().map(|unit| unit.state_bytes).collect();
        primaries(&self.active(), &sizes, self.ranks.len())
    }

    /// The failure domain of each rank, from 0 on; on one node alone each rank is one of its own.
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

    fn active_only(&self, summary: &str) -> Result<Arrangement> {
        let units = self.primaries()?.into_iter().map(Kept::active).collect();
        Ok(Arrangement { units, summary: format!("{}: {summary}", self.name), delay_seconds: 0.0 })
    }

    /// Gemini and BAFT: snapshots of all units; each unit is sent by one of the ranks that have it.
    fn everything(&self) -> Result<Arrangement> {
        let nodes: Vec<&str> = self.ranks.iter().map(|rank| rank.node.as_str()).collect();
        let primaries = self.primaries()?;
        let holders: Vec<Vec<usize>> = if self.copying == Copying::ToPrevious {
            let previous = copy_holders(&nodes, self.copies, CopyPolicy::Previous)?;
            primaries.iter().map(|&rank| previous[rank].clone()).collect()
        } else {
            unit_copy_holders(&primaries, &self.active(), &nodes, self.copies)?
        };
        let kept = primaries.into_iter().zip(holders);
        let units: Vec<Kept> =
            kept.map(|(primary, holders)| Kept::snapshot(primary, holders[1..].to_vec())).collect();
        let sent =
            self.units.iter().zip(&units).map(|(unit, kept)| unit.state_bytes * kept.holders.len() as u64);
        let (megabytes, count) = (sent.sum::<u64>() as f64 / 1e6, units.len());
        let summary =
            format!("{}: snapshots of all {count} units, {megabytes:.1} MB to peers each step", self.name);
        Ok(Arrangement { units, summary, delay_seconds: 0.0 })
    }

    /// MoEtion: copies of what no peer holds already, replayed where that is exact: with the nodes that train a unit it is
    /// on `copies` of them.
    ///
    /// Ranks are data-parallel peers. What one of them trains alone, an expert or what it owns, is like a part of a ZeRO
    /// state: [`training_copy_holders`] says where it goes. What nothing goes on without is copied at each step.
    fn uncovered(&self) -> Result<Arrangement> {
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
                return Kept::active(primary);
            }
            let is_replayed = unit.replayable || unit.may_lag;
            let kind = if is_replayed { CopyKind::Replayed } else { CopyKind::Snapshot { period: 1 } };
            Kept { kind, holders, ..Kept::active(primary) }
        });
        let units: Vec<Kept> = kept.collect();
        let is_chosen =
            |(unit, kept): &(&SessionUnit, &Kept)| unit.may_lag && kept.kind == CopyKind::Replayed;
        let chosen = self.units.iter().zip(&units).filter(is_chosen).count();
        let always = units.iter().filter(|kept| !kept.holders.is_empty()).count() - chosen;
        let mut summary =
            format!("{}: copies of up to {chosen} of {} units within the budget", self.name, units.len());
        if always > 0 {
            summary += &format!("; of {always} more, which nothing goes on without, at each step");
        }
        Ok(Arrangement { units, summary, delay_seconds: 0.0 })
    }

    fn chosen(&self) -> Result<Arrangement> {
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
            CopyKind::Active | CopyKind::Uncovered => Kept {
                holders: choice.holders.iter().map(|holder| holder.node).collect(),
                ..Kept::active(primary)
            },
            kind => Kept {
                kind,
                holders: choice.holders.iter().map(|holder| holder.node).collect(),
                ..Kept::active(choice.sender)
            },
        });
        let mut found = Arrangement {
            units: kept.collect(),
            summary: format!("{}: {}", self.name, plan.summary),
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
        let node = |((&domain, rank), own): ((&usize, &SessionRank), u64)| CopyNode {
            failure: FAILURE,
            domain,
            host_bytes: rank.free_bytes.saturating_sub(own),
            device_bytes: 0,
            network_seconds: rank.network_seconds.unwrap_or(step_seconds),
            host_link_seconds: step_seconds,
        };
        domains.iter().zip(self.ranks).zip(own).map(node).collect()
    }

    /// The slowest link that was measured.
    fn network(&self) -> Link {
        let slowest =
            |one: Link, two: Link| Link { alpha: one.alpha.max(two.alpha), beta: one.beta.min(two.beta) };
        self.ranks.iter().filter_map(|rank| rank.link).reduce(slowest).unwrap_or(DEFAULT_LINK)
    }

    /// The slowest way from state to host memory that was measured.
    fn host_link(&self) -> Link {
        let slowest = self.ranks.iter().filter_map(|rank| rank.host_speed).reduce(f64::min);
        Link { beta: slowest.unwrap_or(DEFAULT_LINK.beta), ..DEFAULT_LINK }
    }

    /// Step seconds of the slowest training member; so long that nothing is too slow until all were profiled.
    fn step_seconds(&self) -> f64 {
        let training = self.ranks.iter().filter(|rank| rank.trains);
        let known: Option<Vec<f64>> = training.map(|rank| rank.step_seconds).collect();
        let slowest = known.and_then(|steps| steps.into_iter().reduce(f64::max));
        slowest.unwrap_or(UNKNOWN_SECONDS)
    }

    /// Snapshots of each step, whatever they cost, of what one node alone has and the rest cannot go on without.
    fn always_copy(&self, found: &mut Arrangement, domains: &[usize], primaries: &[usize]) -> Result<()> {
        let holders = unit_copy_holders(primaries, &self.active(), domains, self.copies)?;
        let mut number = 0;
        for ((unit, kept), holders) in self.units.iter().zip(&mut found.units).zip(holders) {
            let is_alone = !unit.may_lag && distinct(unit.active.iter().map(|&rank| domains[rank])) == 1;
            if is_alone && (kept.holders.is_empty() || kept.kind.period() > 1) {
                let (primary, others) = (holders[0], holders[1..].to_vec());
                *kept = Kept::snapshot(primary, others);
                number += 1;
            }
        }
        if number > 0 {
            found.summary +=
                &format!("; snapshots of {number} more beyond the budget, which nothing goes on without");
        }
        Ok(())
    }

    /// Copies go to replica nodes where there are some, evenly; the other holders keep the rest of them. Each is on another
    /// domain than those that train the unit or have a copy already, as far as there are enough.
    fn use_replica_nodes(&self, found: &mut Arrangement) {
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

    /// Ranks that keep snapshots of what they train in the memory of their own nodes: on `copies` of the nodes that train
    /// it, from the primary's on in a ring, so that all have as many bytes of what all train.
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

    /// Snapshots of each step instead, of units whose gradients do not fit into the logs of their holders.
    fn keep_within_logs(&self, found: &mut Arrangement) {
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

fn copy_unit(unit: &SessionUnit) -> CopyUnit {
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
