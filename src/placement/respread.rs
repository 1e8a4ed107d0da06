//! Exchanges that bring experts to more failure domains, where cells and late replicas could not.

use super::cells::Frame;
use super::layout::{Layout, Problem};

/// Exchanges replicas until every expert is in `spread` domains, or no exchange improves one expert without harming
/// another.
pub(super) fn respread(problem: &Problem, layout: &mut Layout, frame: &mut Frame<'_>) {
    for expert in (0..problem.experts).filter(|&expert| problem.each[expert] == 0) {
        while domains_of(problem, layout, expert).iter().filter(|&&count| count > 0).count() < problem.spread
        {
            let Some((node, other_node, other)) = best(problem, layout, expert) else { break };
            for (from, moved) in [(node, expert), (other_node, other)] {
                if frame.is_bound(from, moved) {
                    frame.home[moved] = None;
                }
                layout.take(problem, from, moved);
            }
            layout.put(problem, node, other);
            layout.put(problem, other_node, expert);
        }
    }
}

/// Replicas of an expert in each domain.
fn domains_of(problem: &Problem, layout: &Layout, expert: usize) -> Vec<usize> {
    let mut counts = vec![0; problem.domains];
    for node in (0..problem.nodes).filter(|&node| layout.holds(node, expert)) {
        counts[problem.domain[node]] += 1;
    }
    counts
}

/// Returns (node, other node, other expert): the expert leaves a node in whose domain it has another replica, for a
/// domain without one; of all such exchanges the one that changes the nodes' loads the least.
fn best(problem: &Problem, layout: &Layout, expert: usize) -> Option<(usize, usize, usize)> {
    let own = domains_of(problem, layout, expert);
    let mut found: Option<(f64, (usize, usize, usize))> = None;
    let leaves: Vec<usize> = (0..problem.nodes)
        .filter(|&node| layout.holds(node, expert) && own[problem.domain[node]] > 1)
        .collect();
    for other_node in (0..problem.nodes).filter(|&node| own[problem.domain[node]] == 0) {
        for &other in &layout.rows[other_node] {
            let counts = domains_of(problem, layout, other);
            let distinct = counts.iter().filter(|&&count| count > 0).count();
            for &node in leaves.iter().filter(|&&node| !layout.holds(node, other)) {
                let gone = usize::from(counts[problem.domain[other_node]] == 1);
                let come = usize::from(counts[problem.domain[node]] == 0);
                let change = (problem.weight[expert] - problem.weight[other]).abs();
                let lighter = found.is_none_or(|(least, _)| change < least);
                if lighter && distinct + come >= gone + problem.spread.min(distinct) {
                    found = Some((change, (node, other_node, other)));
                }
            }
        }
    }
    found.map(|(_, exchange)| exchange)
}
