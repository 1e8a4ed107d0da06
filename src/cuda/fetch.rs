//! A copier's tensors to the host bit by bit, as far as a reader wants them.

use super::copier::ChunkCopier;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

/// Brings the bytes of a copier's tensors to its chunks, in their order, for a reader that runs concurrently with
/// training.
#[derive(Debug)]
pub struct Fetcher {
    copier: Arc<ChunkCopier>,
    /// Bytes of the tensors up to the end of each.
    ends: Vec<usize>,
    saved_chunks: usize,
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
        Ok(Self { ends: ends.collect(), copier, saved_chunks: 0 })
    }

    /// Address on the host and bytes of each tensor's copy.
    pub fn copies(&self) -> Vec<(usize, usize)> {
        let (start, layout) = (self.copier.chunks().expose_provenance(), self.copier.layout());
        layout.starts().iter().zip(layout.sizes()).map(|(at, &bytes)| (start + at, bytes)).collect()
    }

    /// Brings at least the first `bytes` bytes of the tensors to the host, and waits for it. When it returns, also with
    /// an error, the device reads no tensor for it.
    ///
    /// # Errors
    /// The driver's.
    pub fn fetch(&mut self, bytes: usize) -> Result<()> {
        let chunks = self.saved_chunks..self.chunks_of(bytes);
        if chunks.is_empty() {
            return Ok(());
        }
        self.saved_chunks = chunks.end;
        // SAFETY: by the promise of `new`.
        let started = unsafe { self.copier.save_more(chunks.clone()) };
        if let Err(error) = started {
            // What came before the error is on its way, and reads the tensors.
            let _ = self.copier.wait_for_release();
            return Err(error);
        }
        self.copier.wait(chunks)
    }

    /// Chunks that hold the first bytes of the tensors. Tensors of 10 and 20 bytes start at 0 and 16 of the chunks, so
    /// that 12 bytes reach up to byte 18.
    fn chunks_of(&self, bytes: usize) -> usize {
        let layout = self.copier.layout();
        let tensor = self.ends.partition_point(|&end| end < bytes);
        let end = match self.ends.get(tensor) {
            Some(end) if bytes > 0 => layout.starts()[tensor] + layout.sizes()[tensor] - (end - bytes),
            Some(_) => 0,
            None => return layout.num_chunks(),
        };
        end.div_ceil(layout.chunk_bytes())
    }
}
