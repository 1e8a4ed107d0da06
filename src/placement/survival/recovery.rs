//! Survival of a placement of experts, or of copies.

use super::{Draws, Survival, survival_until};
use crate::ensure;
use crate::error::Result;
use crate::placement::domains::domain_of;
use std::collections::BTreeMap;

/// Returns the probability that every expert keeps a replica when `failures` of the nodes fail at once.
///
/// `matrix` is `[nodes, experts]`, the replicas of each node, as returned by [`place`](crate::placement::place). With
/// `domains`, lists of nodes that fail together, `failures` counts domains; an unlisted node is its own domain.
/// `samples` and `seed` are as for [`survival`](fn@crate::placement::survival).
///
/// ```
/// use evermoe::placement::recovery_probability;
/// // Three nodes, three experts with two replicas each: any one loss is survived, no loss of two.
/// let matrix = [1, 1, 0,  1, 0, 1,  0, 1, 1];
/// assert_eq!(recovery_probability(&matrix, 3, 3, 1, None, None, 0)?.probability, 1.0);
/// assert_eq!(recovery_probability(&matrix, 3, 3, 2, None, None, 0)?.probability, 0.0);
/// // Nodes 0 and 1 share a power supply: one of the two domains holds all of expert 0.
/// let shared = [vec![0, 1]];
/// let found = recovery_probability(&matrix, 3, 3, 1, Some(&shared), None, 0)?;
/// assert!((found.probability - 0.5).abs() < 1e-12);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the matrix has another size or a negative number, a domain is
/// empty, or names an unknown node or one of another domain; also as [`survival`](fn@crate::placement::survival).
pub fn recovery_probability(
    matrix: &[i64],
    nodes: usize,
    experts: usize,
    failures: usize,
    domains: Option<&[Vec<usize>]>,
    samples: Option<u64>,
    seed: u64,
) -> Result<Survival> {
    recovery_until(matrix, [nodes, experts], failures, domains, Draws::new(samples, seed))
}

/// [`recovery_probability`], with early termination.
pub(crate) fn recovery_until(
    matrix: &[i64],
    [nodes, experts]: [usize; 2],
    failures: usize,
    domains: Option<&[Vec<usize>]>,
    draws: Draws<'_>,
) -> Result<Survival> {
    ensure!(
        nodes.checked_mul(experts) == Some(matrix.len()),
        "matrix: expected {nodes} nodes × {experts} experts, got {} numbers",
        matrix.len()
    );
    if let Some(cell) = matrix.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "matrix: expert {} has {} replicas on node {}; expected 0 or more",
            cell % experts,
            matrix[cell],
            cell / experts
        );
    }
    let domain = domain_of(nodes, domains.unwrap_or(&[]))?;
    let count = domain.iter().max().map_or(0, |last| last + 1);
    let mut holders = vec![Vec::new(); experts];
    for (node, row) in matrix.chunks(experts.max(1)).enumerate() {
        for (held, holders) in row.iter().zip(&mut holders) {
            if *held > 0 {
                holders.push(domain[node]);
            }
        }
    }
    survival_until(count, &holders, failures, draws)
}

/// Returns the probability that each unit keeps a holder when `failures` of the nodes fail at once.
///
/// `holders` are ranks, as returned by [`copy_holders`](crate::placement::copy_holders) or
/// [`unit_copy_holders`](crate::placement::unit_copy_holders). `nodes[r]` is the node of rank r; without it every list
/// of `holders` belongs to one rank and each rank is its own node. `samples` and `seed` are as for [`survival`](fn@crate::placement::survival).
///
/// ```
/// use evermoe::placement::{CopyPolicy, copy_holders, copy_recovery_probability};
/// // Gemini (SOSP'23): two copies on 16 nodes survive two failures with 93.3 %, in a ring with 86.7 %.
/// let nodes: Vec<String> = (0..16).map(|node| format!("node{node:02}")).collect();
/// for (policy, expected) in [(CopyPolicy::Mixed, 1.0 - 8.0 / 120.0), (CopyPolicy::Ring, 1.0 - 16.0 / 120.0)] {
///     let holders = copy_holders(&nodes, 2, policy)?;
///     let found = copy_recovery_probability(&holders, 2, Some(&nodes), None, 0)?;
///     assert!((found.probability - expected).abs() < 1e-12);
/// }
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a holder is not a rank; also as [`survival`](fn@crate::placement::survival).
pub fn copy_recovery_probability<S: AsRef<str>>(
    holders: &[Vec<usize>],
    failures: usize,
    nodes: Option<&[S]>,
    samples: Option<u64>,
    seed: u64,
) -> Result<Survival> {
    copy_recovery_until(holders, failures, nodes, Draws::new(samples, seed))
}

/// [`copy_recovery_probability`], with early termination.
pub(crate) fn copy_recovery_until<S: AsRef<str>>(
    holders: &[Vec<usize>],
    failures: usize,
    nodes: Option<&[S]>,
    draws: Draws<'_>,
) -> Result<Survival> {
    let ranks = nodes.map_or(holders.len(), <[S]>::len);
    for (item, members) in holders.iter().enumerate() {
        if let Some(rank) = members.iter().find(|&&rank| rank >= ranks) {
            ensure!(false, "holders: item {item} names rank {rank}; there are {ranks} ranks");
        }
    }
    let Some(nodes) = nodes else {
        return survival_until(ranks, holders, failures, draws);
    };
    let mut index: BTreeMap<&str, usize> = BTreeMap::new();
    let mut node_of = Vec::with_capacity(ranks);
    for node in nodes {
        let next = index.len();
        node_of.push(*index.entry(node.as_ref()).or_insert(next));
    }
    let on_nodes: Vec<Vec<usize>> =
        holders.iter().map(|members| members.iter().map(|&rank| node_of[rank]).collect()).collect();
    survival_until(index.len(), &on_nodes, failures, draws)
}
