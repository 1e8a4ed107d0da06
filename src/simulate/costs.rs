//! Costs on a cluster: seconds and rates.

use super::ranges::{not_negative, positive};
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Seconds and rates of a failure's costs. `evermoe measure` writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Seconds from a loss until the others notice it.
    pub detect_seconds: f64,
    /// Seconds until all agree on the members that continue.
    pub agree_seconds: f64,
    /// Seconds until these are connected.
    pub rebuild_seconds: f64,
    /// Additional seconds to connect, per member.
    pub rebuild_seconds_per_node: f64,
    /// Seconds until all know the surviving state and the units that each fetches.
    pub survey_seconds: f64,
    /// Bytes per second at which a process computes digests.
    pub digest_bytes_per_second: f64,
    /// Bytes per second at which a node copies state into its own host memory.
    pub capture_bytes_per_second: f64,
    /// Bytes per second at which a node writes to the store.
    pub store_write_bytes_per_second: f64,
    /// Bytes per second at which a node reads from the store.
    pub store_read_bytes_per_second: f64,
    /// Bytes per second of the store for all nodes together; none if only the nodes' own rates limit it.
    pub store_bytes_per_second: Option<f64>,
    /// Seconds by which a save to the store delays the steps during it.
    pub persist_seconds: f64,
    /// Seconds from the start of a process until it can take part.
    pub start_seconds: f64,
}

impl Costs {
    /// Seconds until this number of nodes is connected.
    pub(super) fn rebuild(&self, nodes: usize) -> f64 {
        self.rebuild_seconds + self.rebuild_seconds_per_node * nodes as f64
    }

    /// Seconds in which each of `nodes` nodes writes `bytes` to the store.
    pub(super) fn write(&self, bytes: f64, nodes: usize) -> f64 {
        bytes / self.shared(self.store_write_bytes_per_second, nodes)
    }

    /// Seconds in which each of `nodes` nodes reads `bytes` from the store.
    pub(super) fn read(&self, bytes: f64, nodes: usize) -> f64 {
        bytes / self.shared(self.store_read_bytes_per_second, nodes)
    }

    fn shared(&self, rate: f64, nodes: usize) -> f64 {
        self.store_bytes_per_second.map_or(rate, |all| rate.min(all / nodes.max(1) as f64))
    }

    /// Refuses impossible costs.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the field, the value expected and the value that came.
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
