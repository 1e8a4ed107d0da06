//! Unequal shares of the tokens that minimise the load of the busiest rank.
//!
//! A rank that must compute a hot expert takes few or no tokens of other experts that it shares with other ranks:
//!
//! ```text
//! 3 ranks; expert 0 has 8 tokens on ranks 0 and 1, expert 1 has 4 on ranks 1 and 2
//! even       4, 4 + 2, 2      the busiest rank computes 6
//! balanced   4, 4 + 0, 4      4: less is impossible, as there are 12 tokens on 3 ranks
//! ```

use super::expert::Route;
use super::flow::Flow;

/// Splits all experts: calls `visit` with each expert and its non-zero routes, experts ascending.
///
/// `tokens` and `replicas` are `[experts, ranks]`, not negative, and every expert with a token has a replica. Every
/// holder keeps its own tokens up to its share. The others go to the open shares, sources and destinations ascending,
/// so that fewer routes of an expert lead to other ranks than it has sources and holders.
pub(super) fn split_balanced(
    tokens: &[i64],
    replicas: &[i64],
    ranks: usize,
    mut visit: impl FnMut(usize, Route),
) {
    let experts = tokens.len() / ranks;
    let mut flow = Flow::new(replicas, experts, ranks);
    let load: Vec<i64> = tokens.chunks_exact(ranks).map(|counts| counts.iter().sum()).collect();
    let on_holders = |expert| flow.holders(expert).map(move |rank| tokens[expert * ranks + rank]);
    let local: Vec<i64> = (0..experts).flat_map(on_holders).collect();
    flow.balance(&load, &local);
    let mut left = vec![0; ranks];
    for (expert, counts) in tokens.chunks_exact(ranks).enumerate() {
        left.copy_from_slice(counts);
        let mut visit = |route: Route| {
            if route.tokens > 0 {
                visit(expert, route);
            }
        };
        for (rank, &share) in flow.holders(expert).zip(flow.shares(expert)) {
            let tokens = share.min(counts[rank]);
            left[rank] -= tokens;
            visit(Route { source: rank, destination: rank, tokens });
        }
        let mut source = 0;
        for (destination, &share) in flow.holders(expert).zip(flow.shares(expert)) {
            let mut open = share - share.min(counts[destination]);
            while open > 0 {
                let tokens = open.min(left[source]);
                visit(Route { source, destination, tokens });
                open -= tokens;
                left[source] -= tokens;
                source += usize::from(left[source] == 0);
            }
        }
    }
}
