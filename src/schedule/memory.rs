//! Choice of the memory of snapshots.

use std::cmp::Reverse;

/// Memory that holds a unit's snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// GPU memory: fast to copy into, and nothing crosses the host link yet.
    Device,
    /// Host memory.
    Host,
}

impl MemoryKind {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// Chooses the memory of each unit's snapshot: GPU memory while it fits and leaves `reserve` bytes free, or else host
/// memory.
///
/// Larger units come first, so that few bytes go to the host; ties go to the lower index.
///
/// ```
/// use evermoe::schedule::{MemoryKind::{Device, Host}, snapshot_memory};
/// // Of 70 usable bytes, 60 and 10 are used, not 40.
/// assert_eq!(snapshot_memory(100, &[10, 40, 60], 30), [Device, Host, Device]);
/// ```
pub fn snapshot_memory(free_bytes: u64, nbytes: &[u64], reserve: u64) -> Vec<MemoryKind> {
    let mut left = free_bytes.saturating_sub(reserve);
    let mut order: Vec<usize> = (0..nbytes.len()).collect();
    order.sort_by_key(|&unit| Reverse(nbytes[unit]));
    let mut places = vec![MemoryKind::Host; nbytes.len()];
    for unit in order {
        if nbytes[unit] <= left {
            left -= nbytes[unit];
            places[unit] = MemoryKind::Device;
        }
    }
    places
}
