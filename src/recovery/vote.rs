//! Vote on the right bytes of each unit: the digest of the majority of its holders.

use super::holding::{Conflict, Holding, Kind};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The ranks with the right bytes of one unit, and their location; if a rank has them twice, the cheapest.
pub(super) type Sources = BTreeMap<usize, Kind>;

/// Returns the sources of every unit u at version `taken[u]`, and the outvoted holders.
///
/// Each rank has one vote for each digest in its memory. Of equal votes, a digest of a running model beats one that
/// only replicas or snapshots have; then the one on the smallest rank wins. A persisted copy is one copy regardless of
/// how many ranks list it: it votes only if memory does not decide.
pub(super) fn sources(holdings: &[Vec<Holding>], taken: &[u64]) -> (Vec<Sources>, Vec<Conflict>) {
    let mut ballots: Vec<BTreeMap<u64, Sources>> = vec![BTreeMap::new(); taken.len()];
    for (rank, held) in holdings.iter().enumerate() {
        for holding in held.iter().filter(|holding| holding.version == taken[holding.unit]) {
            let kind =
                ballots[holding.unit].entry(holding.digest).or_default().entry(rank).or_insert(holding.kind);
            *kind = holding.kind.min(*kind);
        }
    }
    let mut conflicts = Vec::new();
    let sources =
        ballots.into_iter().enumerate().map(|(unit, ballot)| elect(unit, ballot, &mut conflicts)).collect();
    conflicts.sort_unstable();
    (sources, conflicts)
}

/// Returns the sources with the winning digest; the others go to `conflicts`.
fn elect(unit: usize, mut ballot: BTreeMap<u64, Sources>, conflicts: &mut Vec<Conflict>) -> Sources {
    let winner = ballot.iter().min_by_key(|(_, holders)| {
        let kind = holders.values().min().copied();
        let votes = holders.values().filter(|kind| kind.is_memory()).count();
        (Reverse(votes), kind, Reverse(holders.len()), holders.keys().next().copied())
    });
    let Some(expected) = winner.map(|(&digest, _)| digest) else { return Sources::new() };
    let sources = ballot.remove(&expected).unwrap_or_default();
    for (digest, holders) in ballot {
        conflicts.extend(holders.into_keys().map(|rank| Conflict { unit, rank, digest, expected }));
    }
    sources
}
