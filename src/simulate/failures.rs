//! Failures and when they occur: for one seed, the same changes for all schemes.

use super::account::nanoseconds;
use super::ranges::{not_negative, positive};
use crate::ensure;
use crate::error::Result;
use crate::random::Random;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of changes in a simulation.
const MAX_CHANGES: usize = 1 << 24;

/// A source of changes in the set of nodes; several can be combined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// Nodes fail independently, at any time: a Poisson process.
    Poisson {
        /// Mean time between two failures among the cluster's training nodes; spares fail at the same rate per node.
        mtbf_seconds: f64,
        /// Seconds until a failed node or its replacement is ready; infinite if `null`.
        repair_seconds: Option<f64>,
    },
    /// All nodes of a rack fail together.
    Racks {
        /// Consecutive nodes that share a rack.
        nodes_per_rack: usize,
        /// Mean time between two failures of any of the racks.
        mtbf_seconds: f64,
        /// As in `Poisson`.
        repair_seconds: Option<f64>,
    },
    /// Nodes are taken out of service with notice.
    Maintenance {
        /// Time from one maintenance to the next.
        every_seconds: f64,
        /// Number of nodes taken out at a time.
        nodes: usize,
        /// Seconds until they return.
        seconds: f64,
    },
    /// A node becomes slow for a while, and all wait for it.
    Stragglers {
        /// Mean time between two stragglers.
        mtbf_seconds: f64,
        /// Factor on the seconds of a step, above 1.
        factor: f64,
        /// Duration in seconds.
        seconds: f64,
    },
    /// Nodes are lost in the middle of certain steps when these are computed for the first time.
    Steps {
        /// Step and nodes of each loss.
        losses: Vec<(u64, Vec<usize>)>,
    },
    /// Nodes come and go as recorded; a node is absent until the trace adds it.
    Trace {
        /// Seconds from the start, whether nodes are added, and the nodes, in order of time.
        events: Vec<(f64, bool, Vec<usize>)>,
    },
}

/// Change of some nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    /// The nodes are lost, with their memory.
    Gone,
    /// The nodes are present and ready.
    Back,
    /// The processes of the nodes receive notice that they will end.
    Leaving,
    /// The nodes become slower by this factor.
    Slow(f64),
}

/// A change at a point in time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// Nanoseconds from the start.
    pub(super) at: u64,
    /// The change.
    pub(super) what: What,
    /// The nodes that it affects.
    pub(super) nodes: Vec<usize>,
}

impl Source {
    pub(super) fn check(&self, nodes: usize) -> Result<()> {
        match self {
            Self::Poisson { mtbf_seconds, repair_seconds } => {
                positive("mtbf_seconds", *mtbf_seconds)?;
                not_negative("repair_seconds", repair_seconds.unwrap_or(0.0))
            }
            Self::Racks { nodes_per_rack, mtbf_seconds, repair_seconds } => {
                ensure!(*nodes_per_rack > 0, "nodes_per_rack: expected 1 or more, got 0");
                positive("mtbf_seconds", *mtbf_seconds)?;
                not_negative("repair_seconds", repair_seconds.unwrap_or(0.0))
            }
            Self::Maintenance { every_seconds, nodes: each, seconds } => {
                positive("every_seconds", *every_seconds)?;
                ensure!((1..=nodes).contains(each), "maintenance: expected 1 to {nodes} nodes, got {each}");
                not_negative("seconds", *seconds)
            }
            Self::Stragglers { mtbf_seconds, factor, seconds } => {
                positive("mtbf_seconds", *mtbf_seconds)?;
                ensure!(
                    factor.is_finite() && *factor > 1.0,
                    "factor: expected a number above 1, got {factor}"
                );
                positive("seconds", *seconds)
            }
            Self::Steps { losses } => {
                let unknown = losses.iter().flat_map(|(_, lost)| lost).find(|&&node| node >= nodes);
                ensure!(
                    unknown.is_none(),
                    "losses: expected nodes below {nodes}, got {}",
                    unknown.unwrap_or(&0)
                );
                Ok(())
            }
            Self::Trace { events } => check_trace(events, nodes),
        }
    }

    /// Times and nodes of this source's changes, regardless of other changes.
    fn draw(&self, trainers: usize, nodes: usize, seconds: f64, random: &mut Random) -> Vec<Drawn> {
        let mut drawn = Vec::new();
        let mut every = |mean: f64, is_regular: bool, draw: &mut dyn FnMut(&mut Random, f64) -> Drawn| {
            let mut at = 0.0;
            while drawn.len() < MAX_CHANGES {
                at += if is_regular { mean } else { random.exponential(mean) };
                if at >= seconds {
                    break;
                }
                drawn.push(draw(random, at));
            }
        };
        match *self {
            Self::Poisson { mtbf_seconds, repair_seconds } => {
                let mean = mtbf_seconds * trainers as f64 / nodes as f64;
                every(mean, false, &mut |random, at| {
                    let nodes = vec![random.below(nodes)];
                    Drawn { at, what: What::Gone, nodes, until: repair_seconds.map(|repair| at + repair) }
                });
            }
            Self::Racks { nodes_per_rack, mtbf_seconds, repair_seconds } => {
                let racks = nodes.div_ceil(nodes_per_rack);
                every(mtbf_seconds, false, &mut |random, at| {
                    let first = random.below(racks) * nodes_per_rack;
                    let nodes = (first..(first + nodes_per_rack).min(nodes)).collect();
                    Drawn { at, what: What::Gone, nodes, until: repair_seconds.map(|repair| at + repair) }
                });
            }
            Self::Maintenance { every_seconds, nodes: each, seconds: length } => {
                let mut next = 0;
                every(every_seconds, true, &mut |_, at| {
                    let chosen = (0..each).map(|step| (next + step) % nodes).collect();
                    next = (next + each) % nodes;
                    Drawn { at, what: What::Leaving, nodes: chosen, until: Some(at + length) }
                });
            }
            Self::Stragglers { mtbf_seconds, factor, seconds: length } => {
                every(mtbf_seconds, false, &mut |random, at| {
                    let nodes = vec![random.below(nodes)];
                    Drawn { at, what: What::Slow(factor), nodes, until: Some(at + length) }
                });
            }
            Self::Steps { .. } | Self::Trace { .. } => {}
        }
        drawn
    }
}

fn check_trace(events: &[(f64, bool, Vec<usize>)], nodes: usize) -> Result<()> {
    let mut last = 0.0;
    for (at, _, which) in events {
        not_negative("trace", *at)?;
        ensure!((last..).contains(at), "trace: expected ascending times, got {at} s after {last} s");
        last = *at;
        if let Some(node) = which.iter().find(|&&node| node >= nodes) {
            ensure!(false, "trace: expected nodes below {nodes}, spares included, got {node}");
        }
    }
    Ok(())
}

struct Drawn {
    at: f64,
    what: What,
    nodes: Vec<usize>,
    until: Option<f64>,
}

/// All changes of a simulation, in order of time, and the nodes that are present at its start.
///
/// Of the `nodes`, `trainers` train and the others are spares. A node that is down does not fail. A repaired node can
/// take part `ready_seconds` later.
/// that is repaired is `ready_seconds` later ready to take part.
pub(super) fn changes(
    sources: &[Source],
    [trainers, nodes]: [usize; 2],
    seconds: f64,
    ready_seconds: f64,
    seed: u64,
) -> (BTreeSet<usize>, Vec<Change>) {
    let mut drawn: Vec<Drawn> = Vec::new();
    for (number, source) in sources.iter().enumerate() {
        drawn.extend(source.draw(trainers, nodes, seconds, &mut Random::of_part(seed, number as u64)));
    }
    drawn.sort_by(|a, b| a.at.total_cmp(&b.at));
    let mut found = Vec::new();
    let mut free_from = vec![0.0; nodes];
    for Drawn { at, what, nodes, until } in drawn {
        if let What::Slow(_) = what {
            found.push(change(at, what, nodes.clone()));
            found.extend(until.map(|until| change(until, What::Slow(1.0), nodes)));
            continue;
        }
        let hit: Vec<usize> = nodes.into_iter().filter(|&node| free_from[node] <= at).collect();
        if hit.is_empty() {
            continue;
        }
        let ready = until.map_or(f64::INFINITY, |until| until + ready_seconds);
        hit.iter().for_each(|&node| free_from[node] = ready);
        if ready < seconds {
            found.push(change(ready, What::Back, hit.clone()));
        }
        found.push(change(at, what, hit));
    }
    let mut present: BTreeSet<usize> = (0..nodes).collect();
    for source in sources {
        if let Source::Trace { events } = source {
            present = trace_changes(events, seconds, &mut found);
        }
    }
    found.sort_by_key(|change| change.at);
    (present, found)
}

/// Nodes that are lost in the middle of steps, by step.
pub(super) fn step_losses(sources: &[Source]) -> BTreeMap<u64, Vec<usize>> {
    let mut found: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for source in sources {
        if let Source::Steps { losses } = source {
            losses.iter().for_each(|(step, nodes)| found.entry(*step).or_default().extend(nodes));
        }
    }
    found
}

/// Adds the changes of a trace; returns the nodes that are present at the start.
fn trace_changes(
    events: &[(f64, bool, Vec<usize>)],
    seconds: f64,
    found: &mut Vec<Change>,
) -> BTreeSet<usize> {
    let mut present = BTreeSet::new();
    for (at, comes, nodes) in events.iter().take_while(|(at, ..)| *at < seconds) {
        if *at == 0.0 && *comes {
            present.extend(nodes);
        } else {
            found.push(change(*at, if *comes { What::Back } else { What::Gone }, nodes.clone()));
        }
    }
    present
}

fn change(at: f64, what: What, nodes: Vec<usize>) -> Change {
    Change { at: nanoseconds(at), what, nodes }
}
