//! Digests of units on devices: captures whose only destination is the hash.
//!
//! ```text
//! lane 0   fetch │ unit 0 ········ │ unit 3 ──►     each lane: its units, one after the other, in a thread of its own,
//! lane 1   fetch │ unit 2 ── │ unit 1 ·· │          behind a ring of transfers of its own
//! ```
//!
//! A unit is hashed from its first byte to its last, which one thread does several times as slowly as a device's link
//! delivers them. Lanes share the link, so that together they are as fast as the link or as their threads, whichever is
//! slower.

use super::hashing::num_threads;
use super::work::{Fetch, HashSource, Work};
use crate::error::Result;
use std::cmp::Reverse;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Units that are hashed one after the other.
pub struct Lane<'a> {
    /// The consecutive parts of each unit.
    pub units: Vec<Vec<HashSource<'a>>>,
    /// Fetches the bytes of all [`HashSource::Fetched`], in order; dropped when all are hashed, or when it has failed.
    pub fetch: Fetch,
}

impl fmt::Debug for Lane<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Lane").field("units", &self.units).finish_non_exhaustive()
    }
}

/// Divides units of `sizes` bytes into lanes with about the same number of bytes each. The number of lanes is `count`,
/// or the number of threads that pays off.
///
/// ```
/// use evermoe::snapshot::digest_lanes;
/// assert_eq!(digest_lanes(&[10, 60, 30, 40], Some(2)), [[1, 0], [3, 2]]);  // 70 bytes each
/// assert_eq!(digest_lanes(&[10, 60], None), [[1, 0]]);
/// ```
pub fn digest_lanes(sizes: &[usize], count: Option<usize>) -> Vec<Vec<usize>> {
    let bytes = sizes.iter().fold(0, |sum: usize, &size| sum.saturating_add(size));
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let count = count.unwrap_or_else(|| num_threads(bytes, largest)).clamp(1, sizes.len().max(1));
    let mut lanes = vec![(0_usize, vec![]); count];
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&unit| Reverse(sizes[unit]));
    for unit in order {
        let Some((filled, units)) = lanes.iter_mut().min_by_key(|(filled, units)| (*filled, units.len()))
        else {
            break;
        };
        *filled = filled.saturating_add(sizes[unit]);
        units.push(unit);
    }
    lanes.into_iter().map(|(_, units)| units).collect()
}

/// Returns the digests of each lane's units, over their consecutive parts. Each lane has its own thread, as far as the
/// system provides them. When the call returns, all have ended and nothing is fetched or read any more.
///
/// # Errors
/// The error of the first lane that has one: that of its `fetch`.
///
/// # Safety
/// Runs must be readable once fetched, until the next call of their lane's `fetch`, and no other code may write them
/// meanwhile.
pub unsafe fn digests_fetched(lanes: Vec<Lane<'_>>) -> Result<Vec<Vec<u64>>> {
    let count = lanes.len();
    let mut found: Vec<_> = (0..count).map(|_| Ok(vec![])).collect();
    let jobs = Mutex::new(lanes.into_iter().zip(&mut found));
    let take = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((lane, digests)) = take() {
            // SAFETY: by the caller's promise.
            *digests = unsafe { hash(lane) };
        }
    };
    thread::scope(|scope| {
        for _ in 1..count {
            let builder = thread::Builder::new().name("evermoe-hash".into());
            if builder.spawn_scoped(scope, work).is_err() {
                break; // the running threads take its lanes
            }
        }
        work();
    });
    drop(jobs);
    found.into_iter().collect()
}

unsafe fn hash(lane: Lane<'_>) -> Result<Vec<u64>> {
    let mut work = Work::hashed(&lane.units, lane.fetch)?;
    let bytes = work.total_bytes();
    // SAFETY: by the caller's promise; the work has no buffer.
    unsafe { work.advance(bytes)? };
    Ok(work.digests().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::snapshot::{Run, digest};

    const SLOT: usize = 1000;

    fn bytes(count: usize, seed: usize) -> Vec<u8> {
        (0..count).map(|value| (value * 7 + value / 251 + seed) as u8).collect()
    }

    /// A lane that fetches `device` through one slot, to be hashed after `here` and before it. Overwrites bytes that
    /// were read.
    fn lane<'a>(device: Vec<u8>, here: &'a [u8], slot: &mut Vec<u8>) -> Lane<'a> {
        slot.resize(SLOT, 0);
        let at = slot.as_mut_ptr().expose_provenance();
        let runs = (0..device.len())
            .step_by(SLOT)
            .map(|start| HashSource::Fetched(Run { address: at, bytes: SLOT.min(device.len() - start) }));
        let units = vec![
            std::iter::once(HashSource::Present(here))
                .chain(runs)
                .chain([HashSource::Present(here)])
                .collect(),
            vec![],
            vec![HashSource::Present(&here[..7]), HashSource::Present(&here[7..])],
        ];
        let mut arrived = 0;
        let fetch = move |buffer: *mut u8| {
            assert!(buffer.is_null(), "there is no buffer");
            let end = (arrived + SLOT).min(device.len());
            // SAFETY: the slot has room; nothing reads it during the call.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(at).write_bytes(0xEE, SLOT);
                std::ptr::copy_nonoverlapping(
                    device[arrived..end].as_ptr(),
                    std::ptr::with_exposed_provenance_mut(at),
                    end - arrived,
                );
            }
            arrived = end;
            Ok(arrived)
        };
        Lane { units, fetch: Box::new(fetch) }
    }

    #[test]
    fn lanes_give_the_digests_of_bytes_that_come_in_turn_and_of_those_that_are_there() {
        let here = bytes(33, 5);
        for count in [1, 2, 5] {
            let mut slots = vec![vec![]; count];
            let devices: Vec<_> = (0..count).map(|seed| bytes(20_001 + seed * 999, seed)).collect();
            let lanes =
                devices.iter().zip(&mut slots).map(|(device, slot)| lane(device.clone(), &here, slot));
            let lanes = lanes.collect();
            // SAFETY: the slots live here, and only the lanes use them.
            let found = unsafe { digests_fetched(lanes) }.unwrap();
            let expected = devices
                .iter()
                .map(|device| vec![digest(&[&here[..], device, &here].concat()), digest(&[]), digest(&here)]);
            assert_eq!(found, expected.collect::<Vec<_>>());
        }
        // SAFETY: the list is empty.
        assert!(unsafe { digests_fetched(vec![]) }.unwrap().is_empty());
    }

    #[test]
    fn a_lane_that_fails_says_why_and_the_others_end() {
        let here = bytes(33, 5);
        let mut slots = [vec![], vec![]];
        let [first, second] = &mut slots;
        let mut failing = lane(bytes(5000, 1), &here, first);
        let mut calls = 0;
        let mut fetch = failing.fetch;
        failing.fetch = Box::new(move |buffer| {
            calls += 1;
            if calls == 3 { Err(Error::Internal("the link is gone".into())) } else { fetch(buffer) }
        });
        let lanes = vec![lane(bytes(9000, 2), &here, second), failing];
        // SAFETY: as above.
        let error = unsafe { digests_fetched(lanes) }.unwrap_err();
        assert_eq!(error.to_string(), "the link is gone");
        let mut short = lane(bytes(5000, 1), &here, &mut slots[0]);
        short.fetch = Box::new(|_| Ok(0));
        // SAFETY: as above.
        let error = unsafe { digests_fetched(vec![short]) }.unwrap_err();
        assert_eq!(error.to_string(), "fetch: expected more than 0 bytes");
    }

    #[test]
    fn lanes_have_every_unit_once_and_about_as_many_bytes() {
        let sizes: Vec<usize> = (0..100).map(|unit| unit * unit % 37 * 1000).collect();
        for count in [1, 3, 8, 1000] {
            let lanes = digest_lanes(&sizes, Some(count));
            assert_eq!(lanes.len(), count.min(100));
            let mut units = lanes.concat();
            units.sort_unstable();
            assert!(units.into_iter().eq(0..100));
            let filled = lanes.iter().map(|lane| lane.iter().map(|&unit| sizes[unit]).sum::<usize>());
            let (least, most) = (filled.clone().min().unwrap(), filled.max().unwrap());
            assert!(most - least <= 36_000, "{count}: {least} and {most}");
        }
        assert_eq!(digest_lanes(&[], None), [[0_usize; 0]]);
        assert_eq!(digest_lanes(&[usize::MAX, usize::MAX], Some(2)), [[0], [1]]);
    }
}
