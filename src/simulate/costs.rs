//! What things cost on a cluster: seconds and rates.

use super::ranges::{not_negative, positive};
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Seconds and rates of what a failure costs. `evermoe measure` writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// From a loss until the others know of it.
    pub detect_seconds: f64,
    /// Until all agree who goes on.
    pub agree_seconds: f64,
    /// Until these are connected.
    pub rebuild_seconds: f64,
    /// The same, for each of them.
    pub rebuild_seconds_per_node: f64,
    /// Until all know what survives, and what each fetches.
    pub survey_seconds: f64,
    /// Bytes a second of a process's digests.
    pub digest_bytes_per_second: f64,
    /// Bytes a second with which a node copies state into its own host memory.
    pub capture_bytes_per_second: f64,
    /// Bytes a second with which a node writes to the store.
    pub store_write_bytes_per_second: f64,
    /// Bytes a second with which a node reads from the store.
    pub store_read_bytes_per_second: f64,
    /// Bytes a second of the store for all nodes together; none where their own rates are the limit.
    pub store_bytes_per_second: Option<f64>,
    /// What each save to the store takes from the steps beside it.
    pub persist_seconds: f64,
    /// From the start of a process until it can take part.
    pub start_seconds: f64,
}

impl Costs {
    /// Seconds until so many nodes are connected.
    pub(super) fn rebuild(&self, nodes: usize) -> f64 {
        self.rebuild_seconds + self.rebuild_seconds_per_node * nodes as f64
    }

    /// Seconds in which each of so many nodes writes so many bytes to the store.
    pub(super) fn write(&self, bytes: f64, nodes: usize) -> f64 {
        bytes / self.shared(self.store_write_bytes_per_second, nodes)
    }

    /// Seconds in which each of so many nodes reads so many bytes from the store.
    pub(super) fn read(&self, bytes: f64, nodes: usize) -> f64 {
        bytes / self.shared(self.store_read_bytes_per_second, nodes)
    }

    fn shared(&self, rate: f64, nodes: usize) -> f64 {
        self.store_bytes_per_second.map_or(rate, |all| rate.min(all / nodes.max(1) as f64))
    }

    /// Refuses what costs nothing can be.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the field, what was expected and what came.
    pub(super) fn check(&self) -> Result<()> {
        for (name, seconds) in [
            ("costs.detect_seconds", self.detect_seconds),
            ("costs.agree_seconds", self.agree_seconds),
            ("costs.rebuild_seconds", self.rebuild_seconds),
            ("costs.rebuild_seconds_per_node", self.rebuild_seconds_per_node),
            ("costs.survey_seconds", self.survey_seconds),
            ("costs.persist_seconds", self.persist_seconds),
            ("costs.start_seconds", self.start_seconds),
        ] {
            not_negative(name, seconds)?;
        }
        for (name, rate) in [
            ("costs.digest_bytes_per_second", self.digest_bytes_per_second),
            ("costs.capture_bytes_per_second", self.capture_bytes_per_second),
            ("costs.store_write_bytes_per_second", self.store_write_bytes_per_second),
            ("costs.store_read_bytes_per_second", self.store_read_bytes_per_second),
        ] {
            positive(name, rate)?;
        }
        positive("costs.store_bytes_per_second", self.store_bytes_per_second.unwrap_or(1.0))
    }
}
