//! Capacity of each node: the time and memory that its copies take.

use super::plan::{CopyKind, Holder, Limit, NodeUse};
use super::request::{CopyRequest, CopyUnit};
use crate::schedule::{Link, MemoryKind};

/// Tolerance for sums of seconds, which are rounded: an excess below a picosecond fits.
const ROUNDING: f64 = 1e-12;

/// Cost of one copy of a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// Bytes sent to each holder in a step.
    pub(super) bytes: u64,
    /// Bytes kept by each holder.
    pub(super) memory: u64,
    /// Whether the copy may be in device memory; snapshots stay in host memory.
    on_device: bool,
}

/// Seconds of a transfer; 0 for no bytes.
fn seconds(link: Link, bytes: u64) -> f64 {
    if bytes == 0 { 0.0 } else { link.seconds(bytes) }
}

impl Cost {
    pub(super) fn new(request: &CopyRequest<'_>, unit: &CopyUnit, kind: CopyKind) -> Self {
        let bytes = match kind {
            CopyKind::Active | CopyKind::Uncovered => 0,
            CopyKind::Replayed => unit.gradient_bytes,
            CopyKind::Snapshot { period } => unit.state_bytes.div_ceil(period as u64),
        };
        let memory = kind.memory_bytes(unit.state_bytes, unit.gradient_bytes, request.log_steps);
        Self { bytes, memory, on_device: kind == CopyKind::Replayed }
    }

    /// Seconds of network at both ends, and of the sender's host link.
    pub(super) fn seconds(&self, request: &CopyRequest<'_>, holders: usize) -> f64 {
        2.0 * holders as f64 * seconds(request.network, self.bytes) + seconds(request.host_link, self.bytes)
    }
}

/// Capacity of the nodes, and the part in use.
#[derive(Clone, Debug)]
pub(super) struct Capacity<'a> {
    request: &'a CopyRequest<'a>,
    pub(super) used: Vec<NodeUse>,
}

impl<'a> Capacity<'a> {
    pub(super) fn new(request: &'a CopyRequest<'a>) -> Self {
        Self { request, used: vec![NodeUse::default(); request.nodes.len()] }
    }

    /// Seconds by which a node delays the step.
    pub(super) fn delay(&self, node: usize) -> f64 {
        self.delay_with(node, 0.0, 0.0)
    }

    fn delay_with(&self, node: usize, network: f64, host_link: f64) -> f64 {
        let (used, windows) = (&self.used[node], &self.request.nodes[node]);
        let network = (used.network_seconds + network - windows.network_seconds).max(0.0);
        network + (used.host_link_seconds + host_link - windows.host_link_seconds).max(0.0)
    }

    fn in_time(&self, node: usize, network: f64, host_link: f64) -> bool {
        let extra = if network + host_link > 0.0 { self.delay_with(node, network, host_link) } else { 0.0 };
        extra <= self.request.budget * self.request.step_seconds + ROUNDING
    }

    /// Checks that a sender has the time for a number of holders.
    pub(super) fn sender(&self, node: usize, cost: Cost, holders: usize) -> Result<(), Limit> {
        let network = holders as f64 * seconds(self.request.network, cost.bytes);
        let host_link = seconds(self.request.host_link, cost.bytes);
        if self.in_time(node, network, host_link) { Ok(()) } else { Err(Limit::Time { node }) }
    }

    /// Returns the memory in which a node would keep the copy, if it has memory and time for it.
    pub(super) fn holder(&self, node: usize, cost: Cost) -> Result<Holder, Limit> {
        let (used, has) = (&self.used[node], &self.request.nodes[node]);
        let network = seconds(self.request.network, cost.bytes);
        let on_host = used.host_bytes + cost.memory <= has.host_bytes;
        let on_device = cost.on_device && used.device_bytes + cost.memory <= has.device_bytes;
        if on_host && self.in_time(node, network, 0.0) {
            return Ok(Holder { node, memory: MemoryKind::Host });
        }
        if on_device && self.in_time(node, network, seconds(self.request.host_link, cost.bytes)) {
            return Ok(Holder { node, memory: MemoryKind::Device });
        }
        Err(if on_host || on_device { Limit::Time { node } } else { Limit::Memory { node } })
    }

    pub(super) fn add(&mut self, sender: usize, holders: &[Holder], cost: Cost) {
        self.change(sender, holders, cost, 1.0, |used, bytes| used + bytes);
    }

    pub(super) fn remove(&mut self, sender: usize, holders: &[Holder], cost: Cost) {
        self.change(sender, holders, cost, -1.0, |used, bytes| used - bytes);
    }

    fn change(
        &mut self,
        sender: usize,
        holders: &[Holder],
        cost: Cost,
        sign: f64,
        bytes: fn(u64, u64) -> u64,
    ) {
        if holders.is_empty() {
            return;
        }
        let network = sign * seconds(self.request.network, cost.bytes);
        let host_link = sign * seconds(self.request.host_link, cost.bytes);
        let from = &mut self.used[sender];
        from.host_link_seconds += host_link;
        from.network_seconds += network * holders.len() as f64;
        from.sent_bytes = bytes(from.sent_bytes, cost.bytes * holders.len() as u64);
        for holder in holders {
            let to = &mut self.used[holder.node];
            to.network_seconds += network;
            to.received_bytes = bytes(to.received_bytes, cost.bytes);
            if holder.memory == MemoryKind::Device {
                to.host_link_seconds += host_link;
                to.device_bytes = bytes(to.device_bytes, cost.memory);
            } else {
                to.host_bytes = bytes(to.host_bytes, cost.memory);
            }
        }
    }
}
