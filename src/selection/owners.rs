//! Owners of modules that are no experts, whose optimizer state is not on all ranks.

use super::shard::level;
use crate::ensure;
use crate::error::{Error, Result};
use std::cmp::Reverse;

/// Inverse of the share by which a rank may exceed an even division of bytes, so that units stay where they are.
const SLACK: u128 = 10;

/// Assigns an owner to each unit that has one: few units move, and no rank gets many more bytes than others.
///
/// A unit stays on a rank that trains it, or goes to a rank with a copy, or to the rank with the fewest bytes, in this
/// order, if the rank has room: up to the level to which [`shard_modules`](super::shard_modules) would fill all ranks,
/// plus a tenth. Larger units are assigned first. `active[u]` are the ranks that train unit u now, `copies[u]` those
/// with a copy of it in memory, and `loads[r]` the bytes of rank r's experts.
///
/// ```
/// use evermoe::selection::place_owners;
/// let owners = place_owners(&[30, 20, 10], &[vec![0], vec![0], vec![0]], &[vec![1], vec![], vec![]], &[0, 0])?;
/// assert_eq!(owners, [0, 1, 1]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] if there is no rank, or if the lists differ in length or name an unknown rank.
pub fn place_owners(
    nbytes: &[u64],
    active: &[Vec<usize>],
    copies: &[Vec<usize>],
    loads: &[u64],
) -> Result<Vec<usize>> {
    ensure!(!loads.is_empty(), "loads: expected 1 rank or more, got 0");
    for (name, lists) in [("active", active), ("copies", copies)] {
        ensure!(
            lists.len() == nbytes.len(),
            "{name}: expected {} lists, one for each unit, got {}",
            nbytes.len(),
            lists.len()
        );
        let unknown = lists.iter().flatten().find(|&&rank| rank >= loads.len());
        ensure!(unknown.is_none(), "{name}: expected ranks below {}, got {unknown:?}", loads.len());
    }
    let level = level(nbytes.iter().map(|&size| u128::from(size)).sum(), loads);
    let limit = level + level / SLACK;
    let mut largest_first: Vec<usize> = (0..nbytes.len()).collect();
    largest_first.sort_by_key(|&unit| (Reverse(nbytes[unit]), unit));
    let mut left: Vec<u128> = loads.iter().map(|&load| u128::from(load)).collect();
    let mut owners = vec![None; nbytes.len()];
    let mut settle = |unit: usize, ranks: &mut dyn Iterator<Item = usize>, limit: u128| {
        let size = u128::from(nbytes[unit]);
        let fitting = ranks.filter(|&rank| left[rank] + size <= limit);
        if owners[unit].is_none()
            && let Some(rank) = fitting.min_by_key(|&rank| (left[rank], rank))
        {
            left[rank] += size;
            owners[unit] = Some(rank);
        }
    };
    for &unit in &largest_first {
        settle(unit, &mut active[unit].iter().copied(), limit);
    }
    for &unit in &largest_first {
        settle(unit, &mut copies[unit].iter().copied(), limit);
        settle(unit, &mut (0..loads.len()), u128::MAX);
    }
    let owners: Option<Vec<usize>> = owners.into_iter().collect();
    owners.ok_or_else(|| Error::Internal("owners: a unit has none".into()))
}
