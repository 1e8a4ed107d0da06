//! Units that ranks hold, and conflicts between their bytes.

/// Location of a unit's bytes on a rank, the cheapest to read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The running model and optimizer.
    Active,
    /// A replica that repeats the optimizer's steps from gradients.
    Replayed,
    /// A complete version of an arena.
    Snapshot,
    /// A store that can be read by all ranks that list it.
    Persisted,
}

impl Kind {
    /// All of them, in the order of their costs.
    pub const ALL: [Self; 4] = [Self::Active, Self::Replayed, Self::Snapshot, Self::Persisted];

    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["active", "replayed", "snapshot", "persisted"][self as usize]
    }

    /// Whether the copy is in the rank's own memory.
    pub fn is_memory(self) -> bool {
        self != Self::Persisted
    }
}

/// A unit of a rank, at one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Index of the unit.
    pub unit: usize,
    /// Version of the bytes; 0 is the state before the first step.
    pub version: u64,
    /// Digest of the bytes.
    pub digest: u64,
    /// Location of the bytes.
    pub kind: Kind,
}

/// A holder at the chosen version whose bytes differ from those of most holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// Index of the unit.
    pub unit: usize,
    /// The outvoted rank.
    pub rank: usize,
    /// Digest of its bytes.
    pub digest: u64,
    /// The digest that won.
    pub expected: u64,
}
