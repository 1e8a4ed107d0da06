//! Digests of units in place, without copies. [`super::capture`] computes those of units on devices.

use crate::background::processors;
use std::sync::Mutex;
use std::thread;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Enough to use most of the memory bandwidth without occupying the host.
const MAX_THREADS: usize = 4;

/// Returns the xxh3-64 of some bytes, which verifies every copy.
pub fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Returns the digests of several units, each given as consecutive parts.
pub fn digests(units: &[Vec<&[u8]>]) -> Vec<u64> {
    let mut found = vec![0; units.len()];
    let jobs = Mutex::new(units.iter().zip(&mut found));
    let take = || jobs.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next();
    let work = || {
        while let Some((parts, digest)) = take() {
            *digest = digest_of_parts(parts);
        }
    };
    let threads = processors().min(MAX_THREADS).min(units.len());
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    found
}

fn digest_of_parts(parts: &[&[u8]]) -> u64 {
    let mut hash = Xxh3::new();
    for part in parts {
        hash.update(part);
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::{digest, digests};

    #[test]
    fn parts_count_like_their_bytes_in_one_piece() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let cuts = [0, 1, 7, 240, 241, 1024, 65_536, 99_999, 100_000];
        let units: Vec<Vec<&[u8]>> = cuts
            .iter()
            .map(|&end| {
                cuts.iter()
                    .zip(&cuts[1..])
                    .filter(|(_, to)| **to <= end)
                    .map(|(&a, &b)| &bytes[a..b])
                    .collect()
            })
            .collect();
        let expected: Vec<u64> = cuts.iter().map(|&end| digest(&bytes[..end])).collect();
        assert_eq!(digests(&units), expected);
        assert!(digests(&[]).is_empty());
    }
}
