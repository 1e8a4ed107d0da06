//! Copies scattered tensors to chunks and back, hashing each block of 4096 bytes while it is in the cache.
//!
//! The counterpart of `kernels/copy.cu`: the same bytes, the same hashes, the same rejected blocks.

use super::chunk_layout::{BLOCK_BYTES, ChunkLayout};
use super::memory::{STREAM_BYTES, copy, finish_stream};
use super::parallel::{Disjoint, Parallel};
use crate::ensure;
use crate::error::Result;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Maximum bytes of units that only the host digests: XXH3 has other algorithms for them.
pub const MAX_SHORT_BYTES: usize = 240;
/// Minimum number of blocks for a further thread.
const GRAIN: usize = 32;

/// Returns the checksum of a chunk: XXH3-64 of its blocks' hashes, as little-endian bytes.
pub fn chunk_checksum(hashes: &[i64]) -> u64 {
    let mut state = Xxh3::new();
    hashes.iter().for_each(|hash| state.update(&hash.to_le_bytes()));
    state.digest()
}

/// Hashes each block: `hashes[b] = XXH3-64(blocks 4096 * b .. 4096 * (b + 1))`, as the bits of an int64.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if `chunks` is not 4096 bytes per hash.
pub fn hash_blocks(chunks: &[u8], hashes: &mut [i64], pool: &dyn Parallel) -> Result<()> {
    check_hashes(chunks.len(), hashes.len())?;
    let hashes = Disjoint::new(hashes);
    pool.run(chunks.len() / BLOCK_BYTES, GRAIN, &|blocks| {
        for block in blocks {
            let hash = xxh3_64(&chunks[block * BLOCK_BYTES..][..BLOCK_BYTES]) as i64;
            // SAFETY: each block is visited once.
            unsafe { hashes.store(block, hash) };
        }
    });
    Ok(())
}

/// Copies tensors into the chunks of `layout` from `first_chunk` on that `chunks` has room for, with zeros between and
/// after the tensors, and hashes each block.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if tensors, chunks or hashes do not have the layout's lengths.
pub fn pack_chunks(
    layout: &ChunkLayout,
    first_chunk: usize,
    tensors: &[&[u8]],
    chunks: &mut [u8],
    hashes: &mut [i64],
    pool: &dyn Parallel,
) -> Result<()> {
    check(layout, first_chunk, tensors.iter().map(|tensor| tensor.len()), chunks.len(), hashes.len())?;
    let stream = chunks.len() >= STREAM_BYTES;
    let (num_blocks, first_block) = (hashes.len(), first_chunk * (layout.chunk_bytes() / BLOCK_BYTES));
    let (chunks, hashes) = (Disjoint::new(chunks), Disjoint::new(hashes));
    pool.run(num_blocks, GRAIN, &|blocks| {
        let mut walk = Walk::new(layout, first_block + blocks.start);
        for block in blocks {
            // SAFETY: each block is visited once.
            let out = unsafe { chunks.part(block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES) };
            let hash = pack_block(&mut walk, tensors, first_block + block, out, stream);
            // SAFETY: as above.
            unsafe { hashes.store(block, hash) };
        }
        finish_stream();
    });
    Ok(())
}

/// Copies the chunks of `layout` from `first_chunk` on back into the tensors, except for blocks whose hash is not the
/// given one: `wrong[c]` is the number of these in `first_chunk + c`.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the arguments do not have the layout's lengths.
pub fn unpack_chunks(
    layout: &ChunkLayout,
    first_chunk: usize,
    chunks: &[u8],
    hashes: &[i64],
    tensors: &mut [&mut [u8]],
    wrong: &mut [i64],
    pool: &dyn Parallel,
) -> Result<()> {
    check(layout, first_chunk, tensors.iter().map(|tensor| tensor.len()), chunks.len(), hashes.len())?;
    let num_chunks = chunks.len() / layout.chunk_bytes();
    ensure!(wrong.len() == num_chunks, "wrong: expected {num_chunks} numbers, got {}", wrong.len());
    let stream = chunks.len() >= STREAM_BYTES;
    let tensors: Vec<_> = tensors.iter_mut().map(|tensor| Disjoint::new(tensor)).collect();
    let chunk_blocks = layout.chunk_bytes() / BLOCK_BYTES;
    let first_block = first_chunk * chunk_blocks;
    let counts: Vec<AtomicI64> = wrong.iter().map(|_| AtomicI64::new(0)).collect();
    pool.run(chunks.len() / BLOCK_BYTES, GRAIN, &|blocks| {
        let mut walk = Walk::new(layout, first_block + blocks.start);
        for block in blocks {
            let bytes = &chunks[block * BLOCK_BYTES..][..BLOCK_BYTES];
            if xxh3_64(bytes) as i64 != hashes[block] {
                counts[block / chunk_blocks].fetch_add(1, Ordering::Relaxed);
                continue;
            }
            walk.for_block(first_block + block, |tensor, from, within| {
                // SAFETY: each byte of the stream is visited once, and tensors do not overlap.
                let out = unsafe { tensors[tensor].part(from) };
                copy(&bytes[within], out, stream);
            });
        }
        finish_stream();
    });
    wrong.iter_mut().zip(counts).for_each(|(wrong, count)| *wrong = count.into_inner());
    Ok(())
}

/// Packs one block. A block within a single tensor is hashed in place, and copied from the cache.
fn pack_block(walk: &mut Walk<'_>, tensors: &[&[u8]], block: usize, out: &mut [u8], stream: bool) -> i64 {
    if let Some((tensor, from)) = walk.full_block(block) {
        let bytes = &tensors[tensor][from];
        let hash = xxh3_64(bytes);
        copy(bytes, out, stream);
        return hash as i64;
    }
    let mut end = 0;
    walk.for_block(block, |tensor, from, within| {
        out[end..within.start].fill(0);
        end = within.end;
        out[within].copy_from_slice(&tensors[tensor][from]);
    });
    out[end..].fill(0);
    xxh3_64(out) as i64
}

/// Walks through the tensors in step with the blocks of the stream.
struct Walk<'a> {
    layout: &'a ChunkLayout,
    /// First tensor that ends after the last block's first byte.
    tensor: usize,
}

impl<'a> Walk<'a> {
    fn new(layout: &'a ChunkLayout, first_block: usize) -> Self {
        let byte = first_block * BLOCK_BYTES;
        // Sizes may be 0, but starts and ends never decrease.
        let (mut low, mut high) = (0, layout.sizes().len());
        while low < high {
            let middle = low.midpoint(high);
            if Self::end(layout, middle) > byte { high = middle } else { low = middle + 1 }
        }
        Self { layout, tensor: low }
    }

    fn end(layout: &ChunkLayout, tensor: usize) -> usize {
        layout.starts()[tensor] + layout.sizes()[tensor]
    }

    /// The tensor that contains the entire block, and its bytes.
    fn full_block(&mut self, block: usize) -> Option<(usize, Range<usize>)> {
        self.skip_to(block);
        let start = *self.layout.starts().get(self.tensor)?;
        let from = (block * BLOCK_BYTES).checked_sub(start)?;
        let fits = from + BLOCK_BYTES <= self.layout.sizes()[self.tensor];
        fits.then_some((self.tensor, from..from + BLOCK_BYTES))
    }

    /// Calls `body(tensor, bytes of the tensor, bytes of the block)` for each tensor that has bytes in a block, in order.
    fn for_block(&mut self, block: usize, mut body: impl FnMut(usize, Range<usize>, Range<usize>)) {
        self.skip_to(block);
        let first = block * BLOCK_BYTES;
        for tensor in self.tensor..self.layout.sizes().len() {
            let start = self.layout.starts()[tensor];
            if start >= first + BLOCK_BYTES {
                break;
            }
            let from = start.max(first);
            let to = Self::end(self.layout, tensor).min(first + BLOCK_BYTES);
            if from < to {
                body(tensor, from - start..to - start, from - first..to - first);
            }
        }
    }

    fn skip_to(&mut self, block: usize) {
        let count = self.layout.sizes().len();
        while self.tensor < count && Self::end(self.layout, self.tensor) <= block * BLOCK_BYTES {
            self.tensor += 1;
        }
    }
}

fn check(
    layout: &ChunkLayout,
    first_chunk: usize,
    sizes: impl Iterator<Item = usize>,
    chunks: usize,
    hashes: usize,
) -> Result<()> {
    ensure!(
        sizes.eq(layout.sizes().iter().copied()),
        "tensors: expected the sizes of the layout, in its order: {:?} bytes",
        layout.sizes()
    );
    let (chunk_bytes, num_chunks) = (layout.chunk_bytes(), layout.num_chunks());
    let rest = num_chunks.checked_sub(first_chunk);
    ensure!(
        chunks.is_multiple_of(chunk_bytes) && rest.is_some_and(|rest| chunks / chunk_bytes <= rest),
        "chunks: expected full chunks of {chunk_bytes} bytes, {first_chunk} to at most {num_chunks}, got {chunks} bytes"
    );
    check_hashes(chunks, hashes)
}

fn check_hashes(chunks: usize, hashes: usize) -> Result<()> {
    ensure!(
        hashes.checked_mul(BLOCK_BYTES) == Some(chunks),
        "hashes: expected one for each {BLOCK_BYTES} bytes of chunks, got {hashes} for {chunks} bytes"
    );
    Ok(())
}
