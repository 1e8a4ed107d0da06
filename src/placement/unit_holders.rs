use super::{CopyPolicy, copy_holders};
use crate::ensure;
use crate::error::Result;
use std::collections::BTreeMap;

/// Returns for each unit the ranks that keep its copies: its primary, then `copies − 1` others.
///
/// The others are the primary's partners of [`copy_holders`]. A partner on a node that trains the unit is replaced by
/// the next rank, by number, whose node does not: so each copy protects against one more loss. If every node trains the
/// unit the partner stays, as the copy then protects against crashes of the processes.
///
/// ```
/// // Four nodes. Unit 0 trains on ranks 2 and 3, so its copy goes not to its partner 3 but to rank 0.
/// let nodes = ["a", "b", "c", "d"];
/// let holders = evermoe::placement::unit_copy_holders(&[2, 0], &[vec![2, 3], vec![0]], &nodes, 2)?;
/// assert_eq!(holders, [vec![2, 0], vec![0, 1]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if `copies` is 0, the lists differ in length, or a rank does not
/// exist.
pub fn unit_copy_holders<S: Ord>(
    primaries: &[usize],
    active: &[Vec<usize>],
    nodes: &[S],
    copies: usize,
) -> Result<Vec<Vec<usize>>> {
    ensure!(
        primaries.len() == active.len(),
        "active: expected the holders of each of the {} units of primaries, got {}",
        primaries.len(),
        active.len()
    );
    let partners = copy_holders(nodes, copies, CopyPolicy::Mixed)?;
    let mut numbers = BTreeMap::new();
    let mut number = |node| {
        let next = numbers.len();
        *numbers.entry(node).or_insert(next)
    };
    let node_of: Vec<usize> = nodes.iter().map(&mut number).collect();
    let rows = primaries.iter().zip(active).enumerate();
    rows.map(|(unit, (&primary, active))| {
        for (name, &rank) in active.iter().map(|rank| ("active", rank)).chain([("primaries", &primary)]) {
            ensure!(
                rank < nodes.len(),
                "{name}: unit {unit} names rank {rank}; there are {} ranks",
                nodes.len()
            );
        }
        Ok(holders_of(primary, &partners[primary], active, &node_of))
    })
    .collect()
}

/// `node_of` is the number of each rank's node, below the number of ranks.
fn holders_of(primary: usize, partners: &[usize], active: &[usize], node_of: &[usize]) -> Vec<usize> {
    let mut is_covered = vec![false; node_of.len()];
    active.iter().for_each(|&rank| is_covered[node_of[rank]] = true);
    let mut holders = vec![primary];
    for &partner in &partners[1..] {
        let candidates = (partner..node_of.len()).chain(0..partner);
        let fresh = candidates.clone().find(|&rank| !is_covered[node_of[rank]] && !holders.contains(&rank));
        let chosen = fresh.or_else(|| candidates.clone().find(|rank| !holders.contains(rank)));
        if let Some(rank) = chosen {
            is_covered[node_of[rank]] = true;
            holders.push(rank);
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_partner_that_trains_on_the_unit_is_passed_over() {
        let nodes = ["a", "b", "c", "d"];
        let holders = unit_copy_holders(&[0], &[vec![0, 1]], &nodes, 2).unwrap();
        assert_eq!(holders, [vec![0, 2]]);
    }

    #[test]
    fn a_unit_that_trains_everywhere_still_gets_its_copies() {
        let nodes = ["a", "b", "c"];
        let holders = unit_copy_holders(&[1], &[vec![0, 1, 2]], &nodes, 2).unwrap();
        assert_eq!(holders[0].len(), 2);
        assert_eq!(holders[0][0], 1);
    }

    #[test]
    fn unknown_ranks_are_refused() {
        assert!(unit_copy_holders(&[2], &[vec![2]], &["a", "b"], 2).is_err());
    }

    proptest! {
        #[test]
        fn copies_lie_on_as_many_nodes_as_there_are(
            ranks in 1..9_usize, nodes in 1..5_usize, copies in 1..4_usize, hosts in prop::collection::vec(0..9_usize, 1..4),
        ) {
            let names: Vec<String> = (0..ranks).map(|rank| format!("n{}", rank % nodes)).collect();
            let mut active: Vec<usize> = hosts.iter().map(|host| host % ranks).collect();
            active.sort_unstable();
            active.dedup();
            let holders = unit_copy_holders(&[active[0]], &[active.clone()], &names, copies).unwrap().remove(0);
            let mut distinct = holders.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), holders.len());
            let on = |ranks: &[usize]| {
                let mut found: Vec<&str> = ranks.iter().map(|&rank| names[rank].as_str()).collect();
                found.sort_unstable();
                found.dedup();
                found.len()
            };
            let union: Vec<usize> = holders.iter().chain(&active).copied().collect();
            let all = on(&(0..ranks).collect::<Vec<_>>());
            // every copy beyond the primary's own is on one more node, until all nodes hold the unit
            let wanted = (on(&active) + copies.min(all) - 1).min(all);
            prop_assert!(on(&union) >= wanted, "holders {:?} active {:?} names {:?}", holders, active, names);
        }
    }
}
