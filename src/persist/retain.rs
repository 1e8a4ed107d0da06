//! Retention of persisted versions: those that a recovery from the store alone would take, now or soon, must stay.

use crate::ensure;
use crate::error::Result;
use std::collections::BTreeSet;

/// Versions that must stay of `versions[u]`, the durable versions of unit u; each list ascending.
///
/// A version is *complete* when it could be the target of [`plan_lagging`](crate::recovery::plan_lagging): all units have
/// it, those of `may_lag` at that version or before. It is *open* when members that are slower than the others may save
/// what is missing of it. What the newest complete version and the open ones after it need stays; so do the newest
/// `spare` versions of each unit, lest one be damaged. Units without any version do not count. Of `partial[u]`, versions
/// of which parts of unit u are durable, those that are open stay, too; what may lag is saved whole. Each list is
/// ascending.
///
/// ```
/// use evermoe::persist::retained;
/// // Units 0 and 1 may not lag, and who saves 1 is slow: 4 is complete, 6 and 8 are open, and 2 is superseded.
/// // Unit 2 may lag: 4 needs its version 3, 6 its 5, and 8 its 7.
/// let versions = [vec![2, 4, 6, 8], vec![2, 4], vec![1, 3, 5, 7]];
/// assert_eq!(retained(&versions, &[], &[6, 8], &[2], 1)?, [vec![4, 6, 8], vec![4], vec![3, 5, 7]]);
/// // When 8 is complete, it is all that a recovery needs.
/// let versions = [vec![4, 6, 8], vec![4, 8], vec![3, 5, 7]];
/// assert_eq!(retained(&versions, &[], &[], &[2], 1)?, [vec![8], vec![8], vec![7]]);
/// // A part of unit 0 is there of 8, and the rest may come.
/// let versions = [vec![4, 6], vec![4, 6, 8], vec![3, 5, 7]];
/// let partial = [vec![8], vec![], vec![]];
/// assert_eq!(retained(&versions, &partial, &[8], &[2], 1)?, [vec![6, 8], vec![6, 8], vec![5, 7]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) when a unit of `may_lag` is out of range, `spare` is 0, or `partial`
/// has neither no list nor one for each unit.
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

/// The version of a unit when the job resumes from `target`.
fn taken(found: &BTreeSet<u64>, target: u64, lags: bool) -> Option<u64> {
    match lags {
        true => found.range(..=target).next_back().copied(),
        false => found.get(&target).copied(),
    }
}
