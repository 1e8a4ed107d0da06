//! Copies of tensors to page-locked host memory, in chunks, concurrently with torch's stream; and back.
//!
//! ```text
//! torch   …step──●ready                     ●(released: may overwrite the tensors)──next step…
//! pack             └pack 0─●full  pack 1─●full  (buf. 0 free?)  pack 2 …─●released
//! copy                       └D2H 0─●done, free  D2H 1─●done, free …
//! host                                 └reads chunk 0 …
//! ```
//!
//! Data passes through staging buffers in device memory, a *group* of chunks at a time: small chunks share a buffer, so
//! that each transfer is large enough to be worth its start. `restore` is the same from right to left.

use super::abi::Span;
use super::chunks::ChunkRange;
use super::device::{Device, Launcher};
use super::host_runs;
use super::pinned::PinnedBuffer;
use super::streams::{CopyStream, Event};
use super::workspace::{Staging, WORD, Workspace};
use crate::cpu::{BLOCK_BYTES, ChunkLayout};
use crate::ensure;
use crate::error::Result;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Maximum number of units that are digested at a time: most of the GPU's processors are left to training.
const UNITS_AT_ONCE: usize = 16;

/// Location of the chunks on the host.
#[derive(Debug)]
pub enum HostMemory {
    /// Memory for all of them, allocated by the copier.
    Own,
    /// This memory, for all of them.
    Given(PinnedBuffer),
    /// Memory for a few transfers, allocated by the copier and used in turn: for a [`Fetcher`](super::Fetcher), which
    /// does not overwrite data that the host has not read yet. Hashes stay on the device, and nothing can be restored.
    Slots,
}

/// Device memory for one group of chunks, followed by its hashes.
#[derive(Debug)]
struct StagingBuffer {
    at: u64,
    /// Recorded when the group is in the buffer.
    full: Event,
    /// Recorded when the next group may be copied into it.
    free: Event,
}

/// Copies the same tensors to the same host memory repeatedly.
#[derive(Debug)]
pub struct ChunkCopier {
    // The fields are dropped in this order: the streams first, which wait for all queued work.
    pack: CopyStream,
    copy: CopyStream,
    /// Computes digests of units.
    digest: CopyStream,
    staging: Vec<StagingBuffer>,
    /// One event per group: recorded after its last transfer.
    done: Vec<Event>,
    /// Position of torch's stream.
    ready: Event,
    /// Recorded when the tensors are no longer read or written.
    released: Event,
    chunks: PinnedBuffer,
    /// Hashes, followed by counts of wrong blocks, and the tables of units.
    hashes: PinnedBuffer,
    layout: ChunkLayout,
    /// Addresses of the tensors.
    addresses: Vec<u64>,
    workspace: Workspace,
    start: u64,
    /// Index of the next buffer; locked while work is queued.
    queue: Mutex<usize>,
    device: std::sync::Arc<Device>,
}

impl ChunkCopier {
    /// Returns the bytes of device memory that a copier needs.
    ///
    /// # Errors
    /// For no staging buffers, or more than 1024.
    pub fn workspace_bytes(layout: &ChunkLayout, staging: Staging) -> Result<usize> {
        Ok(Workspace::new(layout, staging, false)?.bytes())
    }

    /// Creates a copier of the tensors at `addresses` on a device.
    ///
    /// # Safety
    /// `workspace` must be the address of [`ChunkCopier::workspace_bytes`] of device memory, aligned to 16. It and the
    /// tensors must live as long as the copier and not overlap, except for tensors that are never restored. `stream`,
    /// torch's current one, must be free to use both now.
    ///
    /// # Errors
    /// For lengths that do not fit the layout, a build without kernels, and errors of the driver.
    pub unsafe fn new(
        device: usize,
        stream: *mut c_void,
        layout: ChunkLayout,
        addresses: &[u64],
        workspace: u64,
        staging: Staging,
        host: HostMemory,
    ) -> Result<Self> {
        let parts = Workspace::new(&layout, staging, matches!(host, HostMemory::Slots))?;
        let num_tensors = layout.sizes().len();
        ensure!(addresses.len() == num_tensors, "tensors: expected {num_tensors}, got {}", addresses.len());
        ensure!(workspace.is_multiple_of(16), "workspace: expected memory aligned to 16 bytes");
        let bytes = parts.host_bytes();
        let chunks = match host {
            HostMemory::Given(chunks) => chunks,
            HostMemory::Own | HostMemory::Slots => PinnedBuffer::new(device, bytes)?,
        };
        ensure!(chunks.len() == bytes, "chunks: expected {bytes} bytes of host memory, got {}", chunks.len());
        let words = parts.host_hashes() + parts.num_chunks + parts.words_of_units() + parts.num_spans;
        let hashes = PinnedBuffer::new(device, words * WORD)?;
        let device = Device::get(device)?;
        let _current = device.make_current()?;
        let buffer = |index| {
            let at = workspace + (index * parts.staging_bytes()) as u64;
            Ok(StagingBuffer { at, full: Event::new(&device)?, free: Event::new(&device)? })
        };
        let copier = Self {
            pack: CopyStream::new(&device)?,
            copy: CopyStream::new(&device)?,
            digest: CopyStream::new(&device)?,
            staging: (0..parts.num_staging).map(buffer).collect::<Result<_>>()?,
            done: (0..parts.num_groups()).map(|_| Event::new(&device)).collect::<Result<_>>()?,
            ready: Event::new(&device)?,
            released: Event::new(&device)?,
            chunks,
            hashes,
            workspace: parts,
            start: workspace,
            queue: Mutex::new(0),
            device: device.clone(),
            layout,
            addresses: addresses.to_vec(),
        };
        let table = Span::table(&copier.layout, addresses);
        // SAFETY: by the caller's promise; the workspace has room for the table, and the copier's streams wait for
        // this.
        unsafe {
            Launcher::of(device.clone(), stream).upload_spans(&table, workspace + parts.spans_at() as u64)?;
            copier.follow(stream)?;
            copier.ready.before(copier.copy.raw())?;
        }
        Ok(copier)
    }

    /// Returns the layout of the chunks.
    pub fn layout(&self) -> &ChunkLayout {
        &self.layout
    }

    /// Returns `[num_chunks, chunk_bytes]` bytes on the host; fewer chunks with [`HostMemory::Slots`]. A chunk may
    /// change until [`ChunkCopier::is_done`].
    pub fn chunks(&self) -> *mut u8 {
        self.chunks.as_ptr()
    }

    /// Number of bytes at [`ChunkCopier::chunks`].
    pub fn host_bytes(&self) -> usize {
        self.chunks.len()
    }

    /// Returns `[num_chunks, chunk_bytes / 4096]` int64 on the host, as for [`ChunkCopier::chunks`]; none with
    /// [`HostMemory::Slots`].
    pub fn hashes(&self) -> *mut i64 {
        self.hashes.as_ptr().cast()
    }

    /// Number of hashes at [`ChunkCopier::hashes`].
    pub fn num_hashes(&self) -> usize {
        self.workspace.host_hashes()
    }

    /// Returns `[num_chunks]` int64 on the host: wrong blocks of each restored chunk, as for [`ChunkCopier::chunks`].
    pub fn wrong(&self) -> *mut i64 {
        self.hashes().wrapping_add(self.num_hashes())
    }

    /// Starts to copy chunks to the host, in the state of the tensors after all work queued on `stream` so far. Returns
    /// immediately.
    ///
    /// # Safety
    /// `stream` must be a live stream of the device, or null. Later writes of the tensors must come after
    /// [`ChunkCopier::release`]. These chunks must not be used on the host until they are done.
    ///
    /// # Errors
    /// For a range beyond the chunks, a stream that is being captured into a graph, and errors of the driver.
    pub unsafe fn save(&self, stream: *mut c_void, chunks: Range<usize>) -> Result<()> {
        // SAFETY: by the caller's promise and that of `new`.
        unsafe { self.transfer(Some(stream), chunks, |buffer, group| self.save_group(buffer, group, None)) }
    }

    /// Starts to copy more chunks to the host, in the state of the tensors at the last [`ChunkCopier::save`], which may
    /// have been of no chunks. Later work on torch's stream is not waited for. Returns immediately.
    ///
    /// # Safety
    /// As [`ChunkCopier::save`]; the tensors must not have been written since.
    ///
    /// # Errors
    /// As [`ChunkCopier::save`].
    pub unsafe fn save_more(&self, chunks: Range<usize>) -> Result<()> {
        // SAFETY: by the caller's promise and that of `new`.
        unsafe { self.transfer(None, chunks, |buffer, group| self.save_group(buffer, group, None)) }
    }

    /// As [`ChunkCopier::save_more`], but each tensor's bytes are copied to its place, relative to `start`, and not to
    /// the chunks.
    ///
    /// # Safety
    /// As [`ChunkCopier::save_more`]. The host must have memory for the tensors at these places, which nothing uses
    /// until the copy is done; page-locked if this should return immediately.
    ///
    /// # Errors
    /// As [`ChunkCopier::save`].
    pub(super) unsafe fn save_more_to(
        &self,
        chunks: Range<usize>,
        start: *mut u8,
        places: &[usize],
    ) -> Result<()> {
        debug_assert_eq!(places.len(), self.layout.sizes().len());
        // SAFETY: by the caller's promise and that of `new`.
        unsafe {
            self.transfer(None, chunks, |buffer, group| self.save_group(buffer, group, Some((start, places))))
        }
    }

    /// Starts to copy chunks from the host into the tensors, after all work queued on `stream` so far. Blocks with a
    /// wrong hash are counted and not written. Returns immediately.
    ///
    /// # Safety
    /// As [`ChunkCopier::save`]; later uses of the tensors must come after [`ChunkCopier::release`].
    ///
    /// # Errors
    /// As [`ChunkCopier::save`]; also for memory that transfers use in turn.
    pub unsafe fn restore(&self, stream: *mut c_void, chunks: Range<usize>) -> Result<()> {
        ensure!(!self.workspace.is_in_turn, "restore: expected all chunks on the host, got room for a few");
        // SAFETY: by the caller's promise and that of `new`.
        unsafe { self.transfer(Some(stream), chunks, |buffer, group| self.restore_group(buffer, group)) }
    }

    /// Makes later work on `stream` wait until started transfers no longer use the tensors. Returns immediately.
    ///
    /// # Safety
    /// `stream` must be a live stream of the device, or null.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn release(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.released.before(stream) }
    }

    /// Starts to compute the digests of the units that the tensors make up, except for short ones, in the state of the
    /// tensors at the last [`ChunkCopier::save`]. Returns their number immediately.
    ///
    /// # Safety
    /// As [`ChunkCopier::save_more`]. The previous digests must have been waited for.
    ///
    /// # Errors
    /// For counts that do not add up to the tensors, and errors of the driver.
    pub(super) unsafe fn start_digests(&self, tensors_per_unit: &[usize]) -> Result<usize> {
        let num_tensors = self.addresses.len();
        let count = tensors_per_unit.iter().fold(0, |sum: usize, &count| sum.saturating_add(count));
        ensure!(count == num_tensors, "tensors_per_unit: expected to add up to {num_tensors}, got {count}");
        let (spans, ends) = Span::units(self.layout.sizes(), &self.addresses, tensors_per_unit);
        let words = self.workspace.words_of_units();
        let spans_on_host = self.units().cast::<Span>();
        let ends_at = self.workspace.num_spans * size_of::<Span>();
        let at = self.start + self.workspace.units_at() as u64;
        let digests = at + (words * WORD) as u64;
        let launcher = self.digest.launcher();
        // SAFETY: the host's memory and the device's have room for the spans and ends of all tensors, and nothing uses
        // them now, by the caller's promise. The stream waits until the tensors are in their state.
        unsafe {
            spans_on_host.copy_from_nonoverlapping(spans.as_ptr(), spans.len());
            let ends_on_host = self.units().byte_add(ends_at);
            ends_on_host.copy_from_nonoverlapping(ends.as_ptr(), ends.len());
            self.ready.before(self.digest.raw())?;
            launcher.copy_from_host(self.units().cast(), at, words * WORD)?;
            launcher.digest_units(at, at + ends_at as u64, ends.len(), digests, UNITS_AT_ONCE)?;
            launcher.copy_to_host(digests, self.units().add(words).cast(), ends.len() * WORD)?;
        }
        Ok(ends.len())
    }

    /// Waits for the digests that were started, and returns as many.
    ///
    /// # Errors
    /// Errors on the device.
    pub(super) fn wait_digests(&self, count: usize) -> Result<Vec<u64>> {
        self.digest.wait()?;
        // SAFETY: `start_digests` has started to copy as many to this place, which nothing writes now.
        Ok(unsafe { std::slice::from_raw_parts(self.units().add(self.workspace.words_of_units()), count) }
            .to_vec())
    }

    /// The tables of units on the host.
    fn units(&self) -> *mut u64 {
        self.wrong().wrapping_add(self.workspace.num_chunks).cast()
    }

    /// Blocks the calling thread until no started copy uses the tensors or the host's memory, even after an error.
    ///
    /// # Errors
    /// Errors on the device.
    pub(super) fn finish(&self) -> Result<()> {
        let (packed, digested) = (self.pack.wait(), self.digest.wait());
        packed.and(digested).and(self.copy.wait())
    }

    /// Number of chunks of a transfer.
    pub(super) fn chunks_at_once(&self) -> usize {
        self.workspace.staging_chunks
    }

    /// Number of transfers that a reader may be ahead: the one that it reads, and those in flight.
    pub(super) fn num_ahead(&self) -> usize {
        self.workspace.num_slots.min(self.workspace.num_staging + 1)
    }

    /// Whether all copies that were started for these chunks are over, so that the host may use them. (Small chunks
    /// that share a transfer are done together.)
    ///
    /// # Errors
    /// For a range beyond the chunks, and errors on the device.
    pub fn is_done(&self, chunks: Range<usize>) -> Result<bool> {
        for event in self.events_of(chunks)? {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Blocks the calling thread until [`ChunkCopier::is_done`].
    ///
    /// # Errors
    /// As [`ChunkCopier::is_done`].
    pub fn wait(&self, chunks: Range<usize>) -> Result<()> {
        self.events_of(chunks)?.iter().try_for_each(Event::wait)
    }

    /// Events of all chunks: ranges may have been started in any order, so the last chunk need not be done last.
    fn events_of(&self, chunks: Range<usize>) -> Result<&[Event]> {
        self.check_range(&chunks)?;
        let staging_chunks = self.workspace.staging_chunks;
        let end = if chunks.is_empty() {
            chunks.start / staging_chunks
        } else {
            chunks.end.div_ceil(staging_chunks)
        };
        Ok(&self.done[(chunks.start / staging_chunks).min(end)..end])
    }

    fn check_range(&self, chunks: &Range<usize>) -> Result<()> {
        let num_chunks = self.workspace.num_chunks;
        ensure!(
            chunks.start <= chunks.end && chunks.end <= num_chunks,
            "chunks: expected a range within 0..{num_chunks}, got {chunks:?}"
        );
        Ok(())
    }

    /// Makes the copier's streams wait for all work queued on `stream` so far.
    unsafe fn follow(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: by the callers' promises; the copier's own streams live.
        unsafe {
            // The copier's work would become part of the graph.
            let is_captured = Launcher::of(self.device.clone(), stream).is_capturing()?;
            ensure!(!is_captured, "chunks: expected a stream that is not being captured into a CUDA graph");
            self.ready.record(stream)?;
            self.ready.before(self.pack.raw())
        }
    }

    unsafe fn transfer(
        &self,
        stream: Option<*mut c_void>,
        chunks: Range<usize>,
        group: impl Fn(&StagingBuffer, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        self.check_range(&chunks)?;
        let staging_chunks = self.workspace.staging_chunks;
        let mut next = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let _current = self.device.make_current()?;
        if let Some(stream) = stream {
            // SAFETY: by the caller's promise.
            unsafe { self.follow(stream)? };
        }
        let mut groups = || -> Result<()> {
            let mut first = chunks.start;
            while first < chunks.end {
                let end = ((first / staging_chunks + 1) * staging_chunks).min(chunks.end);
                group(&self.staging[*next], first..end)?;
                *next = (*next + 1) % self.staging.len();
                first = end;
            }
            Ok(())
        };
        let started = groups();
        // Even after an error: some groups may be in flight and use the tensors.
        // SAFETY: a live stream.
        let recorded = unsafe { self.released.record(self.pack.raw()) };
        started.and(recorded)
    }

    /// Copies a group to the chunks, or to the tensors' places relative to a start.
    unsafe fn save_group(
        &self,
        buffer: &StagingBuffer,
        chunks: Range<usize>,
        to: Option<(*mut u8, &[usize])>,
    ) -> Result<()> {
        let range = self.range(buffer, &chunks);
        let (pack, copy) = (self.pack.launcher(), self.copy.launcher());
        let host = self.host(&chunks);
        // SAFETY: the range lies in the buffer and on the host (`range`, `host`), which the events reserve for this
        // group. So do the runs, and the host has memory at their places by the caller's promise.
        unsafe {
            buffer.free.before(self.pack.raw())?;
            pack.pack_chunks(&range)?;
            buffer.full.record(self.pack.raw())?;
            buffer.full.before(self.copy.raw())?;
            if let Some((start, places)) = to {
                let part = range.first_byte..range.first_byte + range.num_blocks * BLOCK_BYTES;
                for run in host_runs::runs(&self.layout, places, &part) {
                    let from = range.chunks + (run.from - part.start) as u64;
                    copy.copy_to_host(from, start.wrapping_add(run.to), run.bytes)?;
                }
            } else {
                copy.copy_to_host(range.chunks, host.chunks, range.num_blocks * BLOCK_BYTES)?;
            }
            if self.num_hashes() > 0 {
                copy.copy_to_host(range.hashes, host.hashes.cast(), range.num_blocks * WORD)?;
            }
            buffer.free.record(self.copy.raw())?;
            self.done[chunks.start / self.workspace.staging_chunks].record(self.copy.raw())
        }
    }

    unsafe fn restore_group(&self, buffer: &StagingBuffer, chunks: Range<usize>) -> Result<()> {
        let range = self.range(buffer, &chunks);
        let (pack, copy) = (self.pack.launcher(), self.copy.launcher());
        let host = self.host(&chunks);
        let wrong = self.start + (self.workspace.wrong_at() + chunks.start * WORD) as u64;
        // SAFETY: as in `save_group`.
        unsafe {
            buffer.free.before(self.copy.raw())?;
            copy.copy_from_host(host.chunks, range.chunks, range.num_blocks * BLOCK_BYTES)?;
            copy.copy_from_host(host.hashes.cast(), range.hashes, range.num_blocks * WORD)?;
            buffer.full.record(self.copy.raw())?;
            buffer.full.before(self.pack.raw())?;
            pack.clear_wrong(wrong, chunks.len())?;
            pack.unpack_chunks(&range, wrong, self.workspace.hashes_of_chunk())?;
            buffer.free.record(self.pack.raw())?;
            pack.copy_to_host(wrong, self.wrong().add(chunks.start).cast(), chunks.len() * WORD)?;
            self.done[chunks.start / self.workspace.staging_chunks].record(self.pack.raw())
        }
    }

    /// The group's part of the stream, in a buffer.
    fn range(&self, buffer: &StagingBuffer, chunks: &Range<usize>) -> ChunkRange {
        let Workspace { chunk_bytes, staging_chunks, num_spans, .. } = self.workspace;
        ChunkRange {
            spans: self.start + self.workspace.spans_at() as u64,
            num_spans,
            first_byte: chunks.start * chunk_bytes,
            num_blocks: chunks.len() * self.workspace.hashes_of_chunk(),
            chunks: buffer.at,
            hashes: buffer.at + (staging_chunks * chunk_bytes) as u64,
        }
    }

    /// Offset of a chunk on the host, from [`ChunkCopier::chunks`].
    pub(super) fn place(&self, chunk: usize) -> usize {
        let Workspace { chunk_bytes, staging_chunks, num_slots, .. } = self.workspace;
        let slot = chunk / staging_chunks % num_slots.max(1);
        (slot * staging_chunks + chunk % staging_chunks) * chunk_bytes
    }

    fn host(&self, chunks: &Range<usize>) -> Host {
        Host {
            chunks: self.chunks().wrapping_add(self.place(chunks.start)),
            hashes: self.hashes().wrapping_add(chunks.start * self.workspace.hashes_of_chunk()),
        }
    }
}

/// A group on the host.
struct Host {
    chunks: *mut u8,
    hashes: *mut i64,
}
