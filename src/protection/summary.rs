//! A choice of copies in one sentence.

use super::plan::{CopyKind, CopyReason, Limit, NodeUse, UnitChoice};
use super::request::CopyRequest;
use std::collections::BTreeMap;

/// Sentence on what survives, what it takes, and what could not be had.
pub(super) fn summary(
    request: &CopyRequest<'_>,
    units: &[UnitChoice],
    nodes: &[NodeUse],
    delay: f64,
) -> String {
    let mut parts = vec![survives(request.copies, units)];
    let bytes: u64 = nodes.iter().map(|node| node.sent_bytes).sum();
    let busy = |node: usize| nodes[node].network_seconds;
    let busiest = (0..nodes.len()).max_by(|&a, &b| busy(a).total_cmp(&busy(b)).then(b.cmp(&a)));
    if let Some(node) = busiest.filter(|_| bytes > 0) {
        let (used, idle) = (busy(node), request.nodes[node].network_seconds);
        let windows = match idle < request.step_seconds {
            true => format!(", which is idle for {}", time(idle)),
            false => String::new(),
        };
        parts.push(format!("{} a step, at most {} of a node's network{windows}", size(bytes), time(used)));
    }
    if delay > 0.0 {
        parts.push(format!("a step takes {:.2} % longer", 100.0 * delay / request.step_seconds));
    }
    parts.extend(limited(units));
    parts.join("; ")
}

fn survives(copies: usize, units: &[UnitChoice]) -> String {
    let losses = match copies - 1 {
        0 => return "no loss is to be survived".into(),
        1 => "1 loss".to_owned(),
        more => format!("{more} losses"),
    };
    match units.iter().filter(|unit| unit.covered).count() {
        all if all == units.len() => format!("every unit survives {losses} with no step lost"),
        some => format!("{some} of {} units survive {losses} with no step lost", units.len()),
    }
}

/// The units that are not covered, by what they got and what there is too little of.
fn limited(units: &[UnitChoice]) -> Vec<String> {
    let mut groups: BTreeMap<(usize, String), (usize, Limit)> = BTreeMap::new();
    for unit in units {
        let CopyReason::Limited(limit) = unit.reason else { continue };
        let got = match (unit.kind, unit.holders.len()) {
            (CopyKind::Snapshot { period }, 1) => (period, format!("a snapshot every {period} steps")),
            (CopyKind::Snapshot { period }, count) => {
                (period, format!("{count} snapshots every {period} steps"))
            }
            (CopyKind::Replayed, 1) => (0, "only 1 replayed copy".to_owned()),
            (CopyKind::Replayed, count) => (0, format!("only {count} replayed copies")),
            _ => (usize::MAX, "no copy".to_owned()),
        };
        groups.entry((got.0, got.1)).or_insert((0, limit)).0 += 1;
    }
    let all = units.len();
    let sentence = |((_, got), (count, limit)): ((usize, String), (usize, Limit))| {
        let verb = if count == 1 { "has" } else { "have" };
        format!(
            "{count} of {all} units {verb} {} because {limit}",
            got.replace("every 1 steps", "every step")
        )
    };
    groups.into_iter().map(sentence).collect()
}

/// Seconds with three digits.
fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        seconds if seconds >= 0.9995 => (seconds, "s"),
        seconds if seconds >= 0.9995e-3 => (seconds * 1e3, "ms"),
        seconds => (seconds * 1e6, "µs"),
    };
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {unit}")
}

/// Bytes with three digits.
fn size(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let power = (0..units.len() - 1).find(|&power| bytes < 1000_u64.pow(power as u32 + 1));
    let power = power.unwrap_or(units.len() - 1);
    let value = bytes as f64 / 1000_f64.powi(power as i32);
    if power == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[power]) }
}

#[cfg(test)]
mod tests {
    use super::{size, time};

    #[test]
    fn times_have_three_digits() {
        assert_eq!(
            [0.0, 25e-6, 1e-3, 0.1188, 0.9999, 12.34].map(time),
            ["0.00 µs", "25.0 µs", "1.00 ms", "119 ms", "1.00 s", "12.3 s"]
        );
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([0, 999, 1500, 3_100_000_000].map(size), ["0 B", "999 B", "1.5 kB", "3.1 GB"]);
        assert_eq!(size(u64::MAX), "18.4 EB");
    }
}
