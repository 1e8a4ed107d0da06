//! Memory of snapshots.

use std::cmp::Reverse;

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
