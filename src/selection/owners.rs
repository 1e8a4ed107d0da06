//! Owners of what is not an expert, where its optimizer state is not on all ranks.

use super::shard::level;
use crate::ensure;
use crate::error::{Error, Result};
use std::cmp::Reverse;

/// One over the part by which a rank may have more bytes than if all had equally many, so that a unit stays where it is.
const SLACK: u128 = 10;

/// The owner of each unit that has one: few units move, and no rank has many more bytes than others.
///
/// A unit stays where it is trained, goes where a copy of it is, or where the fewest bytes are, in this order, as long
/// as a rank has room: the level up to which [`shard_modules`](super::shard_modules) would fill all ranks, and a tenth more. Largest
/// units first. `active[u]` are the ranks that train unit u now, `copies[u]` those that have a copy of it in memory, and
/// `loads[r]` the bytes of what rank r holds beside: its experts.
///
/// ```
/// use evermoe::selection::place_owners;
/// let owners = place_owners(&[30, 20, 10], &[vec![0], vec![0], vec![0]], &[vec![1], vec![], vec![]], &[0, 0])?;
/// assert_eq!(owners, [0, 1, 1]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] when there is no rank, or the lists differ in length or name a rank that there is not.
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
