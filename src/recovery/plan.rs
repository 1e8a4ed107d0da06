//! The target version, and the transfers that bring every rank what it needs.

use super::vote::{Sources, sources};
use crate::ensure;
use crate::error::Result;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Where a rank has the bytes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// In the running model and optimizer.
    Active,
    /// In a complete version of an arena.
    Snapshot,
}

/// One unit that a rank has, at one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Index of the unit.
    pub unit: usize,
    /// Version of the bytes; 0 is the state before the first step.
    pub version: u64,
    /// Digest of the bytes.
    pub digest: u64,
    /// Where they are.
    pub kind: Kind,
}

/// `destination` takes `unit` from `source`; when they are the same, from its own snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transfer {
    /// Index of the unit.
    pub unit: usize,
    /// The rank that has it.
    pub source: usize,
    /// The rank that needs it.
    pub destination: usize,
    /// What the source reads it from.
    pub kind: Kind,
}

/// A holder at the target version whose bytes are not those that most holders have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// Index of the unit.
    pub unit: usize,
    /// The rank that was outvoted.
    pub rank: usize,
    /// Its digest.
    pub digest: u64,
    /// The digest that won.
    pub expected: u64,
}

/// Why the target is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No rank has made a step: all start from version 0.
    Fresh,
    /// The newest version of all is whole.
    Newest,
    /// Some units have no holder at the newest version, so an older one, which is whole, is the target.
    Older {
        /// The newest version that was reported.
        newest: u64,
    },
    /// No version is whole; `lost` are the units missing at this one, which misses the fewest.
    NotWhole {
        /// The version that misses the fewest units, the newest of those.
        version: u64,
    },
    /// No rank holds anything.
    Nothing,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fresh => write!(out, "no rank has made a step"),
            Self::Newest => write!(out, "the newest version is whole"),
            Self::Older { newest } => {
                write!(out, "version {newest} is not whole, this is the newest that is")
            }
            Self::NotWhole { version } => {
                write!(out, "no version is whole; version {version} misses the fewest units")
            }
            Self::Nothing => write!(out, "no rank holds any unit"),
        }
    }
}

/// What to do after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The version to continue from; none if no version is whole.
    pub version: Option<u64>,
    /// Units that no rank holds at the version that misses the fewest; empty when there is a target.
    pub lost: Vec<usize>,
    /// In order of unit size, largest first.
    pub transfers: Vec<Transfer>,
    /// Holders that were outvoted; not reported at version 0.
    pub conflicts: Vec<Conflict>,
    /// Why.
    pub reason: Reason,
}

/// Plans the recovery from what every rank holds and needs.
///
/// `bytes[u]` is the size of unit u, `holdings[r]` what rank r has, `needs[r]` the units it has to run. The target is the
/// newest version at which every unit has a holder; version 0 counts only if no rank has a later one. Among holders
/// that differ, the digest that most ranks have is right (see [`Conflict`]); a rank that was outvoted is no source and
/// fetches what it needs. A rank takes a unit from its running model, else from its own snapshot, else from the
/// holder with the fewest bytes to send so far, largest units first.
///
/// ```
/// use evermoe::recovery::{Holding, Kind, Reason, Transfer, plan};
/// let held = |unit, version| Holding { unit, version, digest: 7, kind: Kind::Active };
/// // Rank 0 is at version 5 and has unit 0; rank 1 has both, and rank 2 came back empty and needs unit 1.
/// let plan = plan(&[64, 64], &[vec![held(0, 5)], vec![held(0, 5), held(1, 5)], vec![]], &[vec![0], vec![0], vec![1]])?;
/// assert_eq!((plan.version, plan.reason), (Some(5), Reason::Newest));
/// assert_eq!(plan.transfers, [Transfer { unit: 1, source: 1, destination: 2, kind: Kind::Active }]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) when a unit is out of range or the lists differ in length.
pub fn plan(bytes: &[u64], holdings: &[Vec<Holding>], needs: &[Vec<usize>]) -> Result<Plan> {
    check(bytes.len(), holdings, needs)?;
    let (version, reason, lost) = target(bytes.len(), holdings);
    let Some(version) = version else {
        return Ok(Plan { version, lost, transfers: Vec::new(), conflicts: Vec::new(), reason });
    };
    let (sources, mut conflicts) = sources(bytes.len(), holdings, version);
    if version == 0 {
        conflicts.clear();
    }
    let transfers = transfers(bytes, &sources, needs);
    Ok(Plan { version: Some(version), lost, transfers, conflicts, reason })
}

fn check(units: usize, holdings: &[Vec<Holding>], needs: &[Vec<usize>]) -> Result<()> {
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

/// The version to continue from, why, and what is lost if there is none.
fn target(units: usize, holdings: &[Vec<Holding>]) -> (Option<u64>, Reason, Vec<usize>) {
    let mut reached: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    for holding in holdings.iter().flatten() {
        reached.entry(holding.version).or_default().insert(holding.unit);
    }
    if reached.len() > 1 {
        reached.remove(&0);
    }
    let Some((&newest, _)) = reached.last_key_value() else {
        return (None, Reason::Nothing, (0..units).collect());
    };
    // Of equal counts the last is kept: the newest.
    let Some((&version, held)) = reached.iter().max_by_key(|(_, held)| held.len()) else {
        unreachable!("there is a newest version");
    };
    let lost: Vec<usize> = (0..units).filter(|unit| !held.contains(unit)).collect();
    let reason = match version {
        _ if !lost.is_empty() => return (None, Reason::NotWhole { version }, lost),
        0 => Reason::Fresh,
        _ if version == newest => Reason::Newest,
        _ => Reason::Older { newest },
    };
    (Some(version), reason, lost)
}

fn transfers(bytes: &[u64], sources: &[Sources], needs: &[Vec<usize>]) -> Vec<Transfer> {
    let mut wanted: Vec<(Reverse<u64>, usize, usize)> = needs
        .iter()
        .enumerate()
        .flat_map(|(rank, units)| units.iter().map(move |&unit| (Reverse(bytes[unit]), unit, rank)))
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut assigned = vec![0_u128; needs.len()];
    let mut transfers = Vec::new();
    for (Reverse(size), unit, destination) in wanted {
        let (source, kind) = match sources[unit].get(&destination) {
            Some(Kind::Active) => continue,
            Some(Kind::Snapshot) => (destination, Kind::Snapshot),
            None => {
                let cheapest =
                    sources[unit].iter().min_by_key(|&(&rank, &kind)| (assigned[rank], kind, rank));
                let Some((&source, &kind)) = cheapest else {
                    unreachable!("every unit has a holder at the target version");
                };
                assigned[source] += u128::from(size);
                (source, kind)
            }
        };
        transfers.push(Transfer { unit, source, destination, kind });
    }
    transfers
}
