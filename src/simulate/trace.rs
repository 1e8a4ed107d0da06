//! Recorded availability of nodes.

use super::failures::Source;
use crate::ensure;
use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Reads a trace in the format of Bamboo (NSDI'23): lines of `milliseconds,add|remove,node`, in order of time.
///
/// Each added node gets the lowest free number: the names in the trace say nothing about the machine, as no instance
/// returns.
///
/// ```
/// use evermoe::simulate::{Source, read_bamboo};
/// let source = read_bamboo("0,add,a\n0,add,b\n1500,remove,a\n2000,add,c\n")?;
/// let Source::Trace { events } = source else { panic!() };
/// assert_eq!(events, [(0.0, true, vec![0, 1]), (1.5, false, vec![0]), (2.0, true, vec![0])]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] with the line, the value expected and the value that came.
pub fn read_bamboo(text: &str) -> Result<Source> {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut free = BTreeSet::new();
    let mut events: Vec<(f64, bool, Vec<usize>)> = Vec::new();
    let mut last = 0;
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |why: &str| {
            Error::invalid(format!(
                "line {}: expected milliseconds,add|remove,node, got {line:?}{why}",
                number + 1
            ))
        };
        let fields: Vec<&str> = line.trim().split(',').collect();
        let [at, what, node] = fields[..] else { return Err(wrong("")) };
        let at: u64 = at.parse().map_err(|_| wrong(""))?;
        ensure!(at >= last, "line {}: expected ascending times, got {at} ms after {last} ms", number + 1);
        let (comes, which) = match what {
            "add" => {
                let which = free.pop_first().unwrap_or(numbers.len());
                if numbers.insert(node, which).is_some() {
                    return Err(wrong(": the node is present already"));
                }
                (true, which)
            }
            "remove" => {
                let which = numbers.remove(node).ok_or_else(|| wrong(": the node is not present"))?;
                free.insert(which);
                (false, which)
            }
            _ => return Err(wrong("")),
        };
        last = at;
        let seconds = at as f64 / 1e3;
        match events.last_mut().filter(|(before, kind, _)| *before == seconds && *kind == comes) {
            Some((_, _, nodes)) => nodes.push(which),
            None => events.push((seconds, comes, vec![which])),
        }
    }
    ensure!(!events.is_empty(), "trace: expected lines of milliseconds,add|remove,node, got none");
    Ok(Source::Trace { events })
}

/// A trace of one spot instance, as published by SkyPilot; extra fields, such as prices, are ignored.
#[derive(Deserialize)]
struct SpotTrace {
    metadata: SpotMetadata,
    data: Vec<u64>,
}

#[derive(Deserialize)]
struct SpotMetadata {
    gap_seconds: f64,
}

/// Reads traces in SkyPilot's format (NSDI'24), one JSON object for each node, number 0 first.
///
/// `{"metadata": {"gap_seconds": 600}, "data": [0, 0, 1, …]}`: for each interval of `gap_seconds`, whether the instance
/// is preempted (1) or available (0).
///
/// ```
/// use evermoe::simulate::{Source, read_skypilot};
/// let node = r#"{"metadata": {"gap_seconds": 600}, "data": [0, 1, 0]}"#;
/// let Source::Trace { events } = read_skypilot(&[node])? else { panic!() };
/// assert_eq!(events, [(0.0, true, vec![0]), (600.0, false, vec![0]), (1200.0, true, vec![0])]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] with the number of the file, the value expected and the value that came.
pub fn read_skypilot<S: AsRef<str>>(nodes: &[S]) -> Result<Source> {
    ensure!(!nodes.is_empty(), "trace: expected a file for each node, got none");
    let mut events: Vec<(f64, bool, Vec<usize>)> = Vec::new();
    for (node, text) in nodes.iter().enumerate() {
        let trace: SpotTrace = serde_json::from_str(text.as_ref()).map_err(|error| {
            Error::invalid(format!(
                "file {node}: expected {{\"metadata\": {{\"gap_seconds\": …}}, \"data\": […]}}: {error}"
            ))
        })?;
        let gap = trace.metadata.gap_seconds;
        ensure!(
            gap.is_finite() && gap > 0.0,
            "file {node}: gap_seconds: expected a number above 0, got {gap}"
        );
        if let Some(value) = trace.data.iter().find(|&&value| value > 1) {
            ensure!(
                false,
                "file {node}: data: expected 0 and 1 for one instance, got {value}: counts of instances"
            );
        }
        let mut was_there = false;
        for (span, &preempted) in trace.data.iter().enumerate() {
            let is_there = preempted == 0;
            if is_there != was_there {
                events.push((span as f64 * gap, is_there, vec![node]));
            }
            was_there = is_there;
        }
    }
    events.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Source::Trace { events })
}
