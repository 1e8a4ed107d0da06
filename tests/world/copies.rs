//! States and copies of them: the bytes of a unit are represented by the history of the groups that trained it.

use evermoe::recovery::{Holding, Kind};
use std::collections::BTreeMap;

/// A state: for each step the tag of the group that took it, six bits per step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Content(u64);

const BITS: u32 = 6;
/// Maximum number of groups in a run.
pub(crate) const MAX_GROUPS: u8 = 1 << BITS;

impl Content {
    /// The state after one more step.
    pub(crate) fn after(self, tag: u8) -> Self {
        assert!(tag > 0 && tag < MAX_GROUPS && self.steps() < 10, "the model has no room for this history");
        Self(self.0 << BITS | u64::from(tag))
    }

    pub(crate) fn steps(self) -> u64 {
        u64::from((64 - self.0.leading_zeros()).div_ceil(BITS))
    }

    /// The state after `steps` steps from the start.
    pub(crate) fn at(self, steps: u64) -> Self {
        Self(self.0 >> (u64::from(BITS) * (self.steps() - steps)))
    }

    /// Whether one of the two states is in the other's history, or both are equal.
    pub(crate) fn agrees_with(self, other: Self) -> bool {
        let steps = self.steps().min(other.steps());
        self.at(steps) == other.at(steps)
    }

    /// The latest state of both histories.
    pub(crate) fn common(self, other: Self) -> Self {
        let mut steps = self.steps().min(other.steps());
        while self.at(steps) != other.at(steps) {
            steps -= 1;
        }
        self.at(steps)
    }

    pub(crate) fn digest(self) -> u64 {
        self.0
    }

    pub(crate) fn from_digest(digest: u64) -> Self {
        Self(digest)
    }
}

/// Kind of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keeper {
    /// A replica gets the gradients of a step before the vote and repeats the step after it.
    Replicas,
    /// The state after a step is copied during the next one, and complete before its vote; two versions are kept.
    Snapshots,
    /// The same over two steps: a version is complete before the second vote after it, and the next one is copied then.
    SlowSnapshots,
}

impl Keeper {
    /// Number of steps of a snapshot's version; none if gradients are kept.
    pub(crate) fn steps(self) -> Option<u64> {
        match self {
            Self::Replicas => None,
            Self::Snapshots => Some(1),
            Self::SlowSnapshots => Some(2),
        }
    }
}

/// A member's units at one version of the state, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Snapshot {
    pub units: u8,
    pub version: u64,
    pub content: Content,
}

/// Holdings as gathered by the survey.
pub(crate) type Holdings = Vec<(Snapshot, bool)>;

/// The planner's input: each unit of each holding, running ones marked as such.
pub(crate) fn expand(holdings: &Holdings, units: usize) -> Vec<Holding> {
    let mut found = Vec::new();
    for &(snapshot, is_active) in holdings {
        let kind = if is_active { Kind::Active } else { Kind::Snapshot };
        for unit in (0..units).filter(|unit| snapshot.units & (1 << unit) != 0) {
            found.push(Holding { unit, version: snapshot.version, digest: snapshot.content.digest(), kind });
        }
    }
    found
}

/// Units that rank `rank` of `size` trains: expert u is on rank u mod size. The last units are the shards of the rest of
/// the model, one for each position in an island.
pub(crate) fn trained(rank: usize, size: usize, units: usize, island: usize) -> u8 {
    let experts = units - island;
    let own: u8 = (0..experts).filter(|unit| unit % size == rank).map(|unit| 1 << unit).sum();
    own | 1 << (experts + rank % island)
}

/// The rank whose units rank `rank` of `size` keeps copies of: the one of its position in the previous island.
pub(crate) fn previous(rank: usize, size: usize, island: usize) -> usize {
    (rank + size - island) % size
}

/// Units of which rank `rank` of `size` keeps copies for others: those that only one rank of the previous island trains.
pub(crate) fn kept(rank: usize, size: usize, units: usize, island: usize) -> u8 {
    let experts = (1 << (units - island)) - 1;
    if size == island { 0 } else { trained(previous(rank, size, island), size, units, island) & experts }
}

/// Copies, by units: the newest last, at most two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Copies(pub BTreeMap<u8, Vec<(u64, Content)>>);

impl Copies {
    pub(crate) fn push(&mut self, units: u8, version: u64, content: Content, most: usize) {
        if units == 0 {
            return;
        }
        let versions = self.0.entry(units).or_default();
        versions.retain(|&(known, _)| known < version);
        versions.push((version, content));
        if versions.len() > most {
            versions.remove(0);
        }
    }

    pub(crate) fn snapshots(&self) -> impl Iterator<Item = Snapshot> + '_ {
        self.0.iter().flat_map(|(&units, versions)| {
            versions.iter().map(move |&(version, content)| Snapshot { units, version, content })
        })
    }
}
