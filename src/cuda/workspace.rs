//! Division of a copier's memory on the device and the host.

use super::abi::Span;
use crate::cpu::{BLOCK_BYTES, ChunkLayout};
use crate::ensure;
use crate::error::Result;

pub(super) const WORD: usize = size_of::<u64>();

/// The device memory that chunks pass through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staging {
    /// Maximum transfers in flight.
    pub count: usize,
    /// Bytes of a transfer: at least a chunk, and several if they are smaller.
    pub bytes: usize,
}

impl Default for Staging {
    /// 3 of 4 MiB, which is large enough to hide the start of a transfer.
    fn default() -> Self {
        Self { count: 3, bytes: 4 << 20 }
    }
}

/// Division of a copier's device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workspace {
    pub(super) num_spans: usize,
    pub(super) num_chunks: usize,
    pub(super) chunk_bytes: usize,
    pub(super) staging_chunks: usize,
    pub(super) num_staging: usize,
    /// Groups of chunks that the host has memory for.
    pub(super) num_slots: usize,
    /// Whether groups use that memory in turn; then their hashes stay on the device.
    pub(super) is_in_turn: bool,
}

impl Workspace {
    pub(super) fn new(layout: &ChunkLayout, staging: Staging, is_in_turn: bool) -> Result<Self> {
        ensure!((1..=1024).contains(&staging.count), "staging: expected 1 to 1024, got {}", staging.count);
        let (num_chunks, chunk_bytes) = (layout.num_chunks(), layout.chunk_bytes());
        let staging_chunks = (staging.bytes / chunk_bytes).clamp(1, num_chunks.max(1));
        let num_spans = layout.sizes().iter().filter(|&&bytes| bytes > 0).count();
        let num_groups = num_chunks.div_ceil(staging_chunks);
        let num_staging = staging.count.min(num_groups);
        // One that the host reads, and one for each transfer in flight meanwhile.
        let num_slots = if is_in_turn { num_groups.min(num_staging + 1) } else { num_groups };
        Ok(Self { num_spans, num_chunks, chunk_bytes, staging_chunks, num_staging, num_slots, is_in_turn })
    }

    pub(super) fn num_groups(&self) -> usize {
        self.num_chunks.div_ceil(self.staging_chunks)
    }

    /// Bytes of the chunks on the host.
    pub(super) fn host_bytes(&self) -> usize {
        (self.num_slots * self.staging_chunks).min(self.num_chunks) * self.chunk_bytes
    }

    pub(super) fn hashes_of_chunk(&self) -> usize {
        self.chunk_bytes / BLOCK_BYTES
    }

    /// Words of the hashes on the host.
    pub(super) fn host_hashes(&self) -> usize {
        if self.is_in_turn { 0 } else { self.num_chunks * self.hashes_of_chunk() }
    }

    /// Bytes of a buffer's chunks and hashes; a multiple of 16.
    pub(super) fn staging_bytes(&self) -> usize {
        self.staging_chunks * (self.chunk_bytes + (self.hashes_of_chunk() * WORD).next_multiple_of(16))
    }

    /// Offset of the table of tensors, after the staging buffers and before the counts of wrong blocks.
    pub(super) fn spans_at(&self) -> usize {
        self.num_staging * self.staging_bytes()
    }

    pub(super) fn wrong_at(&self) -> usize {
        self.spans_at() + self.num_spans * size_of::<Span>()
    }

    /// Offset of the tables of units, after the counts of wrong blocks: their spans, their ends and their digests.
    pub(super) fn units_at(&self) -> usize {
        self.wrong_at() + self.num_chunks * WORD
    }

    /// Words of the tables of units up to the digests. A unit has one span or more.
    pub(super) fn words_of_units(&self) -> usize {
        self.num_spans * (size_of::<Span>() / WORD + 1)
    }

    pub(super) fn bytes(&self) -> usize {
        self.units_at() + (self.words_of_units() + self.num_spans) * WORD
    }
}
