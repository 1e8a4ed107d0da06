//! Retention of persisted versions: those that a recovery from the store alone would use, now or soon, are kept.

use crate::ensure;
use crate::error::Result;
use std::collections::BTreeSet;

/// Returns the versions to keep of `versions[u]`, the durable versions of unit u; each list is ascending.
///
/// A version is *complete* if it could be the target of [`plan_lagging`](crate::recovery::plan_lagging): all units have
/// it, and those of `may_lag` have it or an earlier one. It is *open* if slower members may still save its missing
/// units. Kept are the versions needed by the newest complete version and by the open ones after it, and the newest
/// `spare` versions of each unit, in case one is damaged. Units without any version do not count. `partial[u]` lists
/// versions of which parts of unit u are durable; those that are open are kept, too. Units that may lag are never saved
/// in parts. Each list is ascending.
///
/// ```
/// use evermoe::persist::retained;
/// // Units 0 and 1 may not lag, and the member that saves 1 is slow: 4 is complete, 6 and 8 are open, 2 is superseded.
/// // Unit 2 may lag: 4 needs its version 3, 6 its 5, and 8 its 7.
/// let versions = [vec![2, 4, 6, 8], vec![2, 4], vec![1, 3, 5, 7]];
/// assert_eq!(retained(&versions, &[], &[6, 8], &[2], 1)?, [vec![4, 6, 8], vec![4], vec![3, 5, 7]]);
/// // Once 8 is complete, a recovery needs nothing else.
/// let versions = [vec![4, 6, 8], vec![4, 8], vec![3, 5, 7]];
/// assert_eq!(retained(&versions, &[], &[], &[2], 1)?, [vec![8], vec![8], vec![7]]);
/// // Of version 8, a part of unit 0 is durable, and the rest may follow.
/// let versions = [vec![4, 6], vec![4, 6, 8], vec![3, 5, 7]];
/// let partial = [vec![8], vec![], vec![]];
/// assert_eq!(retained(&versions, &partial, &[8], &[2], 1)?, [vec![6, 8], vec![6, 8], vec![5, 7]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a unit of `may_lag` is out of range, if `spare` is 0, or if
/// `partial` is neither empty nor one list per unit.
pub fn retained(
    versions: &[Vec<u64>],
    partial: &[Vec<u64>],
    open: &[u64],
    may_lag: &[usize],
    spare: usize,
) -> Result<Vec<Vec<u64>>> {
    ensure!(spare > 0, "spare: expected 1 or more, got 0");
    let units = versions.len();
    let begun = partial.len();
    ensure!(begun == 0 || begun == units, "partial: expected {units} lists or none, got {begun}");
    let begun: Vec<BTreeSet<u64>> =
        (0..units).map(|unit| partial.get(unit).into_iter().flatten().copied().collect()).collect();
    let mut lags = vec![false; units];
    for &unit in may_lag {
        ensure!(unit < units, "may_lag: unit {unit} is named; there are {units} units");
        lags[unit] = true;
    }
    let durable: Vec<BTreeSet<u64>> = versions.iter().map(|found| found.iter().copied().collect()).collect();
    let mut stay: Vec<BTreeSet<u64>> =
        durable.iter().map(|found| found.iter().rev().take(spare).copied().collect()).collect();
    let targets: BTreeSet<u64> = durable.iter().chain(&begun).flatten().copied().collect();
    for &target in targets.iter().rev() {
        let taken: Vec<Option<u64>> =
            durable.iter().zip(&lags).map(|(found, &lags)| taken(found, target, lags)).collect();
        let counts = |unit: usize| !durable[unit].is_empty() || !begun[unit].is_empty();
        let is_complete = (0..units).all(|unit| taken[unit].is_some() || !counts(unit));
        let is_open = open.contains(&target);
        if !is_complete && !is_open {
            continue;
        }
        for ((stay, taken), begun) in stay.iter_mut().zip(&taken).zip(&begun) {
            stay.extend(taken);
            stay.extend(begun.get(&target).filter(|_| is_open));
        }
        if is_complete {
            break;
        }
    }
    Ok(stay.into_iter().map(|versions| versions.into_iter().collect()).collect())
}

/// The version of a unit if the job resumes from `target`.
fn taken(found: &BTreeSet<u64>, target: u64, lags: bool) -> Option<u64> {
    match lags {
        true => found.range(..=target).next_back().copied(),
        false => found.get(&target).copied(),
    }
}
