//! Units that ranks hold, and where their bytes differ.

/// Place where a rank has the bytes of a unit, the cheapest to read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The running model and optimizer.
    Active,
    /// A replica that repeats the optimizer's steps from gradients.
    Replayed,
    /// A complete version of an arena.
    Snapshot,
    /// A store that all ranks that list it can read.
    Persisted,
}

impl Kind {
    /// Whether the rank's own memory has it.
    pub fn is_memory(self) -> bool {
        self != Self::Persisted
    }
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
    /// Place of the bytes.
    pub kind: Kind,
}

/// A holder at the version that is taken whose bytes are not those that most holders have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// Index of the unit.
    pub unit: usize,
    /// The rank that was outvoted.
    pub rank: usize,
    /// Digest of its bytes.
    pub digest: u64,
    /// The digest that won.
    pub expected: u64,
}
