//! Launches of the copies between tensors and chunks.

use super::abi::{COPY_THREADS, Span, THREADS_PER_BLOCK};
use super::device::{Grid, Launcher};
use crate::cpu::{BLOCK_BYTES, ChunkLayout};
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
