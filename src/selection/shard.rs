//! Division of the shared state's save among ranks: PEC's equal and adaptive sharding (EDPS, ADPS).

use crate::ensure;
use crate::error::Result;
use std::ops::Range;

/// A part of a module that one rank saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleShard {
    /// Index of the module.
    pub module: usize,
    /// Range of its bytes; never empty.
    pub bytes: Range<u64>,
}

/// Returns for each rank the parts of the modules that it saves, so that the busiest rank saves as little as possible.
///
/// `bytes[m]` is the size of module m, `expert_bytes[r]` the bytes of experts that rank r saves in any case (all 0:
/// equal sharding; given: adaptive). Modules are cut where a rank is full, at multiples of `alignment`. So at most
/// `ranks − 1` cuts are made, and parts follow each other in the order of modules. The paper assigns uncut modules to
/// the least loaded rank. A cut costs one more entry in a manifest and makes the division optimal: with the level L at
/// which `Σ max(L − expert_bytes[r], 0) = Σ bytes`, no rank that saves a part saves more than `⌈L⌉ + alignment − 1`
/// bytes.
///
/// ```
/// use evermoe::selection::{ModuleShard, shard_modules};
/// // 150 bytes over experts of 0 and 50: 100 for rank 0, 50 for rank 1. Rank 0 is full at byte 60 of module 1.
/// let parts = shard_modules(&[40, 110], &[0, 50], 4)?;
/// assert_eq!(parts[0], [ModuleShard { module: 0, bytes: 0..40 }, ModuleShard { module: 1, bytes: 0..60 }]);
/// assert_eq!(parts[1], [ModuleShard { module: 1, bytes: 60..110 }]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if there is no rank, or `alignment` is 0.
pub fn shard_modules(bytes: &[u64], expert_bytes: &[u64], alignment: u64) -> Result<Vec<Vec<ModuleShard>>> {
    ensure!(!expert_bytes.is_empty(), "ranks: expected 1 or more, got 0");
    ensure!(alignment > 0, "alignment: expected 1 or more bytes, got 0");
    let level = level(bytes.iter().map(|&size| u128::from(size)).sum(), expert_bytes);
    let mut parts = vec![Vec::new(); expert_bytes.len()];
    let (mut module, mut start) = (0, 0);
    for (parts, &load) in parts.iter_mut().zip(expert_bytes) {
        let mut room = level.saturating_sub(u128::from(load));
        while room > 0 && module < bytes.len() {
            let end = cut(start, bytes[module], room, alignment);
            if end > start {
                parts.push(ModuleShard { module, bytes: start..end });
            }
            room = room.saturating_sub(u128::from(end - start));
            (module, start) = if end == bytes[module] { (module + 1, 0) } else { (module, end) };
        }
    }
    Ok(parts)
}

/// End of the part, starting at `start`, of a module of `size` bytes on a rank with that room. It is rounded up, so
/// that the ranks before the last one leave nothing over.
fn cut(start: u64, size: u64, room: u128, alignment: u64) -> u64 {
    let end = (u128::from(start) + room).div_ceil(u128::from(alignment)) * u128::from(alignment);
    u64::try_from(end).unwrap_or(u64::MAX).min(size)
}

/// The lowest integer level that has room for `total` bytes above the loads.
pub(super) fn level(total: u128, loads: &[u64]) -> u128 {
    let mut ascending: Vec<u128> = loads.iter().map(|&load| u128::from(load)).collect();
    ascending.sort_unstable();
    let mut below = total;
    for (position, &load) in ascending.iter().enumerate() {
        below += load;
        let level = below.div_ceil(position as u128 + 1);
        if ascending.get(position + 1).is_none_or(|&next| level <= next) {
            return level;
        }
    }
    below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn water_stands_at_the_same_level() {
        assert_eq!(level(6, &[0, 0, 0]), 2);
        assert_eq!(level(7, &[0, 0, 0]), 3);
        assert_eq!(level(5, &[9, 1, 4]), 5);
        assert_eq!(level(0, &[9, 1, 4]), 1);
        assert_eq!(level(u128::from(u64::MAX) * 3, &[u64::MAX; 3]), u128::from(u64::MAX) * 2);
    }

    #[test]
    fn what_divides_evenly_is_not_cut() {
        let parts = shard_modules(&[100; 3], &[0; 3], 64).unwrap();
        let uncut = |module| vec![ModuleShard { module, bytes: 0..100 }];
        assert_eq!(parts, [uncut(0), uncut(1), uncut(2)]);
    }

    #[test]
    fn a_module_without_bytes_has_no_part() {
        let parts = shard_modules(&[0, 8, 0], &[0, 0], 8).unwrap();
        assert_eq!(parts, [vec![ModuleShard { module: 1, bytes: 0..8 }], vec![]]);
    }

    #[test]
    fn errors_name_the_argument() {
        assert!(shard_modules(&[1], &[], 1).unwrap_err().to_string().starts_with("ranks"));
        assert!(shard_modules(&[1], &[0], 0).unwrap_err().to_string().starts_with("alignment"));
    }
}
