//! Incremental copy of a copier's tensors to the host, as far as a reader needs them, some transfers ahead of it.
//!
//! ```text
//! device   transfer 0  transfer 1  transfer 2 ····· transfer 3 ····· transfer 4
//! reader               reads 0 ─────────────► reads 1 ─────────────► reads 2      (2 are on their way meanwhile)
//! ```

use super::copier::ChunkCopier;
use crate::ensure;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

/// Copies the bytes of a copier's tensors to its chunks, or to places of the caller's, in order, for a reader that runs
/// concurrently with training. When it is dropped, no copy is in flight any more.
#[derive(Debug)]
pub struct Fetcher {
    copier: Arc<ChunkCopier>,
    /// Total bytes of the tensors up to the end of each.
    ends: Vec<usize>,
    /// Places of the tensors, if they are not copied to the copier's chunks.
    places: Option<Vec<usize>>,
    started_chunks: usize,
    arrived_chunks: usize,
    has_digests: bool,
}

impl Fetcher {
    /// Creates a fetcher of the tensors in their state after all work queued on `stream` so far. Returns immediately.
    ///
    /// # Safety
    /// `stream` must be a live stream of the device, or null. Until all is fetched, or this is dropped, no other code
    /// may write the tensors or use the copier for anything else.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn new(copier: Arc<ChunkCopier>, stream: *mut c_void) -> Result<Self> {
        // SAFETY: by the caller's promise; no chunk is written yet.
        unsafe { copier.save(stream, 0..0)? };
        let mut end = 0;
        let sizes = copier.layout().sizes().iter();
        let ends = sizes.map(|bytes| {
            end += bytes;
            end
        });
        Ok(Self {
            ends: ends.collect(),
            copier,
            places: None,
            started_chunks: 0,
            arrived_chunks: 0,
            has_digests: false,
        })
    }

    /// Runs of each tensor's copy on the host: address and bytes. [`Fetcher::fetch`] returns how many are readable.
    pub fn copies(&self) -> Vec<Vec<(usize, usize)>> {
        let (start, layout) = (self.copier.chunks().expose_provenance(), self.copier.layout());
        let mut copies = vec![vec![]; layout.sizes().len()];
        for piece in layout.pieces() {
            let at = start + self.copier.place(piece.chunk) + piece.chunk_offset;
            copies[piece.tensor].push((at, piece.bytes));
        }
        copies
    }

    /// Makes the tensors go to these places, relative to the start that is passed to [`Fetcher::fetch_to`].
    ///
    /// # Errors
    /// If there is not one place per tensor.
    pub fn with_places(mut self, places: Vec<usize>) -> Result<Self> {
        let num_tensors = self.ends.len();
        ensure!(places.len() == num_tensors, "places: expected {num_tensors}, got {}", places.len());
        self.places = Some(places);
        Ok(self)
    }

    /// Starts to compute on the device the digests of units, each of some of the tensors in order. Returns a function that
    /// waits for those of units of more than [`MAX_SHORT_BYTES`](crate::cpu::MAX_SHORT_BYTES). What arrives on the host
    /// with another digest was damaged on its way.
    ///
    /// # Errors
    /// For counts that do not add up to the tensors, and errors of the driver.
    pub fn digests(
        &mut self,
        tensors_per_unit: &[usize],
    ) -> Result<impl FnOnce() -> Result<Vec<u64>> + Send + use<>> {
        self.has_digests = true;
        // SAFETY: by the promise of `new`, nothing writes the tensors or uses the copier; `drop` waits for the device.
        let count = unsafe { self.copier.start_digests(tensors_per_unit)? };
        let copier = self.copier.clone();
        Ok(move || copier.wait_digests(count))
    }

    /// Waits for the next transfer, and starts further ones that have room on the host: earlier bytes have been read.
    /// Returns the number of bytes of the tensors, from the first on, that are readable; in the end all.
    ///
    /// When it returns an error, the device uses none of the tensors and none of the host's memory for them.
    ///
    /// # Errors
    /// With places, and errors of the driver.
    pub fn fetch(&mut self) -> Result<usize> {
        ensure!(self.places.is_none(), "fetch: expected a start for the tensors' places");
        // SAFETY: nothing is copied to the start.
        unsafe { self.fetch_to(std::ptr::null_mut()) }
    }

    /// As [`Fetcher::fetch`], to the tensors' places, if they have any.
    ///
    /// # Safety
    /// From `start` on, the same in each call, there must be memory at the places of the tensors that nothing uses
    /// until it has been fetched or this is dropped. If it is not page-locked, no transfer runs ahead.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn fetch_to(&mut self, start: *mut u8) -> Result<usize> {
        // SAFETY: by the caller's promise.
        let fetched = unsafe { self.next_transfer(start) };
        if fetched.is_err() {
            // Transfers before the error may be in flight.
            let _ = self.copier.finish();
        }
        fetched
    }

    unsafe fn next_transfer(&mut self, start: *mut u8) -> Result<usize> {
        let (num_chunks, at_once) = (self.copier.layout().num_chunks(), self.copier.chunks_at_once());
        let arriving = self.arrived_chunks..(self.arrived_chunks + at_once).min(num_chunks);
        let room = (self.arrived_chunks + at_once * self.copier.num_ahead()).min(num_chunks);
        let starting = self.started_chunks..room;
        self.started_chunks = room;
        // SAFETY: by the promises of `new` and the caller; the host has read the previous contents of these slots.
        unsafe {
            match &self.places {
                Some(places) => self.copier.save_more_to(starting, start, places)?,
                None => self.copier.save_more(starting)?,
            }
        }
        self.copier.wait(arriving.clone())?;
        self.arrived_chunks = arriving.end;
        Ok(self.bytes_before(arriving.end))
    }

    /// Number of bytes of the tensors in the first `chunk` chunks. Tensors of 10 and 20 bytes start at 0 and 16 of the
    /// chunks, so up to byte 18 there are 12.
    fn bytes_before(&self, chunk: usize) -> usize {
        let layout = self.copier.layout();
        let end = chunk * layout.chunk_bytes();
        let Some(last) = layout.starts().partition_point(|&start| start < end).checked_sub(1) else {
            return 0;
        };
        self.ends[last] - (layout.starts()[last] + layout.sizes()[last]).saturating_sub(end)
    }
}

impl Drop for Fetcher {
    /// Waits for started transfers: afterwards the tensors and the memory on the host may be used for other things.
    fn drop(&mut self) {
        if self.arrived_chunks < self.started_chunks || self.has_digests {
            let _ = self.copier.finish();
        }
    }
}
