//! XXH3-64 of a payload, piece by piece, while it is in the cache.

use crate::cpu::{Disjoint, Parallel};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes that are hashed at once; threads share a payload by pieces.
pub(super) const PIECE_BYTES: usize = 4096;
/// Pieces that are worth a thread of their own.
pub(super) const GRAIN: usize = 32;

/// The digest of a payload: XXH3-64 of the hashes of its pieces, as little-endian bytes.
pub(super) fn of_hashes(hashes: &[u64]) -> u64 {
    let mut state = Xxh3::new();
    hashes.iter().for_each(|hash| state.update(&hash.to_le_bytes()));
    state.digest()
}

/// Copies a payload and returns its digest: the source is read once.
pub(super) fn copy(from: &[u8], to: &mut [u8], pool: &dyn Parallel) -> u64 {
    assert_eq!(from.len(), to.len());
    let mut hashes = vec![0; from.len().div_ceil(PIECE_BYTES)];
    let (to, out) = (Disjoint::new(to), Disjoint::new(&mut hashes));
    pool.run(from.len().div_ceil(PIECE_BYTES), GRAIN, &|pieces| {
        for piece in pieces {
            let range = piece * PIECE_BYTES..from.len().min((piece + 1) * PIECE_BYTES);
            // SAFETY: each piece is met once.
            let part = unsafe { to.part(range.clone()) };
            part.copy_from_slice(&from[range]);
            // SAFETY: as above.
            unsafe { out.store(piece, xxh3_64(part)) };
        }
    });
    of_hashes(&hashes)
}

/// The digest of a payload where it is.
pub(super) fn digest(payload: &[u8], pool: &dyn Parallel) -> u64 {
    let mut hashes = vec![0; payload.len().div_ceil(PIECE_BYTES)];
    let out = Disjoint::new(&mut hashes);
    pool.run(payload.len().div_ceil(PIECE_BYTES), GRAIN, &|pieces| {
        for piece in pieces {
            let range = piece * PIECE_BYTES..payload.len().min((piece + 1) * PIECE_BYTES);
            // SAFETY: each piece is met once.
            unsafe { out.store(piece, xxh3_64(&payload[range])) };
        }
    });
    of_hashes(&hashes)
}
