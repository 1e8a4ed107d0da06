//! Inputs of a chunk plan.

use super::windows::Windows;
use crate::ensure;
use crate::error::{Error, Result, find_named};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::str::FromStr;

/// A unit, or a part of one, to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyItem {
    /// The unit's name.
    pub unit: String,
    /// Size of the unit.
    pub bytes: u64,
    /// Ranks that each receive all of it.
    pub destinations: Vec<usize>,
}

/// A transfer of s bytes takes f(s) = `alpha` + s ÷ `beta` seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds of any transfer, regardless of its size.
    pub alpha: f64,
    /// Bytes per second.
    pub beta: f64,
}

impl Link {
    /// Returns f(s), the seconds of a transfer.
    pub fn seconds(&self, bytes: u64) -> f64 {
        self.alpha + bytes as f64 / self.beta
    }

    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let Self { alpha, beta } = self;
        ensure!(
            alpha.is_finite() && *alpha >= 0.0,
            "{name}.alpha: expected finite seconds, 0 or more, got {alpha}"
        );
        ensure!(
            beta.is_finite() && *beta > 0.0,
            "{name}.beta: expected finite bytes a second, above 0, got {beta}"
        );
        Ok(())
    }
}

/// Memory that chunks pass through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// Total bytes.
    pub bytes: u64,
    /// Number of sub-buffers of equal size; a chunk fills at most one.
    pub buffers: u64,
    /// Time that the consumer takes to empty a sub-buffer after the transfer; none if immediate.
    pub drain: Option<Link>,
}

/// The other end of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct Receiver {
    /// Rank of the receiver.
    pub rank: usize,
    /// Windows of the receiver.
    pub windows: Windows,
    /// Start of its step, in seconds after the sender's; negative if earlier.
    pub clock_offset: f64,
}

/// Policy by which windows are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Gemini (SOSP'23): in order, as much as fits; the rest is sent after the last window.
    Gemini,
    /// BAFT: for each window the uncut units that together have the most bytes, as found by
    /// [`best_subset`](super::best_subset). A unit that no window can take is cut. The rest is sent after the last
    /// window.
    Baft,
    /// MoEtion: the chunks for which the windows have time; the rest is sent during compute.
    Moetion,
    /// evermoe's own: as many steps as needed to delay none; bytes that do not fit in `max_steps` are spread over them.
    ///
    /// It never delays more than Gemini or BAFT. Longer windows never mean more delay, except if `max_steps` is too
    /// small and uncut units happen to fit shorter windows better.
    Auto,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Gemini, Self::Baft, Self::Moetion, Self::Auto];

    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["gemini", "baft", "moetion", "auto"][self as usize]
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        find_named("policy", &Self::ALL, Self::name, name)
    }
}

/// Request to [`plan_chunks`](super::plan_chunks).
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Units to copy.
    pub pieces: &'a [CopyItem],
    /// The sender's windows; those of the network are used, at both ends.
    pub windows: &'a Windows,
    /// Destinations whose windows count, too; the others accept a chunk at any time.
    pub receivers: &'a [Receiver],
    /// Link to the destinations.
    pub link: Link,
    /// Memory for the chunks.
    pub memory: Memory,
    /// Policy by which windows are filled.
    pub policy: Policy,
    /// Maximum number of steps of a version of `auto`.
    pub max_steps: usize,
    /// Steps over which the other policies send a version: 1, or the result of [`version_steps`](super::version_steps).
    pub version_steps: usize,
}

/// Maximum number of steps of a plan: a version of more would be too old when it is complete.
pub(crate) const MAX_STEPS: usize = 1 << 12;
/// Maximum number of chunks of a plan.
pub(super) const MAX_CHUNKS: u64 = 1 << 22;

impl Request<'_> {
    pub(super) fn check(&self) -> Result<()> {
        self.link.check("link")?;
        let Memory { bytes, buffers, drain } = self.memory;
        ensure!(buffers > 0, "memory.buffers: expected 1 or more, got 0");
        ensure!(
            bytes >= buffers,
            "memory.bytes: expected at least one for each of {buffers} buffers, got {bytes}"
        );
        drain.map_or(Ok(()), |drain| drain.check("memory.drain"))?;
        ensure!(
            (1..=MAX_STEPS).contains(&self.max_steps),
            "max_steps: expected 1 to {MAX_STEPS}, got {}",
            self.max_steps
        );
        ensure!(
            (1..=MAX_STEPS).contains(&self.version_steps),
            "version_steps: expected 1 to {MAX_STEPS}, got {}",
            self.version_steps
        );
        self.check_pieces()?;
        self.check_receivers()
    }

    fn check_pieces(&self) -> Result<()> {
        let mut units = HashSet::new();
        let mut all = 0_u128;
        for CopyItem { unit, bytes, destinations } in self.pieces {
            all += u128::from(*bytes) * destinations.len() as u128;
            ensure!(units.insert(unit), "pieces: unit {unit:?} occurs twice");
            ensure!(!destinations.is_empty(), "pieces: unit {unit:?} has no destination");
            let ranks: HashSet<usize> = destinations.iter().copied().collect();
            ensure!(
                ranks.len() == destinations.len(),
                "pieces: unit {unit:?} has a destination twice: {destinations:?}"
            );
        }
        ensure!(
            all <= u128::from(u64::MAX),
            "pieces: expected fewer than 2^64 bytes for all destinations together, got {all}"
        );
        Ok(())
    }

    fn check_receivers(&self) -> Result<()> {
        let mut ranks = HashSet::new();
        for Receiver { rank, clock_offset, .. } in self.receivers {
            ensure!(ranks.insert(rank), "receivers: rank {rank} occurs twice");
            ensure!(
                clock_offset.is_finite(),
                "receivers: clock_offset of rank {rank}: expected finite seconds, got {clock_offset}"
            );
        }
        let mut destinations = self.pieces.iter().flat_map(|piece| &piece.destinations);
        let unknown = destinations.find(|rank| !ranks.contains(rank)).filter(|_| self.policy == Policy::Baft);
        ensure!(
            unknown.is_none(),
            "receivers: \"baft\" sends in the windows of both ends; rank {} has none",
            unknown.unwrap_or(&0)
        );
        Ok(())
    }
}
