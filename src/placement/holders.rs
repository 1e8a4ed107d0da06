//! Holders of a rank's copies, and primaries of units: the ranks that send their copies.

use crate::ensure;
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::str::FromStr;

/// Policy that chooses the nodes that keep a node's copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyPolicy {
    /// Gemini's mixed placement: groups, with a ring at the end if their size does not divide the number of nodes.
    Mixed,
    /// Groups only: the most likely to survive, but only if their size divides the number of nodes.
    Group,
    /// Each node copies to the next ones in one ring over all nodes.
    Ring,
    /// The reverse ring: each node copies to the previous ones, as BAFT does in a pipeline.
    Previous,
}

impl FromStr for CopyPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "mixed" => Ok(Self::Mixed),
            "group" => Ok(Self::Group),
            "ring" => Ok(Self::Ring),
            "previous" => Ok(Self::Previous),
            _ => Err(Error::invalid(format!(
                "policy: expected \"mixed\", \"group\", \"ring\" or \"previous\", got {name:?}"
            ))),
        }
    }
}

/// Returns for each rank the ranks that keep copies of the units it is primary for, itself first. `nodes[r]` is the
/// node of rank r.
///
/// Nodes are sorted by name, and a node's copies go to the next nodes of its group or ring. Groups have `copies` nodes.
/// With [`CopyPolicy::Mixed`], if that does not divide the number of nodes, the last `copies + 1` to `2·copies − 1`
/// nodes form a ring (Gemini, SOSP'23, §4). The i-th rank of a node is paired with the (i mod m)-th of the m ranks of
/// the other. With fewer nodes than copies all nodes are used, and on a single node its ranks take the place of nodes.
///
/// ```
/// use evermoe::placement::{CopyPolicy, copy_holders};
/// let holders = copy_holders(&["a", "b", "a", "b"], 2, CopyPolicy::Mixed)?;
/// assert_eq!(holders, [vec![0, 1], vec![1, 0], vec![2, 3], vec![3, 2]]);
/// // Five nodes, two copies: one group (0, 1) and a ring 2 → 3 → 4 → 2.
/// let holders = copy_holders(&["a", "b", "c", "d", "e"], 2, CopyPolicy::Mixed)?;
/// assert_eq!(holders, [vec![0, 1], vec![1, 0], vec![2, 3], vec![3, 4], vec![4, 2]]);
/// let holders = copy_holders(&["a", "b", "c", "d", "e"], 2, CopyPolicy::Ring)?;
/// assert_eq!(holders, [vec![0, 1], vec![1, 2], vec![2, 3], vec![3, 4], vec![4, 0]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if `copies` is 0, or with [`CopyPolicy::Group`] does not divide the
/// number of nodes.
pub fn copy_holders<S: Ord>(nodes: &[S], copies: usize, policy: CopyPolicy) -> Result<Vec<Vec<usize>>> {
    ensure!(copies > 0, "copies: expected 1 (the rank itself) or more, got 0");
    let mut ranks_of: BTreeMap<&S, Vec<usize>> = BTreeMap::new();
    for (rank, node) in nodes.iter().enumerate() {
        ranks_of.entry(node).or_default().push(rank);
    }
    let domains: Vec<Vec<usize>> = match ranks_of.len() {
        1 => (0..nodes.len()).map(|rank| vec![rank]).collect(),
        _ => ranks_of.into_values().collect(),
    };
    let count = domains.len();
    ensure!(
        policy != CopyPolicy::Group || count.is_multiple_of(copies),
        "copies: groups of {copies} do not divide {count} nodes; use the mixed policy, or copies that divide them"
    );
    let mut holders = vec![Vec::new(); nodes.len()];
    for (domain, ranks) in domains.iter().enumerate() {
        let (first, size) = circle(domain, count, copies.min(count), policy);
        for (position, &rank) in ranks.iter().enumerate() {
            holders[rank] = (0..copies.min(count))
                .map(|step| if policy == CopyPolicy::Previous { size - step } else { step })
                .map(|step| &domains[first + (domain - first + step) % size])
                .map(|others| others[position % others.len()])
                .collect();
        }
    }
    Ok(holders)
}

/// First node and size of the group or ring of nodes with the copies of `domain`.
fn circle(domain: usize, count: usize, copies: usize, policy: CopyPolicy) -> (usize, usize) {
    if matches!(policy, CopyPolicy::Ring | CopyPolicy::Previous) {
        return (0, count);
    }
    let groups = count / copies;
    let group = (domain / copies).min(groups - 1);
    (group * copies, if group == groups - 1 { count - group * copies } else { copies })
}

/// Returns for each unit the rank that sends its copies: largest units first, each to the holder with the fewest bytes.
///
/// `holders[u]` are the ranks that hold unit u as part of the running model, `bytes[u]` its size.
///
/// ```
/// // The unit of 5 bytes goes to rank 0, so the next two go to rank 1: 5 bytes against 4.
/// let primaries = evermoe::placement::primaries(&[vec![0, 1], vec![0, 1], vec![0, 1]], &[2, 5, 2], 2)?;
/// assert_eq!(primaries, [1, 0, 1]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) when the lists differ in length, a unit has no holder, or a holder
/// is not a rank.
pub fn primaries(holders: &[Vec<usize>], bytes: &[u64], ranks: usize) -> Result<Vec<usize>> {
    ensure!(
        holders.len() == bytes.len(),
        "nbytes: expected one size for each of the {} units of holders, got {}",
        holders.len(),
        bytes.len()
    );
    ensure!(ranks <= 1 << 24, "ranks: expected at most 2^24, got {ranks}");
    let mut assigned = vec![0_u128; ranks];
    let mut primaries = vec![0; holders.len()];
    let mut order: Vec<usize> = (0..holders.len()).collect();
    order.sort_by_key(|&unit| (Reverse(bytes[unit]), unit));
    for unit in order {
        if let Some(rank) = holders[unit].iter().find(|&&rank| rank >= ranks) {
            ensure!(false, "holders: unit {unit} names rank {rank}; there are {ranks} ranks");
        }
        let Some(&rank) = holders[unit].iter().min_by_key(|&&rank| (assigned[rank], rank)) else {
            ensure!(false, "holders: unit {unit} has none; every unit needs a rank that holds it");
            continue;
        };
        assigned[rank] += u128::from(bytes[unit]);
        primaries[unit] = rank;
    }
    Ok(primaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primaries_balance_when_all_hold_all() {
        let primaries = primaries(&vec![vec![0, 1, 2, 3]; 9], &[8; 9], 4).unwrap();
        assert_eq!(primaries, [0, 1, 2, 3, 0, 1, 2, 3, 0]);
    }

    #[test]
    fn previous_nodes_keep_the_copies_of_all_their_ranks() {
        // Two ranks on a, one on b, one on c.
        let holders = copy_holders(&["a", "a", "b", "c"], 2, CopyPolicy::Previous).unwrap();
        assert_eq!(holders, [vec![0, 3], vec![1, 3], vec![2, 0], vec![3, 2]]);
        let holders = copy_holders(&["a", "b", "c"], 3, CopyPolicy::Previous).unwrap();
        assert_eq!(holders, [vec![0, 2, 1], vec![1, 0, 2], vec![2, 1, 0]]);
    }

    #[test]
    fn errors_name_the_unit() {
        assert!(primaries(&[vec![]], &[1], 1).unwrap_err().to_string().contains("unit 0 has none"));
        assert!(primaries(&[vec![1]], &[1], 1).unwrap_err().to_string().contains("unit 0 names rank 1"));
        assert!(primaries(&[vec![1]], &[], 1).unwrap_err().to_string().starts_with("nbytes"));
    }
}
