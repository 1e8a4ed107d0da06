//! Exchanges between the busiest node and the others, until the load is as even as asked or no exchange helps.

use super::cells::{Frame, is_fragile};
use super::layout::{Layout, Problem};

/// Number of nodes, starting with the lightest, that are tried as partners of the busiest one.
const PARTNERS: usize = 32;

/// Maximum number of pairs of replicas that are examined, about a tenth of a second.
const MAX_WORK: usize = 1 << 26;

/// An exchange of two replicas, or of all bound replicas of two experts.
#[derive(Clone, Copy)]
enum Exchange {
    Replicas { node: usize, expert: usize, other_node: usize, other: usize },
    Homes { expert: usize, other: usize },
}

/// Evens out the load by exchanges until the busiest node has at most `target` of load. They preserve every expert's
/// number of nodes and every home.
pub(super) fn improve(problem: &Problem, layout: &mut Layout, frame: &mut Frame<'_>, target: f64) {
    // Each exchange lowers a busiest node, so this terminates; the bound is for thousands of nodes with extreme loads.
    let work_of_each = problem.nodes + PARTNERS.min(problem.nodes) * problem.slots * problem.slots;
    for _ in 0..(4 * problem.nodes * problem.slots).min(MAX_WORK / work_of_each.max(1)) {
        let Some(busiest) =
            (0..problem.nodes).max_by(|&a, &b| layout.load[a].total_cmp(&layout.load[b]).then(b.cmp(&a)))
        else {
            return;
        };
        if layout.load[busiest] <= target {
            return;
        }
        let Some(exchange) = best(problem, layout, frame, busiest) else { return };
        apply(problem, layout, frame, exchange);
    }
}

/// The exchange that leaves the busier of its two nodes the least load, if that is less than the busiest node's now.
fn best(problem: &Problem, layout: &Layout, frame: &Frame<'_>, busiest: usize) -> Option<Exchange> {
    let mut lightest: Vec<usize> = (0..problem.nodes).filter(|&node| node != busiest).collect();
    let by_load = |a: &usize, b: &usize| layout.load[*a].total_cmp(&layout.load[*b]).then(a.cmp(b));
    if lightest.len() > PARTNERS {
        lightest.select_nth_unstable_by(PARTNERS, by_load);
        lightest.truncate(PARTNERS);
    }
    lightest.sort_by(by_load);
    let mut found = None;
    // A smaller gain is rounding noise.
    let limit = layout.load[busiest] * (1.0 - 1e-9);
    let mut lowest = limit;
    for &other_node in &lightest {
        // Even half of the difference would not beat the best so far.
        if (layout.load[busiest] + layout.load[other_node]) / 2.0 >= lowest {
            break;
        }
        for &expert in &layout.rows[busiest] {
            for &other in &layout.rows[other_node] {
                let difference = problem.weight[expert] - problem.weight[other];
                let peak = (layout.load[busiest] - difference).max(layout.load[other_node] + difference);
                if peak >= lowest {
                    continue;
                }
                if may_exchange(problem, layout, frame, (busiest, expert), (other_node, other)) {
                    (lowest, found) =
                        (peak, Some(Exchange::Replicas { node: busiest, expert, other_node, other }));
                } else if problem.spread > 1
                    && frame.is_bound(busiest, expert)
                    && frame.is_bound(other_node, other)
                    && let Some(peak) =
                        peak_of_homes(problem, layout, frame, expert, other).filter(|&peak| peak < lowest)
                {
                    (lowest, found) = (peak, Some(Exchange::Homes { expert, other }));
                }
            }
        }
    }
    found
}

type Replica = (usize, usize);

/// Whether two replicas may be exchanged: no node gets an expert twice, and bound ones stay in cells meant for them.
fn may_exchange(problem: &Problem, layout: &Layout, frame: &Frame<'_>, one: Replica, two: Replica) -> bool {
    let ((node, expert), (other_node, other)) = (one, two);
    !layout.holds(other_node, expert)
        && !layout.holds(node, other)
        && may_move(problem, layout, frame, node, expert, other_node)
        && may_move(problem, layout, frame, other_node, other, node)
}

fn may_move(
    problem: &Problem,
    layout: &Layout,
    frame: &Frame<'_>,
    from: usize,
    expert: usize,
    to: usize,
) -> bool {
    if problem.nodes_fail_alone() {
        return !frame.is_bound(from, expert)
            || problem.spread == 1
                && frame.cell_of[to]
                    .is_some_and(|cell| cell < frame.fragile_cells || !is_fragile(problem, expert));
    }
    // Among nodes that fail together, an unbound replica must not go where the expert's other replicas fail.
    !frame.is_bound(from, expert)
        && (problem.domain[from] == problem.domain[to]
            || !(0..problem.nodes)
                .any(|node| problem.domain[node] == problem.domain[to] && layout.holds(node, expert)))
}

/// Maximum load of a node of two cells after an exchange of their experts' homes; none if a node would get one twice.
fn peak_of_homes(
    problem: &Problem,
    layout: &Layout,
    frame: &Frame<'_>,
    expert: usize,
    other: usize,
) -> Option<f64> {
    let (home, other_home) = (frame.home[expert]?, frame.home[other]?);
    if home == other_home
        || (home >= frame.fragile_cells && is_fragile(problem, other))
        || (other_home >= frame.fragile_cells && is_fragile(problem, expert))
    {
        return None;
    }
    let difference = problem.weight[expert] - problem.weight[other];
    let mut peak = f64::MIN;
    for &node in &frame.cells[home] {
        if layout.holds(node, other) {
            return None;
        }
        peak = peak.max(layout.load[node] - difference);
    }
    for &node in &frame.cells[other_home] {
        if layout.holds(node, expert) {
            return None;
        }
        peak = peak.max(layout.load[node] + difference);
    }
    Some(peak)
}

fn apply(problem: &Problem, layout: &mut Layout, frame: &mut Frame<'_>, exchange: Exchange) {
    match exchange {
        Exchange::Replicas { node, expert, other_node, other } => {
            for (from, expert, to) in [(node, expert, other_node), (other_node, other, node)] {
                if frame.is_bound(from, expert) {
                    frame.home[expert] = frame.cell_of[to];
                }
            }
            swap(problem, layout, node, expert, other_node, other);
        }
        Exchange::Homes { expert, other } => {
            let homes = (frame.home[expert], frame.home[other]);
            let (Some(home), Some(other_home)) = homes else { unreachable!("both experts are bound") };
            for (&node, &other_node) in frame.cells[home].iter().zip(&frame.cells[other_home]) {
                swap(problem, layout, node, expert, other_node, other);
            }
            (frame.home[expert], frame.home[other]) = (homes.1, homes.0);
        }
    }
}

fn swap(problem: &Problem, layout: &mut Layout, node: usize, expert: usize, other_node: usize, other: usize) {
    layout.take(problem, node, expert);
    layout.take(problem, other_node, other);
    layout.put(problem, node, other);
    layout.put(problem, other_node, expert);
}
