//! Options of a session that the engine reads.

use crate::protection::Preset;

/// Options of a session that its copies depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The preset.
    pub preset: &'static Preset,
    /// Number of nodes that should hold each unit; 0 or 1 for no copies.
    pub replication: usize,
    /// Share of a step by which copies may delay it (`auto`).
    pub copy_budget: f64,
    /// Steps over which a version is copied (`gemini`, `baft`); none for those that lose the least time.
    pub snapshot_interval: Option<usize>,
    /// Experts of each layer that are saved at a time (`pec`); none for a quarter.
    pub experts_per_save: Option<usize>,
    /// Steps between two saves (`pec`).
    pub save_interval: u64,
    /// Portion of tokens that may be lost before more experts are saved (`pec`).
    pub max_lost_token_fraction: f64,
    /// Bytes to peers in a step (`moetion`); none for what the links carry.
    pub remote_bytes_per_step: Option<u64>,
}
