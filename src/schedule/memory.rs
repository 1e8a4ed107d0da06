//! Memory of snapshots, and the ranks that make them.

use crate::ensure;
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::str::FromStr;

/// Memory that has a unit's snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// On the GPU: fast to take, and nothing crosses the host link yet.
    Device,
    /// Host memory.
    Host,
}

impl Place {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// For each unit, where its snapshot goes: on the GPU while it fits there beside `reserve` bytes, else in host memory.
///
/// Largest units first, so that few of them go to the host; ties by index.
///
/// ```
/// use evermoe::schedule::{Place::{Device, Host}, snapshot_places};
/// // 70 bytes to use: 60, not 40, and 10.
/// assert_eq!(snapshot_places(100, &[10, 40, 60], 30), [Device, Host, Device]);
/// ```
pub fn snapshot_places(free_bytes: u64, nbytes: &[u64], reserve: u64) -> Vec<Place> {
    let mut left = free_bytes.saturating_sub(reserve);
    let mut order: Vec<usize> = (0..nbytes.len()).collect();
    order.sort_by_key(|&unit| Reverse(nbytes[unit]));
    let mut places = vec![Place::Host; nbytes.len()];
    for unit in order {
        if nbytes[unit] <= left {
            left -= nbytes[unit];
            places[unit] = Place::Device;
        }
    }
    places
}

/// Policy by which the ranks of a data-parallel group share the copying of units that all of them hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// Unit i is rank i mod D's: BAFT.
    Modulo,
    /// Largest first, each to the rank with the fewest bytes.
    Bytes,
}

impl FromStr for Share {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "modulo" => Ok(Self::Modulo),
            "bytes" => Ok(Self::Bytes),
            _ => Err(Error::Invalid(format!("share: expected \"modulo\" or \"bytes\", got {name:?}"))),
        }
    }
}

/// For each unit, the rank of the data-parallel group that copies it.
///
/// ```
/// use evermoe::schedule::{Share, unit_shares};
/// assert_eq!(unit_shares(&[9, 1, 1, 1], 2, Share::Modulo)?, [0, 1, 0, 1]); // 10 and 2 bytes
/// assert_eq!(unit_shares(&[9, 1, 1, 1], 2, Share::Bytes)?, [0, 1, 1, 1]); // 9 and 3
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] when there are no ranks.
pub fn unit_shares(nbytes: &[u64], ranks: usize, share: Share) -> Result<Vec<usize>> {
    ensure!(ranks > 0, "ranks: expected 1 or more, got 0");
    if share == Share::Modulo {
        return Ok((0..nbytes.len()).map(|unit| unit % ranks).collect());
    }
    let mut order: Vec<usize> = (0..nbytes.len()).collect();
    order.sort_by_key(|&unit| (Reverse(nbytes[unit]), unit));
    // Of more ranks than units the last ones get nothing.
    let idle = (0..ranks.min(nbytes.len())).map(|rank| Reverse((0_u128, rank)));
    let mut lightest: BinaryHeap<Reverse<(u128, usize)>> = idle.collect();
    let mut shares = vec![0; nbytes.len()];
    for unit in order {
        let Some(Reverse((bytes, rank))) = lightest.pop() else { break };
        shares[unit] = rank;
        lightest.push(Reverse((bytes + u128::from(nbytes[unit]), rank)));
    }
    Ok(shares)
}
