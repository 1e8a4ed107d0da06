//! Further decisions of a session: slots, rows that stay, and whether moving is worthwhile.

use super::migrate::moves;
use super::place::MAX_REPLICAS;
use crate::ensure;
use crate::error::Result;

/// Share of the mean load by which a new placement must lower the busiest rank of a layer.
const REBALANCE_GAIN: f64 = 0.1;

/// Returns the number of replicas per layer that each rank of a session holds: as requested, and at least enough for
/// all experts.
///
/// Without a request it is one more than the minimum, or enough for all wanted replicas. Nodes of different sizes need
/// more: each expert should be on `replicas` of them, or on all. `domain_sizes` is the number of ranks of each node.
///
/// ```
/// use evermoe::placement::session_slots;
/// assert_eq!(session_slots(8, &[1, 1, 1, 1], None, 1)?, 3);
/// assert_eq!(session_slots(8, &[1, 1, 1, 1], None, 2)?, 4);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// // Without ranks it is 0.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for more experts, ranks or slots than [`place`](super::place) has
/// room for.
pub fn session_slots(
    experts: usize,
    domain_sizes: &[usize],
    slots: Option<usize>,
    replicas: usize,
) -> Result<usize> {
    let ranks = domain_sizes.iter().fold(0_usize, |sum, &size| sum.saturating_add(size));
    for (name, number) in [("experts", experts), ("domain_sizes", ranks), ("slots", slots.unwrap_or(0))] {
        ensure!(number <= MAX_REPLICAS, "{name}: expected at most 2^24 in all, got {number}");
    }
    if ranks == 0 {
        return Ok(0);
    }
    let fewest = experts.div_ceil(ranks);
    if let Some(slots) = slots {
        return Ok(fewest.max(slots));
    }
    let at_least = (fewest + 1).max((experts * replicas.min(ranks)).div_ceil(ranks));
    let domains = domain_sizes.iter().filter(|&&size| size > 0).count();
    let wanted = experts * replicas.min(domains);
    let is_enough =
        |slots: usize| domain_sizes.iter().map(|&size| experts.min(slots * size)).sum::<usize>() >= wanted;
    // With a slot for each expert every domain has all of them.
    let (mut few, mut enough) = (at_least, at_least.max(experts));
    while few < enough {
        let middle = few.midpoint(enough);
        if is_enough(middle) { enough = middle } else { few = middle + 1 }
    }
    Ok(enough)
}

/// Returns a layer's placement with its rows assigned to ranks so that the fewest bytes come from peers.
///
/// `held` is `[ranks, experts]`: above 0 if a rank has the expert's bytes in memory, trained or as a copy; `placement`
/// has the same shape. The rows of a node's ranks stay together, so that the loss of a node costs the same as before.
/// Experts that no rank holds come from a checkpoint in any case.
///
/// ```
/// use evermoe::placement::keep_in_place;
/// let kept = keep_in_place(&[0, 1, 1, 0], &[1, 0, 0, 1], &[8, 8], &[vec![0], vec![1]])?;
/// assert_eq!(kept, [0, 1, 1, 0]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// Those of [`migrate`](super::migrate).
pub fn keep_in_place(
    held: &[i64],
    placement: &[i64],
    nbytes: &[i64],
    domains: &[Vec<usize>],
) -> Result<Vec<i64>> {
    let experts = nbytes.len().max(1);
    let mut kept = vec![0; placement.len()];
    for (row, rank) in placement.chunks_exact(experts).zip(ranks_in_place(held, placement, nbytes, domains)?)
    {
        kept[rank * experts..][..experts].copy_from_slice(row);
    }
    Ok(kept)
}

/// Returns the rank of each row of [`keep_in_place`].
///
/// ```
/// use evermoe::placement::ranks_in_place;
/// assert_eq!(ranks_in_place(&[0, 1, 1, 0], &[1, 0, 0, 1], &[8, 8], &[vec![0], vec![1]])?, [1, 0]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// Those of [`migrate`](super::migrate).
pub fn ranks_in_place(
    held: &[i64],
    placement: &[i64],
    nbytes: &[i64],
    domains: &[Vec<usize>],
) -> Result<Vec<usize>> {
    let experts = nbytes.len().max(1);
    let left: Vec<usize> = (0..experts)
        .filter(|&expert| held.iter().skip(expert).step_by(experts).any(|&count| count > 0))
        .collect();
    if left.is_empty() {
        return Ok((0..placement.len() / experts).collect());
    }
    let moves = if left.len() == experts {
        moves(held, placement, nbytes, Some(domains))?
    } else {
        let columns = |matrix: &[i64]| -> Vec<i64> {
            matrix.chunks_exact(experts).flat_map(|row| left.iter().map(|&expert| row[expert])).collect()
        };
        let sizes: Vec<i64> = left.iter().map(|&expert| nbytes[expert]).collect();
        moves(&columns(held), &columns(placement), &sizes, Some(domains))?
    };
    Ok(moves.node_map)
}

/// Whether a new placement makes a layer enough more even for experts to move; both loads are those of the busiest rank
/// over the mean.
///
/// ```
/// use evermoe::placement::is_worth_moving;
/// assert!(is_worth_moving(1.3, 1.1) && !is_worth_moving(1.3, 1.25));
/// ```
pub fn is_worth_moving(now: f64, then: f64) -> bool {
    then < now - REBALANCE_GAIN
}
