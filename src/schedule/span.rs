//! Profile records: the spans of one step of one rank.

use crate::ensure;
use crate::error::{Error, Result, find_named};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Kind of work of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The forward pass, or a part of it.
    Forward,
    /// The backward pass, or a part of it.
    Backward,
    /// The update of the parameters.
    Optimizer,
    /// A collective, e.g. an all-to-all.
    Collective,
    /// A send to one peer.
    Send,
    /// A receive from one peer.
    Receive,
    /// A copy between device and host, or of state to a peer.
    Copy,
}

/// Resource that a span keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// The processor that trains.
    Compute,
    /// The link to other nodes.
    Network,
    /// The link between device and host.
    HostLink,
}

impl Resource {
    /// All resources, in the order of [`Windows::windows`](super::Windows).
    pub const ALL: [Self; 3] = [Self::Compute, Self::Network, Self::HostLink];

    /// The name in JSON and in Python.
    pub fn name(self) -> &'static str {
        ["compute", "network", "host_link"][self as usize]
    }
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Forward,
        Self::Backward,
        Self::Optimizer,
        Self::Collective,
        Self::Send,
        Self::Receive,
        Self::Copy,
    ];

    /// The name in JSON and in Python.
    pub fn name(self) -> &'static str {
        ["forward", "backward", "optimizer", "collective", "send", "receive", "copy"][self as usize]
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for Resource {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        find_named("resource", &Self::ALL, Self::name, name)
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        find_named("kind", &Self::ALL, Self::name, name)
    }
}

/// A time span in which a resource was busy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Name, the same in every step, e.g. `layer3.all_to_all`; it may occur several times in a step.
    pub name: String,
    /// Kind of work.
    pub kind: Kind,
    /// Resource that it kept busy.
    pub resource: Resource,
    /// Seconds from the step's start.
    pub start: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Bytes moved; 0 for compute.
    #[serde(default)]
    pub bytes: u64,
    /// Ranks at the other end.
    #[serde(default)]
    pub peers: Vec<usize>,
}

impl Span {
    /// Seconds from the step's start to its end.
    pub fn end(&self) -> f64 {
        self.start + self.seconds
    }
}

/// One step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepProfile {
    /// Seconds from its start to the start of the next step.
    pub seconds: f64,
    /// Spans in any order. A span that ends after the step continues in the next step.
    pub spans: Vec<Span>,
}

/// Checks that the times of a profile are valid.
pub(super) fn check(steps: &[StepProfile]) -> Result<()> {
    for (number, step) in steps.iter().enumerate() {
        ensure!(
            step.seconds.is_finite() && step.seconds > 0.0,
            "steps: step {number}: seconds: expected a finite number above 0, got {}",
            step.seconds
        );
        for span in &step.spans {
            let name = &span.name;
            ensure!(
                span.start >= 0.0 && span.start <= step.seconds,
                "steps: step {number}: start of {name:?}: expected a number from 0 to the step's {} seconds, got {}",
                step.seconds,
                span.start
            );
            ensure!(
                span.seconds.is_finite() && span.seconds >= 0.0,
                "steps: step {number}: seconds of {name:?}: expected a finite number, 0 or more, got {}",
                span.seconds
            );
        }
    }
    Ok(())
}
