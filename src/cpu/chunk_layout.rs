//! Layout of the bytes of many tensors in a stream of chunks of one size.

use crate::ensure;
use crate::error::Result;

/// Bytes that share a hash; a chunk has an integer number of blocks.
pub const BLOCK_BYTES: usize = 4096;
/// Alignment of tensors.
const ALIGNMENT: usize = 16;

/// A run of bytes of one tensor in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Index of the tensor.
    pub tensor: usize,
    /// First byte in the tensor.
    pub tensor_offset: usize,
    /// Index of the chunk.
    pub chunk: usize,
    /// First byte in the chunk.
    pub chunk_offset: usize,
    /// Length, above 0.
    pub bytes: usize,
}

/// Layout of consecutive tensors, each at the next multiple of 16 bytes, in chunks; gaps and the end are zero.
///
/// Example: tensors of 4090, 0 and 10 bytes, chunks of 4096. Tensor 0 starts at byte 0 of the stream, the others at 4096
/// (4090 rounded up). Pieces: tensor 0 = bytes 0..4090 of chunk 0; tensor 1 has none; tensor 2 = bytes 0..10 of chunk 1.
///
/// ```
/// use evermoe::cpu::ChunkLayout;
/// let layout = ChunkLayout::new(&[4090, 0, 10], 4096).unwrap();
/// assert_eq!((layout.num_chunks(), layout.starts()), (2, &[0, 4096, 4096][..]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkLayout {
    sizes: Vec<usize>,
    starts: Vec<usize>,
    end: usize,
    chunk_bytes: usize,
}

impl ChunkLayout {
    /// Creates the layout of tensors of these sizes in bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if `chunk_bytes` is not a positive multiple of [`BLOCK_BYTES`],
    /// or if the bytes exceed the address space.
    pub fn new(sizes: &[usize], chunk_bytes: usize) -> Result<Self> {
        ensure!(
            chunk_bytes > 0 && chunk_bytes.is_multiple_of(BLOCK_BYTES),
            "chunk_bytes: expected a multiple of {BLOCK_BYTES} above 0, got {chunk_bytes}"
        );
        let mut starts = Vec::with_capacity(sizes.len());
        let mut end = 0_usize;
        for (index, &bytes) in sizes.iter().enumerate() {
            starts.push(end);
            let next = end.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
            // Leaves room for rounding up to full chunks.
            let next = next
                .filter(|next| next.checked_add(chunk_bytes).is_some_and(|all| all <= isize::MAX as usize));
            let Some(next) = next else {
                return Err(crate::error::Error::invalid(format!(
                    "sizes: expected tensors that fit into memory, got {bytes} bytes for tensor {index}"
                )));
            };
            end = next;
        }
        Ok(Self { sizes: sizes.to_vec(), starts, end, chunk_bytes })
    }

    /// Number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.end.div_ceil(self.chunk_bytes)
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// First byte of each tensor in the stream of chunks.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Bytes of each tensor.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Iterates over the pieces, in the order of the stream.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        self.starts.iter().zip(&self.sizes).enumerate().flat_map(move |(tensor, (&start, &size))| {
            let first = start / self.chunk_bytes;
            (first..(start + size).div_ceil(self.chunk_bytes)).filter_map(move |chunk| {
                let chunk_start = chunk * self.chunk_bytes;
                let from = start.max(chunk_start);
                let to = (start + size).min(chunk_start + self.chunk_bytes);
                (from < to).then(|| Piece {
                    tensor,
                    tensor_offset: from - start,
                    chunk,
                    chunk_offset: from - chunk_start,
                    bytes: to - from,
                })
            })
        })
    }
}
