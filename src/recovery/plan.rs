//! The target version, and the transfers of the units that each rank needs.

use super::holding::{Conflict, Holding, Kind};
use super::vote::{Sources, sources};
use crate::ensure;
use crate::error::Result;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Transfer of a unit. If source and destination are the same, the rank reads it from its own copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transfer {
    /// Index of the unit.
    pub unit: usize,
    /// The rank that has the unit.
    pub source: usize,
    /// The rank that needs the unit.
    pub destination: usize,
    /// Location from which the source reads it.
    pub kind: Kind,
}

/// Reason of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No rank has taken a step: all start from version 0.
    Fresh,
    /// The newest version of all is complete.
    Newest,
    /// Some units have no holder at the newest version, so the target is an older, complete one.
    Older {
        /// The newest reported version.
        newest: u64,
    },
    /// All units that may not lag have a holder at the target, but some of the others only at older versions.
    Lagging {
        /// Number of units that are older.
        units: usize,
    },
    /// No version is complete; `lost` lists the units missing at this version, which misses the fewest.
    Incomplete {
        /// The version that misses the fewest units, the newest of equals.
        version: u64,
    },
    /// No rank holds any unit.
    Nothing,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fresh => write!(out, "no rank has made a step"),
            Self::Newest => write!(out, "the newest version is complete"),
            Self::Older { newest } => {
                write!(out, "version {newest} is incomplete, this is the newest complete one")
            }
            Self::Lagging { units } => {
                write!(out, "the newest complete version; of the units that may lag, {units} are older")
            }
            Self::Incomplete { version } => {
                write!(out, "no version is complete; version {version} misses the fewest units")
            }
            Self::Nothing => write!(out, "no rank holds any unit"),
        }
    }
}

/// Plan of a recovery after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The version to continue from; none if no version is complete.
    pub version: Option<u64>,
    /// Units that no rank holds at the version that misses the fewest; empty if there is a target.
    pub lost: Vec<usize>,
    /// Units that all ranks restore from an older version than the target, with that version; by unit.
    pub stale: Vec<(usize, u64)>,
    /// Transfers by unit size, largest first.
    pub transfers: Vec<Transfer>,
    /// Outvoted holders; not reported at version 0.
    pub conflicts: Vec<Conflict>,
    /// Reason of the target.
    pub reason: Reason,
}

/// Plans the recovery from the units that every rank holds and needs.
///
/// `bytes[u]` is the size of unit u, `holdings[r]` the units that rank r has, `needs[r]` the units it must run. The
/// target is the newest version at which every unit has a holder; version 0 counts only if no rank has a later one.
/// Among holders that differ, the digest of the majority of ranks is right (see [`Conflict`]). An outvoted rank is no
/// source and fetches the units that it needs. A rank takes a unit from its running model, or else from its own
/// snapshot, or else from the holder with the fewest bytes to send so far; largest units first.
///
/// See [`plan_lagging`] for copies of different versions.
///
/// ```
/// use evermoe::recovery::{Holding, Kind, Reason, Transfer, plan};
/// let held = |unit, version| Holding { unit, version, digest: 7, kind: Kind::Active };
/// // Rank 0 is at version 5 and has unit 0; rank 1 has both, and rank 2 came back empty and needs unit 1.
/// let plan = plan(&[64, 64], &[vec![held(0, 5)], vec![held(0, 5), held(1, 5)], vec![]], &[vec![0], vec![0], vec![1]])?;
/// assert_eq!((plan.version, plan.reason), (Some(5), Reason::Newest));
/// assert_eq!(plan.transfers, [Transfer { unit: 1, source: 1, destination: 2, kind: Kind::Active }]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a unit is out of range or the lists differ in length.
pub fn plan(bytes: &[u64], holdings: &[Vec<Holding>], needs: &[Vec<usize>]) -> Result<Plan> {
    plan_lagging(bytes, holdings, needs, &[])
}

/// Plans like [`plan`], but the units of `may_lag` may be older than the target.
///
/// Policies that copy a few experts at a time (PEC, MoEtion) leave some experts with older copies only. The target is
/// the newest version at which every other unit has a holder and every unit that may lag has one at that version or
/// earlier. Each of these is restored from its newest version up to the target, by all ranks that need it. As in
/// [`plan`], version 0 counts for nothing once any rank has a later one.
///
/// A rank takes a unit from its running model, its own replica, its own snapshot, or else from another rank's memory.
/// Only if no memory has that version, it comes from the store: read by the rank itself if it lists it, or else through
/// a rank that does.
///
/// ```
/// use evermoe::recovery::{Holding, Kind, Reason, Transfer, plan_lagging};
/// let held = |unit, version, kind| Holding { unit, version, digest: 7, kind };
/// // Unit 1 was in the running model of a rank that died at version 9; its last copy is of version 6.
/// let survivor = vec![held(0, 9, Kind::Active), held(1, 6, Kind::Persisted)];
/// let plan = plan_lagging(&[64, 64], &[survivor], &[vec![0, 1]], &[1])?;
/// assert_eq!((plan.version, plan.stale, plan.reason), (Some(9), vec![(1, 6)], Reason::Lagging { units: 1 }));
/// assert_eq!(plan.transfers, [Transfer { unit: 1, source: 0, destination: 0, kind: Kind::Persisted }]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a unit is out of range or the lists differ in length.
pub fn plan_lagging(
    bytes: &[u64],
    holdings: &[Vec<Holding>],
    needs: &[Vec<usize>],
    may_lag: &[usize],
) -> Result<Plan> {
    let nodes: Vec<usize> = (0..needs.len()).collect();
    plan_on_nodes(bytes, holdings, needs, may_lag, &nodes)
}

/// Plans like [`plan_lagging`] if links within a node are faster than between nodes; `nodes[r]` is the node of rank r.
///
/// BAFT's recovery of a data-parallel group: no unit crosses to a node twice. A unit that several ranks of a node lack,
/// and that no other rank of the node has in memory, is fetched by the one with the fewest bytes so far. The others get
/// it from that rank, in transfers of the same `kind`.
///
/// ```
/// use evermoe::recovery::{Holding, Kind, Transfer, plan_on_nodes};
/// let held = |unit| Holding { unit, version: 5, digest: 7, kind: Kind::Snapshot };
/// // Ranks 1 and 2 are on one node and came back empty; rank 0 on another one has copies of both units.
/// let needs = [vec![], vec![0, 1], vec![0, 1]];
/// let plan = plan_on_nodes(&[64, 64], &[vec![held(0), held(1)], vec![], vec![]], &needs, &[], &[0, 1, 1])?;
/// let found: Vec<_> = plan.transfers.iter().map(|each| (each.unit, each.source, each.destination)).collect();
/// assert_eq!(found, [(0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 2, 1)]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a unit is out of range or the lists differ in length.
pub fn plan_on_nodes(
    bytes: &[u64],
    holdings: &[Vec<Holding>],
    needs: &[Vec<usize>],
    may_lag: &[usize],
    nodes: &[usize],
) -> Result<Plan> {
    check(bytes.len(), holdings, needs, may_lag)?;
    ensure!(
        nodes.len() == needs.len(),
        "nodes: expected one for each of the {} ranks of needs, got {}",
        needs.len(),
        nodes.len()
    );
    let held = holdings.iter().flatten().map(|holding| (holding.version, holding.unit)).collect();
    let found = plan_version(bytes.len(), held, may_lag);
    let Some(version) = found.version else { return Ok(found) };
    let mut taken = vec![version; bytes.len()];
    for &(unit, older) in &found.stale {
        taken[unit] = older;
    }
    let (sources, mut conflicts) = sources(holdings, &taken);
    if version == 0 {
        conflicts.clear();
    }
    let transfers = transfers(bytes, &sources, needs, nodes);
    Ok(Plan { transfers, conflicts, ..found })
}

fn check(units: usize, holdings: &[Vec<Holding>], needs: &[Vec<usize>], may_lag: &[usize]) -> Result<()> {
    if let Some(unit) = may_lag.iter().find(|&&unit| unit >= units) {
        ensure!(false, "may_lag: unit {unit} is named; there are {units} units");
    }
    ensure!(
        holdings.len() == needs.len(),
        "needs: expected one list for each of the {} ranks of holdings, got {}",
        holdings.len(),
        needs.len()
    );
    for (rank, held) in holdings.iter().enumerate() {
        if let Some(holding) = held.iter().find(|holding| holding.unit >= units) {
            ensure!(false, "holdings: rank {rank} names unit {}; there are {units} units", holding.unit);
        }
    }
    for (rank, needed) in needs.iter().enumerate() {
        if let Some(unit) = needed.iter().find(|&&unit| unit >= units) {
            ensure!(false, "needs: rank {rank} names unit {unit}; there are {units} units");
        }
    }
    Ok(())
}

/// Plans like [`plan_lagging`], but neither compares digests nor plans transfers.
///
/// `held` lists the (version, unit) of all holdings, in any order; there are `units` units.
pub fn plan_version(units: usize, mut held: Vec<(u64, usize)>, may_lag: &[usize]) -> Plan {
    held.sort_unstable();
    held.dedup();
    let newest = held.last().map_or(0, |&(version, _)| version);
    if newest > 0 {
        held.retain(|&(version, _)| version > 0);
    }
    let mut lags = vec![false; units];
    may_lag.iter().for_each(|&unit| lags[unit] = true);
    // Of equal counts the last one is taken: the newest.
    let (mut is_reached, mut lagging, mut best) = (vec![false; units], 0, None);
    for group in held.chunk_by(|(one, _), (two, _)| one == two) {
        let mut reached = lagging;
        for &(_, unit) in group {
            if !lags[unit] || !std::mem::replace(&mut is_reached[unit], true) {
                reached += 1;
                lagging += usize::from(lags[unit]);
            }
        }
        best = best.filter(|&(most, _)| most > reached).or(Some((reached, group[0].0)));
    }
    let mut taken: Vec<Option<u64>> = vec![None; units];
    for &(at, unit) in held.iter().take_while(|&&(at, _)| best.is_some_and(|(_, version)| at <= version)) {
        if lags[unit] || best.is_some_and(|(_, version)| at == version) {
            taken[unit] = Some(at);
        }
    }
    let plan = |version, reason, lost, stale| Plan {
        version,
        lost,
        stale,
        transfers: Vec::new(),
        conflicts: Vec::new(),
        reason,
    };
    let lost: Vec<usize> = (0..units).filter(|&unit| taken[unit].is_none()).collect();
    let Some((_, version)) = best else { return plan(None, Reason::Nothing, lost, Vec::new()) };
    if !lost.is_empty() {
        return plan(None, Reason::Incomplete { version }, lost, Vec::new());
    }
    let taken = taken.into_iter().enumerate();
    let stale: Vec<(usize, u64)> =
        taken.filter_map(|(unit, at)| at.filter(|&at| at < version).map(|at| (unit, at))).collect();
    let reason = match version {
        0 => Reason::Fresh,
        _ if !stale.is_empty() => Reason::Lagging { units: stale.len() },
        _ if version == newest => Reason::Newest,
        _ => Reason::Older { newest },
    };
    plan(Some(version), reason, lost, stale)
}

fn transfers(bytes: &[u64], sources: &[Sources], needs: &[Vec<usize>], nodes: &[usize]) -> Vec<Transfer> {
    let mut wanted: Vec<(Reverse<u64>, usize, usize)> = needs
        .iter()
        .enumerate()
        .flat_map(|(rank, units)| units.iter().map(move |&unit| (Reverse(bytes[unit]), unit, rank)))
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut links = Links { sent: vec![0; needs.len()], shared: vec![0; needs.len()], nodes };
    let mut transfers = Vec::new();
    for of_unit in wanted.chunk_by(|(_, unit, _), (_, other, _)| unit == other) {
        let (Reverse(size), unit, _) = of_unit[0];
        let ranks: Vec<usize> = of_unit.iter().map(|&(.., rank)| rank).collect();
        transfers.extend(links.fetch(unit, size, &sources[unit], ranks));
    }
    transfers
}

/// Bytes that ranks send and fetch so far.
struct Links<'a> {
    /// Bytes that each rank sends.
    sent: Vec<u128>,
    /// Bytes that each rank fetches, including those for others of its node.
    shared: Vec<u128>,
    nodes: &'a [usize],
}

impl Links<'_> {
    /// The transfers of a unit to the ranks that need it.
    fn fetch(&mut self, unit: usize, size: u64, sources: &Sources, mut ranks: Vec<usize>) -> Vec<Transfer> {
        let in_memory = sources.values().any(|kind| kind.is_memory());
        ranks.sort_by_key(|&rank| (self.shared[rank], rank));
        let mut arrives: BTreeMap<usize, (usize, Kind)> = BTreeMap::new();
        let mut transfers = Vec::new();
        for &destination in &ranks {
            let (source, kind) = match sources.get(&destination) {
                Some(Kind::Active) => continue,
                Some(&kind) if kind.is_memory() || !in_memory => (destination, kind),
                _ => {
                    let (holder, kind) = self.cheapest(sources, destination);
                    let node = self.nodes[destination];
                    let is_far = in_memory && self.nodes[holder] != node;
                    let passed_on = arrives.get(&node).copied().filter(|_| is_far);
                    let (source, kind) = passed_on.unwrap_or((holder, kind));
                    arrives.entry(node).or_insert((destination, kind));
                    self.sent[source] += u128::from(size);
                    if passed_on.is_some() {
                        self.shared[source] += u128::from(size);
                    }
                    (source, kind)
                }
            };
            transfers.push(Transfer { unit, source, destination, kind });
        }
        transfers
    }

    /// The holder from which a rank gets a unit: in memory, near, with the fewest bytes to send.
    fn cheapest(&self, sources: &Sources, destination: usize) -> (usize, Kind) {
        let is_far = |rank: usize| self.nodes[rank] != self.nodes[destination];
        let found = sources
            .iter()
            .min_by_key(|&(&rank, &kind)| (!kind.is_memory(), is_far(rank), self.sent[rank], kind, rank));
        let Some((&source, &kind)) = found else {
            unreachable!("every unit has a holder at the version that is taken");
        };
        (source, kind)
    }
}
