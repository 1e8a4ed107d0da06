//! Bytes that copies send, and the time by which they delay a step.

use super::copies::{Copies, History};
use super::units::Units;
use crate::error::Result;
use crate::protection::FAILURE;
use crate::schedule::{
    CopyItem, Link, Policy, Reason, Receiver, Request, forecast_memory, plan_chunks, synthetic_windows,
    version_steps,
};
use std::collections::BTreeMap;

/// Maximum number of steps over which a version is copied, unless more are requested.
pub const MAX_VERSION_STEPS: usize = 64;

/// Bytes from a node to another.
pub type Sends = BTreeMap<(usize, usize), u64>;

/// A node's network in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Link between two nodes.
    pub link: Link,
    /// MoE layers, whose collectives alternate with compute.
    pub layers: usize,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Share of a step in which the network is idle.
    pub idle: f64,
}

/// Cost of copies in each step of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Seconds by which they delay a step.
    pub delay_seconds: f64,
    /// Steps over which a version of all snapshots is copied.
    pub version_steps: u64,
    /// Steps in which the windows alone have room for a version; none if more than 4096, or if no schedule knows it.
    pub window_steps: Option<usize>,
    /// Bytes to peers, without those of experts that take turns.
    pub bytes: u64,
}

/// Bytes of the node that sends or receives the most.
pub fn busiest(sends: &Sends) -> u64 {
    let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
    for (&(sender, receiver), &bytes) in sends {
        *sent.entry(sender).or_insert(0) += bytes;
        *received.entry(receiver).or_insert(0) += bytes;
    }
    sent.into_values().chain(received.into_values()).max().unwrap_or(0)
}

impl Copies {
    /// Bytes of copies that `former` copies lack.
    pub(super) fn first_sends(&self, former: Option<&Self>, history: &History, units: &Units) -> Sends {
        let mut sends = Sends::new();
        let has = |unit: usize, node: usize| {
            let Some(former) = former else { return false };
            former.units[unit].holders.contains(&node) && former.version(unit, history) == self.begun
        };
        for (unit, each) in self.units.iter().enumerate() {
            for &holder in each.holders.iter().filter(|&&holder| !has(unit, holder)) {
                *sends.entry((each.primary, holder)).or_default() += units.bytes[unit];
            }
        }
        sends
    }

    /// Bytes of a version, by unit: sender, receiver and bytes. Experts send the share `part`.
    pub(super) fn version_sends(&self, part: f64, units: &Units) -> Vec<(usize, usize, u64)> {
        let mut sends = Vec::new();
        for (unit, each) in self.units.iter().enumerate() {
            let bytes = self.version_bytes(unit, units);
            let part = if unit < units.num_experts() { part } else { 1.0 };
            for &holder in each.holders.iter().filter(|_| bytes > 0) {
                sends.push((each.primary, holder, (bytes as f64 * part) as u64));
            }
        }
        sends
    }
}

/// The schedule of the busiest node's chunks, and the number of steps over which they send a version: `wanted`, or if that is
/// none, as many as the windows need, or those that lose the least time. None if nothing is sent.
pub(super) fn chunk_schedule(
    sends: &[(usize, usize, u64)],
    policy: Policy,
    wanted: Option<usize>,
    network: &Network,
) -> Result<Option<(Reason, u64)>> {
    let mut traffic: BTreeMap<usize, u64> = BTreeMap::new();
    for &(sender, receiver, bytes) in sends {
        *traffic.entry(sender).or_default() += bytes;
        *traffic.entry(receiver).or_default() += bytes;
    }
    let busiest = traffic.iter().max_by_key(|(node, bytes)| (**bytes, std::cmp::Reverse(**node)));
    let Some((&node, &bytes)) = busiest else { return Ok(None) };
    let mut own: Vec<(usize, usize, u64)> =
        sends.iter().copied().filter(|send| send.0 == node || send.1 == node).collect();
    if policy != Policy::Baft {
        let mut merged = Sends::new(); // BAFT alone packs complete units
        own.into_iter()
            .for_each(|(sender, receiver, bytes)| *merged.entry((sender, receiver)).or_default() += bytes);
        own = merged.into_iter().map(|((sender, receiver), bytes)| (sender, receiver, bytes)).collect();
    }
    let piece = |(number, &(sender, receiver, bytes)): (usize, &(usize, usize, u64))| CopyItem {
        unit: format!("{number}: {sender} to {receiver}"),
        bytes,
        destinations: vec![0],
    };
    let pieces: Vec<CopyItem> = own.iter().enumerate().map(piece).collect();
    let windows = synthetic_windows(network.layers, network.step_seconds, network.idle)?;
    // All peers count as one: each carries a part of the node's bytes in windows like the node's.
    let peers = Receiver { rank: 0, windows: windows.clone(), clock_offset: 0.0 };
    let request = Request {
        pieces: &pieces,
        windows: &windows,
        receivers: &[peers],
        link: network.link,
        memory: forecast_memory(bytes),
        policy,
        max_steps: MAX_VERSION_STEPS,
        version_steps: 1,
    };
    let steps = match wanted {
        Some(steps) => steps,
        None => least_lost_time(&request)?,
    };
    let plan = plan_chunks(&Request { version_steps: steps, ..request })?;
    Ok(Some((plan.reason, steps as u64)))
}

/// Number of steps over which a version is sent: the minimum that the windows need, or the one that loses the least time
/// (Gemini, Eq. 1).
fn least_lost_time(request: &Request<'_>) -> Result<usize> {
    let steps = version_steps(request, MAX_VERSION_STEPS)?;
    let found = plan_chunks(&Request { version_steps: steps, ..*request })?.reason;
    let pace = found.pace(request.windows.step_seconds, request.link, FAILURE, MAX_VERSION_STEPS)?;
    Ok(pace.map_or(steps, |period| period.steps))
}
