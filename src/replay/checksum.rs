//! XXH3-64 of a payload or a state, piece by piece, while it is in the cache.

use super::bytes::Plain;
use crate::cpu::{Disjoint, Parallel};
use std::mem::MaybeUninit;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes that are hashed at once; threads divide a payload by pieces.
pub(super) const PIECE_BYTES: usize = 4096;
/// Minimum number of pieces for a further thread.
pub(super) const GRAIN: usize = 32;

/// Digest of a payload: XXH3-64 of the hashes of its pieces, as little-endian bytes.
pub(super) fn of_hashes(hashes: &[u64]) -> u64 {
    let mut state = Xxh3::new();
    hashes.iter().for_each(|hash| state.update(&hash.to_le_bytes()));
    state.digest()
}

/// Copies a payload and returns its digest, reading the source once.
pub(super) fn copy(from: &[u8], to: &mut [u8], pool: &dyn Parallel) -> u64 {
    // SAFETY: `MaybeUninit<u8>` has the layout of `u8`; `copy_pieces` initialises all bytes that it writes.
    copy_pieces(from, unsafe { &mut *(std::ptr::from_mut(to) as *mut [MaybeUninit<u8>]) }, pool)
}

/// Copies a payload into newly allocated elements, the last one padded with zeros; returns them with the digest.
///
/// No byte is written twice, as the log is as large as the trained state.
pub(super) fn copied<T: Plain>(from: &[u8], pool: &dyn Parallel) -> (Vec<T>, u64) {
    let len = from.len().div_ceil(size_of::<T>());
    let mut values = Vec::<T>::with_capacity(len);
    let spare = &mut values.spare_capacity_mut()[..len];
    if let Some(last) = spare.last_mut() {
        *last = MaybeUninit::zeroed();
    }
    // SAFETY: the memory is for `len` elements, and `from` has no more bytes than these.
    let to = unsafe { std::slice::from_raw_parts_mut(spare.as_mut_ptr().cast(), from.len()) };
    let digest = copy_pieces(from, to, pool);
    // SAFETY: all bytes are set, the padding by zeros first, and every bit pattern is a valid `T`.
    unsafe { values.set_len(len) };
    (values, digest)
}

fn copy_pieces(from: &[u8], to: &mut [MaybeUninit<u8>], pool: &dyn Parallel) -> u64 {
    assert_eq!(from.len(), to.len());
    let mut hashes = vec![0; from.len().div_ceil(PIECE_BYTES)];
    let (to, out) = (Disjoint::new(to), Disjoint::new(&mut hashes));
    pool.run(from.len().div_ceil(PIECE_BYTES), GRAIN, &|pieces| {
        for piece in pieces {
            let range = piece * PIECE_BYTES..from.len().min((piece + 1) * PIECE_BYTES);
            let source = &from[range.clone()];
            // SAFETY: each piece is visited once, and all of its bytes are set before they are read.
            let part = unsafe {
                let part = to.part(range).as_mut_ptr().cast::<u8>();
                part.copy_from_nonoverlapping(source.as_ptr(), source.len());
                std::slice::from_raw_parts(part, source.len())
            };
            // SAFETY: as above.
            unsafe { out.store(piece, xxh3_64(part)) };
        }
    });
    of_hashes(&hashes)
}

/// Digest of a payload in place.
pub(super) fn digest(payload: &[u8], pool: &dyn Parallel) -> u64 {
    let mut hashes = vec![0; payload.len().div_ceil(PIECE_BYTES)];
    let out = Disjoint::new(&mut hashes);
    pool.run(payload.len().div_ceil(PIECE_BYTES), GRAIN, &|pieces| {
        for piece in pieces {
            let range = piece * PIECE_BYTES..payload.len().min((piece + 1) * PIECE_BYTES);
            // SAFETY: each piece is visited once.
            unsafe { out.store(piece, xxh3_64(&payload[range])) };
        }
    });
    of_hashes(&hashes)
}

/// Returns the digest of a state given in consecutive parts.
///
/// ```
/// use evermoe::cpu::Serial;
/// use evermoe::replay::state_digest;
/// let bytes = vec![7; 10_000];
/// assert_eq!(state_digest(&[&bytes[..1], &bytes[1..]], &Serial), state_digest(&[&bytes], &Serial));
/// ```
pub fn state_digest(parts: &[&[u8]], pool: &dyn Parallel) -> u64 {
    if let [single] = parts {
        return digest(single, pool);
    }
    let (mut hashes, mut piece, mut filled) = (Vec::new(), Xxh3::new(), 0);
    for mut part in parts.iter().copied() {
        while !part.is_empty() {
            if filled == 0 && part.len() >= PIECE_BYTES {
                let (piece, rest) = part.split_at(PIECE_BYTES);
                hashes.push(xxh3_64(piece));
                part = rest;
                continue;
            }
            let (next, rest) = part.split_at(part.len().min(PIECE_BYTES - filled));
            piece.update(next);
            (filled, part) = (filled + next.len(), rest);
            if filled == PIECE_BYTES {
                hashes.push(piece.digest());
                piece.reset();
                filled = 0;
            }
        }
    }
    if filled > 0 {
        hashes.push(piece.digest());
    }
    of_hashes(&hashes)
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, copied, copy, digest, state_digest};
    use crate::cpu::Serial;

    #[test]
    fn parts_count_like_their_bytes_in_one_piece() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for cuts in [&[0][..], &[1, 2], &[PIECE_BYTES], &[PIECE_BYTES - 1, PIECE_BYTES + 1], &[7, 7, 9000]] {
            let mut parts = Vec::new();
            let mut rest = &bytes[..];
            let mut at = 0;
            for cut in cuts {
                let (part, other) = rest.split_at(cut - at);
                parts.push(part);
                (rest, at) = (other, *cut);
            }
            parts.push(rest);
            assert_eq!(state_digest(&parts, &Serial), digest(&bytes, &Serial), "{cuts:?}");
        }
        assert_eq!(state_digest(&[], &Serial), digest(&[], &Serial));
    }

    #[test]
    fn copies_are_the_bytes_and_the_last_element_is_filled_up() {
        let bytes: Vec<u8> = (0..9001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        for len in [0, 1, 3, 4, PIECE_BYTES, PIECE_BYTES + 2, 9001] {
            let mut to = vec![0; len];
            assert_eq!(copy(&bytes[..len], &mut to, &Serial), digest(&bytes[..len], &Serial));
            assert_eq!(to, bytes[..len]);
            let (words, found) = copied::<f32>(&bytes[..len], &Serial);
            assert_eq!((words.len(), found), (len.div_ceil(4), digest(&to, &Serial)));
            to.resize(4 * words.len(), 0);
            let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(words, to);
        }
    }
}
