//! Launches of the copies between tensors and chunks.

use super::abi::{COPY_THREADS, DIGEST_THREADS, Span, THREADS_PER_BLOCK};
use super::device::{Grid, Launcher};
use crate::cpu::{BLOCK_BYTES, ChunkLayout, MAX_SHORT_BYTES};
use crate::ensure;
use crate::error::Result;

const MAX_BLOCKS: usize = 1 << 16;

impl Span {
    /// Returns the spans of the non-empty tensors; `addresses` are in the order of the layout.
    pub fn table(layout: &ChunkLayout, addresses: &[u64]) -> Vec<Self> {
        let tensors = addresses.iter().zip(layout.starts()).zip(layout.sizes());
        let spans =
            tensors.map(|((&at, &start), &bytes)| Self { at, start: start as u64, bytes: bytes as u64 });
        spans.filter(|span| span.bytes > 0).collect()
    }

    /// Returns the spans of units, each of some of the tensors in order, and the number of spans up to the end of each
    /// unit; without units of [`MAX_SHORT_BYTES`] or less.
    pub(super) fn units(
        sizes: &[usize],
        addresses: &[u64],
        tensors_per_unit: &[usize],
    ) -> (Vec<Self>, Vec<u64>) {
        let (mut spans, mut ends) = (vec![], vec![]);
        let mut tensors = addresses.iter().zip(sizes);
        for &count in tensors_per_unit {
            let (first, mut start) = (spans.len(), 0);
            for (&at, &bytes) in tensors.by_ref().take(count).filter(|&(_, &bytes)| bytes > 0) {
                spans.push(Self { at, start, bytes: bytes as u64 });
                start += bytes as u64;
            }
            if start > MAX_SHORT_BYTES as u64 {
                ends.push(spans.len() as u64);
            } else {
                spans.truncate(first);
            }
        }
        (spans, ends)
    }
}

/// A range of blocks of the stream, and the tensors. All addresses are on the device.
#[derive(Debug, Clone, Copy)]
pub struct ChunkRange {
    /// `[num_spans]` [`Span`]s, in the order of the stream
    pub spans: u64,
    /// Number of non-empty tensors.
    pub num_spans: usize,
    /// First byte of the stream, a multiple of 4096.
    pub first_byte: usize,
    /// Blocks of 4096 bytes.
    pub num_blocks: usize,
    /// `[num_blocks, 4096]` bytes, aligned to 16
    pub chunks: u64,
    /// `[num_blocks]` int64
    pub hashes: u64,
}

impl ChunkRange {
    fn check(&self) -> Result<()> {
        ensure!(
            self.chunks.is_multiple_of(16) && self.first_byte.is_multiple_of(BLOCK_BYTES),
            "chunks: expected memory aligned to 16 bytes and a first byte that is a multiple of {BLOCK_BYTES}"
        );
        Ok(())
    }
}

fn grid(num_blocks: usize) -> Grid {
    let blocks = num_blocks.div_ceil(COPY_THREADS / THREADS_PER_BLOCK).min(MAX_BLOCKS);
    Grid { blocks, threads: COPY_THREADS, shared_bytes: 0 }
}

impl Launcher {
    /// Copies the table to the device. `spans` may change when the call returns.
    ///
    /// # Safety
    /// `to` must hold the same number of [`Span`]s on the device, until the stream has passed this point.
    ///
    /// # Errors
    /// While the stream is captured into a graph, which would read `spans` at each replay; or errors of the driver.
    pub unsafe fn upload_spans(&self, spans: &[Span], to: u64) -> Result<()> {
        ensure!(
            !self.is_capturing()?,
            "chunks: expected a stream that is not being captured into a CUDA graph"
        );
        // SAFETY: by the caller's promise; the driver has read pageable memory when the call returns.
        unsafe { self.copy_from_host(spans.as_ptr().cast(), to, size_of_val(spans)) }
    }

    /// Copies tensors to chunks and hashes: the bytes of [`crate::cpu::pack_chunks`].
    ///
    /// # Safety
    /// The addresses must hold what [`ChunkRange`] and [`Span`] state, on the device, until the stream has passed the
    /// launch. Written memory must not overlap anything else.
    ///
    /// # Errors
    /// For unaligned chunks, and errors of the driver.
    pub unsafe fn pack_chunks(&self, range: &ChunkRange) -> Result<()> {
        let ChunkRange { spans, num_spans, first_byte, num_blocks, chunks, hashes } = *range;
        range.check()?;
        if num_blocks == 0 {
            return Ok(());
        }
        let arguments = [spans, num_spans as u64, first_byte as u64, num_blocks as u64, chunks, hashes];
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("pack_chunks", grid(num_blocks), &arguments) }
    }

    /// Copies chunks to tensors, except for blocks with another hash, which are counted in `wrong[block /
    /// chunk_blocks]`: [`crate::cpu::unpack_chunks`].
    ///
    /// # Safety
    /// As [`Launcher::pack_chunks`]; `wrong` must hold an int64 per `chunk_blocks` blocks, initialised before.
    ///
    /// # Errors
    /// For unaligned chunks, and errors of the driver.
    pub unsafe fn unpack_chunks(&self, range: &ChunkRange, wrong: u64, chunk_blocks: usize) -> Result<()> {
        let ChunkRange { spans, num_spans, first_byte, num_blocks, chunks, hashes } = *range;
        range.check()?;
        ensure!(chunk_blocks > 0, "chunk_blocks: expected 1 or more, got 0");
        if num_blocks == 0 {
            return Ok(());
        }
        let (first, blocks) = (first_byte as u64, num_blocks as u64);
        let arguments = [spans, num_spans as u64, first, blocks, chunks, hashes, wrong, chunk_blocks as u64];
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("unpack_chunks", grid(num_blocks), &arguments) }
    }

    /// Sets the counts of wrong blocks to 0.
    ///
    /// # Safety
    /// `wrong` must hold `count` int64 on the device until the stream has passed this point.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn clear_wrong(&self, wrong: u64, count: usize) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.fill(wrong, 0, count * size_of::<i64>()) }
    }

    /// Computes the digest of each unit: XXH3-64 of the bytes of its spans, one after the other without gaps. At most
    /// `most_at_once` units are read at a time, each by a block of threads.
    ///
    /// # Safety
    /// `spans` must hold the spans of all units, with `start` in its unit, `ends` `num_units` uint64, the number of spans
    /// up to the end of each unit, and `digests` `num_units` uint64, all on the device and until the stream has passed
    /// the launch. Each unit must have more than [`crate::cpu::MAX_SHORT_BYTES`].
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn digest_units(
        &self,
        spans: u64,
        ends: u64,
        num_units: usize,
        digests: u64,
        most_at_once: usize,
    ) -> Result<()> {
        if num_units == 0 {
            return Ok(());
        }
        let grid = Grid {
            blocks: num_units.min(most_at_once).clamp(1, MAX_BLOCKS),
            threads: DIGEST_THREADS,
            shared_bytes: 0,
        };
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("digest_units", grid, &[spans, ends, num_units as u64, digests]) }
    }

    /// Computes the hash of each block: [`crate::cpu::hash_blocks`].
    ///
    /// # Safety
    /// `chunks` must hold `num_blocks * 4096` bytes and `hashes` `num_blocks` int64, on the device, until the stream
    /// has passed the launch.
    ///
    /// # Errors
    /// For unaligned chunks, and errors of the driver.
    pub unsafe fn hash_blocks(&self, chunks: u64, num_blocks: usize, hashes: u64) -> Result<()> {
        ensure!(chunks.is_multiple_of(16), "chunks: expected memory aligned to 16 bytes");
        if num_blocks == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("hash_blocks", grid(num_blocks), &[chunks, num_blocks as u64, hashes]) }
    }
}
