//! The choices and their reasons.

use super::copy_constants::OWN_VERSIONS;
use crate::placement::Survival;
use crate::schedule::MemoryKind;
use std::fmt;

/// Kind of protection of a unit in addition to the nodes that train on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Enough nodes train on it: no copy.
    Active,
    /// Copies that are kept current with the gradient of each step.
    Replayed,
    /// Copies of the full state, made every `period` steps.
    Snapshot {
        /// Steps between two copies; 1 if each step has one.
        period: usize,
    },
    /// Fewer domains than wanted hold the unit, and no copy is possible.
    Uncovered,
}

impl CopyKind {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Replayed => "replayed",
            Self::Snapshot { .. } => "snapshot",
            Self::Uncovered => "uncovered",
        }
    }

    /// Steps from one version to the next; 1 if the copies are always current.
    pub fn period(self) -> usize {
        if let Self::Snapshot { period } = self { period } else { 1 }
    }

    /// Memory of one copy of a unit: a replica's state and its log of gradients, or all versions of a snapshot.
    pub fn memory_bytes(self, state_bytes: u64, gradient_bytes: u64, log_steps: u64) -> u64 {
        match self {
            Self::Active | Self::Uncovered => 0,
            Self::Replayed => state_bytes + log_steps * gradient_bytes,
            Self::Snapshot { .. } => OWN_VERSIONS * state_bytes,
        }
    }
}

/// A node that keeps a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Number of the node.
    pub node: usize,
    /// Memory that has the copy.
    pub memory: MemoryKind,
}

/// Resource that has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// Domains.
    Domains,
    /// Seconds of this node's network and host link.
    Time {
        /// The first node that was tried.
        node: usize,
    },
    /// Memory of this node.
    Memory {
        /// The first node that was tried.
        node: usize,
    },
}

/// Reason of a unit's protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyReason {
    /// Enough domains train on it.
    HeldActively {
        /// Number of the domains.
        domains: usize,
    },
    /// It is idle: replaying a zero gradient takes no bytes.
    Idle,
    /// The gradient has fewer bytes than the state.
    GradientIsSmaller,
    /// The state has no more bytes than the gradient.
    StateIsSmaller,
    /// The optimizer's steps cannot be repeated bit for bit.
    NotReplayable,
    /// A current copy by gradients does not fit, but one by state does.
    ReplayHasNoRoom,
    /// A current copy by state does not fit, but one by gradients does, although they are larger.
    SnapshotHasNoRoom,
    /// Current copies on enough domains do not fit; this choice has the least expected loss among those that do.
    Limited(Limit),
}

impl fmt::Display for CopyReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeldActively { domains: 1 } => write!(out, "1 domain trains on it"),
            Self::HeldActively { domains } => write!(out, "{domains} domains train on it"),
            Self::Idle => write!(out, "it is idle, and a zero gradient takes no bytes"),
            Self::GradientIsSmaller => write!(out, "its gradient is smaller than its state"),
            Self::StateIsSmaller => write!(out, "its state is no larger than its gradient"),
            Self::NotReplayable => write!(out, "its optimizer cannot be replayed"),
            Self::ReplayHasNoRoom => write!(out, "there is no room to replay it"),
            Self::SnapshotHasNoRoom => write!(out, "there is no room for its state in each step"),
            Self::Limited(limit) => write!(out, "{limit}"),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Domains => write!(out, "there are too few failure domains"),
            Self::Time { node } => write!(out, "windows and budget of node {node} are used up"),
            Self::Memory { node } => write!(out, "the memory of node {node} is used up"),
        }
    }
}

/// Protection of one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitChoice {
    /// Kind of protection.
    pub kind: CopyKind,
    /// The active node that sends.
    pub sender: usize,
    /// Nodes that keep the copies, in addition to the active ones.
    pub holders: Vec<Holder>,
    /// Bytes sent in a step to all holders together.
    pub bytes: u64,
    /// Memory of all its copies together.
    pub memory_bytes: u64,
    /// Whether every loss of fewer than `copies` domains is survived without a lost step.
    pub covered: bool,
    /// Maximum number of lost steps if all active holders are lost and one holder of a copy survives. Without copies,
    /// the lag of the store.
    pub most_lost_steps: usize,
    /// Expected tokens lost in a step.
    pub lost_tokens: f64,
    /// Reason of the choice.
    pub reason: CopyReason,
}

/// Resources that copies take on one node in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeUse {
    /// Bytes sent as the units' sender.
    pub sent_bytes: u64,
    /// Bytes received as a holder.
    pub received_bytes: u64,
    /// Seconds of the network, both ways.
    pub network_seconds: f64,
    /// Seconds of the host link.
    pub host_link_seconds: f64,
    /// Host memory for copies.
    pub host_bytes: u64,
    /// Device memory for copies.
    pub device_bytes: u64,
}

/// Survival of a loss of `failures` domains, with every combination equally likely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossSurvival {
    /// Number of domains that fail.
    pub failures: usize,
    /// Probability that no unit loses a step.
    pub without_loss: Survival,
    /// Probability that each unit has some copy, perhaps an older one.
    pub with_loss: Survival,
}

/// All choices and their totals.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyPlan {
    /// Protection of each unit.
    pub units: Vec<UnitChoice>,
    /// Use of each node.
    pub nodes: Vec<NodeUse>,
    /// Seconds by which the slowest node delays a step.
    pub delay_seconds: f64,
    /// Expected tokens lost in a step, over all units.
    pub lost_tokens: f64,
    /// Survival for each number of failed domains from 1 to `copies`, limited by the number of domains.
    pub survival: Vec<LossSurvival>,
    /// Summary in one sentence.
    pub summary: String,
}
