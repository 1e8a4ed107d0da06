//! Migration from one placement to another with the fewest bytes moved.

use super::assign::Assignment;
use super::domains::{domain_of, nodes_of};
use crate::ensure;
use crate::error::Result;
use std::cmp::Reverse;

/// Transfer of an expert between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTransfer {
    /// Index of the expert.
    pub expert: usize,
    /// The node that holds it.
    pub source: usize,
    /// The node that needs it.
    pub destination: usize,
    /// Bytes of the expert.
    pub nbytes: i64,
}

/// Migration from one placement to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The node that takes each position, all different.
    pub node_map: Vec<usize>,
    /// Transfers, largest first.
    pub transfers: Vec<ExpertTransfer>,
    /// Bytes of all transfers.
    pub nbytes: i128,
}

/// Assigns the positions of a new placement to nodes so that the fewest bytes move, and lists the transfers.
///
/// `old` is `[nodes, experts]`, the current replicas of each node; rows are zero for joining nodes. `new` is
/// `[positions, experts]`, the replicas that each position should hold; nodes without a position leave. Any value above
/// 0 counts as held. `nbytes` is `[experts]`.
///
/// Up to 512 nodes no assignment moves fewer bytes, and among those that move the same, this one has the most positions
/// on the node of the same number, so that positions stay where possible. With more nodes the pairs with the most bytes
/// in common are assigned first, and the result moves no more than the assignment by number. Each transfer, largest
/// first, comes from the holder with the fewest bytes to send so far.
///
/// With `domains`, lists of nodes that fail together, `new` has as many rows as `old`. Then the positions of a domain's
/// nodes go to the nodes of one domain of the same size, so that survival is unchanged. An unlisted node is its own
/// domain. With more than 512 nodes each domain keeps its own positions.
///
/// ```
/// use evermoe::placement::{ExpertTransfer, migrate};
/// // Node 0 holds expert 0, node 1 expert 1, node 2 joins. The new placement wants 1, 0 and 0 + 1: nodes 0 and 1 swap
/// // positions and node 2 fetches both.
/// let migration = migrate(&[1, 0, 0, 1, 0, 0], &[0, 1, 1, 0, 1, 1], &[64, 80], None)?;
/// assert_eq!(migration.node_map, [1, 0, 2]);
/// assert_eq!(migration.nbytes, 144);
/// let first = ExpertTransfer { expert: 1, source: 1, destination: 2, nbytes: 80 };
/// assert_eq!(migration.transfers, [first, ExpertTransfer { expert: 0, source: 0, destination: 2, nbytes: 64 }]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, negative numbers, more positions than nodes,
/// fewer with `domains`, domains that overlap, and an expert that `new` needs and no node of `old` holds.
pub fn migrate(
    old: &[i64],
    new: &[i64],
    nbytes: &[i64],
    domains: Option<&[Vec<usize>]>,
) -> Result<Migration> {
    let (nodes, moves) = (old.len() / nbytes.len().max(1), moves(old, new, nbytes, domains)?);
    let transfers = transfers(nbytes, &moves.holders, &moves.needers, &moves.node_map, nodes);
    let nbytes = transfers.iter().map(|transfer| i128::from(transfer.nbytes)).sum();
    Ok(Migration { node_map: moves.node_map, transfers, nbytes })
}

/// The node of each position, and derived quantities.
pub(super) struct Moves {
    /// The node that takes each position, all different.
    pub(super) node_map: Vec<usize>,
    /// The nodes that hold each expert, ascending.
    holders: Vec<Vec<usize>>,
    /// The positions that need each expert, ascending.
    needers: Vec<Vec<usize>>,
}

/// The assignment of [`migrate`], without the transfers.
pub(super) fn moves(
    old: &[i64],
    new: &[i64],
    nbytes: &[i64],
    domains: Option<&[Vec<usize>]>,
) -> Result<Moves> {
    check(old, new, nbytes)?;
    let experts = nbytes.len();
    let (holders, needers) = (by_expert(old, experts), by_expert(new, experts));
    let lost = (0..experts).find(|&expert| holders[expert].is_empty() && !needers[expert].is_empty());
    if let Some(expert) = lost {
        ensure!(false, "old: no node holds expert {expert}, which new needs; recover it first");
    }
    let (nodes, positions) = (old.len() / experts, new.len() / experts);
    let groups = match domains {
        Some(domains) => {
            ensure!(
                positions == nodes,
                "domains: with them, expected as many rows in new as in old, got {positions} and {nodes}"
            );
            nodes_of(&domain_of(nodes, domains)?)
        }
        None => Vec::new(),
    };
    let assignment =
        Assignment { nbytes, holders: &holders, needers: &needers, nodes, positions, groups: &groups };
    Ok(Moves { node_map: assignment.solve(), holders, needers })
}

fn check(old: &[i64], new: &[i64], nbytes: &[i64]) -> Result<()> {
    let experts = nbytes.len();
    ensure!(experts > 0, "nbytes: expected one size for each expert, got none");
    if let Some(expert) = nbytes.iter().position(|&size| size < 0) {
        ensure!(false, "nbytes: expert {expert} has {} bytes; sizes start at 0", nbytes[expert]);
    }
    let total: i128 = nbytes.iter().map(|&size| i128::from(size)).sum();
    ensure!(
        i64::try_from(total).is_ok(),
        "nbytes: all experts together have {total} bytes, expected less than 2^63"
    );
    for (name, matrix) in [("old", old), ("new", new)] {
        ensure!(
            matrix.len().is_multiple_of(experts),
            "{name}: expected rows of {experts} experts, as nbytes has, got {} numbers",
            matrix.len()
        );
        if let Some(cell) = matrix.iter().position(|&count| count < 0) {
            let (row, expert) = (cell / experts, cell % experts);
            ensure!(
                false,
                "{name}: row {row} has {} replicas of expert {expert}; counts start at 0",
                matrix[cell]
            );
        }
    }
    ensure!(
        old.len() >= new.len(),
        "old: expected a row for each of the {} rows of new, or more, got {}; add zero rows for nodes that join",
        new.len() / experts,
        old.len() / experts
    );
    Ok(())
}

/// The rows that hold each expert, ascending.
fn by_expert(matrix: &[i64], experts: usize) -> Vec<Vec<usize>> {
    let mut rows = vec![Vec::new(); experts];
    for (cell, _) in matrix.iter().enumerate().filter(|(_, count)| **count > 0) {
        rows[cell % experts].push(cell / experts);
    }
    rows
}

fn transfers(
    nbytes: &[i64],
    holders: &[Vec<usize>],
    needers: &[Vec<usize>],
    node_map: &[usize],
    nodes: usize,
) -> Vec<ExpertTransfer> {
    let mut order: Vec<usize> = (0..nbytes.len()).collect();
    order.sort_by_key(|&expert| (Reverse(nbytes[expert]), expert));
    let mut sent = vec![0_i128; nodes];
    let mut transfers = Vec::new();
    for expert in order {
        let mut destinations: Vec<usize> =
            needers[expert].iter().map(|&position| node_map[position]).collect();
        destinations.sort_unstable();
        for destination in destinations {
            if holders[expert].binary_search(&destination).is_ok() {
                continue;
            }
            let Some(&source) = holders[expert].iter().min_by_key(|&&node| (sent[node], node)) else {
                unreachable!("an expert that is needed has a holder");
            };
            sent[source] += i128::from(nbytes[expert]);
            transfers.push(ExpertTransfer { expert, source, destination, nbytes: nbytes[expert] });
        }
    }
    transfers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_too_many_leaves() {
        let migration = migrate(&[1, 0, 0, 1, 1, 1], &[1, 1, 0, 1], &[5, 3], None).unwrap();
        assert_eq!((migration.node_map, migration.nbytes), (vec![2, 1], 0));
    }

    #[test]
    fn huge_sizes_do_not_overflow() {
        let migration = migrate(&[1, 1, 0, 0, 0, 0], &[1; 6], &[i64::MAX / 2; 2], None).unwrap();
        assert_eq!(migration.nbytes, 4 * i128::from(i64::MAX / 2));
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |old: &[i64], new: &[i64], nbytes: &[i64]| {
            migrate(old, new, nbytes, None).unwrap_err().to_string()
        };
        assert!(message(&[], &[], &[]).starts_with("nbytes: expected one size"));
        assert!(message(&[1], &[1], &[-1]).contains("nbytes: expert 0 has -1 bytes"));
        assert!(message(&[1, 1], &[1, 1], &[i64::MAX, 1]).contains("nbytes: all experts together have"));
        assert!(message(&[1], &[1, 1], &[1, 1]).starts_with("old: expected rows of 2 experts"));
        assert!(message(&[1], &[1, 1], &[1]).contains("old: expected a row for each of the 2 rows of new"));
        assert!(message(&[1, 0], &[1, -1], &[1]).contains("new: row 1 has -1 replicas of expert 0"));
        assert!(
            message(&[1, 0], &[1, 1], &[1, 1]).contains("no node holds expert 1, which new needs; recover")
        );
    }
}
