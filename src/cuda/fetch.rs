//! A copier's tensors to the host bit by bit, as far as a reader wants them, some transfers ahead of it.
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

/// Brings the bytes of a copier's tensors to its chunks, or to places of the caller's, in their order, for a reader that runs
/// concurrently with training. When it is dropped nothing is on its way any more.
#[derive(Debug)]
pub struct Fetcher {
    copier: Arc<ChunkCopier>,
    /// Bytes of the tensors up to the end of each.
    ends: Vec<usize>,
    /// Of each tensor, where not to the copier's chunks.
    places: Option<Vec<usize>>,
    started_chunks: usize,
    arrived_chunks: usize,
}

impl Fetcher {
    /// The tensors as they are when `stream` has done what it has been given so far. Returns at once.
    ///
    /// # Safety
    /// `stream` is a live stream of the device, or null. Until all is fetched, or this is dropped, no other code writes the
    /// tensors or uses the copier for anything else.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn new(copier: Arc<ChunkCopier>, stream: *mut c_void) -> Result<Self> {
        // SAFETY: by the caller's promise; no chunk is written yet.
        unsafe { copier.save(stream, 0..0)? };
        let mut end = 0;
        let sizes = copier.layout().sizes().iter();
        let ends = sizes.map(|bytes| {
            end += bytes;
            end
        });
        Ok(Self { ends: ends.collect(), copier, places: None, started_chunks: 0, arrived_chunks: 0 })
    }

    /// Runs of each tensor's copy on the host: address and bytes. They are there when [`Fetcher::fetch`] says so.
    pub fn copies(&self) -> Vec<Vec<(usize, usize)>> {
        let (start, layout) = (self.copier.chunks().expose_provenance(), self.copier.layout());
        let mut copies = vec![vec![]; layout.sizes().len()];
        for piece in layout.pieces() {
            let at = start + self.copier.place(piece.chunk) + piece.chunk_offset;
            copies[piece.tensor].push((at, piece.bytes));
        }
        copies
    }

    /// The tensors go to these places from now on, counted from the start that [`Fetcher::fetch_to`] gets.
    ///
    /// # Errors
    /// Not as many places as tensors.
    pub fn with_places(mut self, places: Vec<usize>) -> Result<Self> {
        let num_tensors = self.ends.len();
        ensure!(places.len() == num_tensors, "places: expected {num_tensors}, got {}", places.len());
        self.places = Some(places);
        Ok(self)
    }

    /// Waits for the next transfer, and starts those that have room on the host behind it: what came before has been
    /// read. Returns how many bytes of the tensors are there, from the first on; all of them in the end.
    ///
    /// When it returns with an error, the device uses no tensor and no memory of the host for it.
    ///
    /// # Errors
    /// With places, or the driver's.
    pub fn fetch(&mut self) -> Result<usize> {
        ensure!(self.places.is_none(), "fetch: expected a start for the tensors' places");
        // SAFETY: nothing goes to the start.
        unsafe { self.fetch_to(std::ptr::null_mut()) }
    }

    /// As [`Fetcher::fetch`], to the tensors' places, if they have some.
    ///
    /// # Safety
    /// From `start` on, the same each time, there is memory at the places of the tensors, which nobody uses until it has been
    /// fetched or this is dropped. Where it is not page-locked nothing runs ahead.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn fetch_to(&mut self, start: *mut u8) -> Result<usize> {
        // SAFETY: by the caller's promise.
        let fetched = unsafe { self.next_transfer(start) };
        if fetched.is_err() {
            // What came before the error may be on its way.
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
        // SAFETY: by the promises of `new` and the caller; the host has read what was where these come.
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

    /// Bytes of the tensors that are in the first chunks. Tensors of 10 and 20 bytes start at 0 and 16 of the chunks, so
    /// that up to byte 18 there are 12.
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
    /// Waits for what was started: the tensors and the memory on the host may be used for other things after this.
    fn drop(&mut self) {
        if self.arrived_chunks < self.started_chunks {
            let _ = self.copier.finish();
        }
    }
}
