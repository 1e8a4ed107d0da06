//! The ops between tensors and chunks: checks, and the calls to the CPU's or the GPU's copies.

use super::checks::{check_device, check_disjoint, on_cuda};
use super::library::TorchPool;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu::{self, BLOCK_BYTES, ChunkLayout};
use crate::ensure;
use crate::error::{Error, Result};

/// Copies tensors into chunks, from `first_chunk` on, and hashes each block of 4096 bytes.
pub(super) fn pack_chunks(
    tensors: Vec<Tensor>,
    first_chunk: i64,
    mut chunks: Tensor,
    mut hashes: Tensor,
) -> Result<()> {
    let (layout, first) = check_layout(&tensors, first_chunk, &chunks, &hashes)?;
    let inputs: Vec<_> = tensors.iter().map(|tensor| ("tensors", tensor)).collect();
    check_disjoint("chunks", &chunks, &inputs)?;
    check_disjoint("hashes", &hashes, &inputs)?;
    check_disjoint("hashes", &hashes, &[("chunks", &chunks)])?;
    chunks.bump_version()?;
    hashes.bump_version()?;
    if chunks.device() != Device::Cpu {
        return on_cuda!(pack_chunks(&layout, first, &tensors, &chunks, &hashes));
    }
    let tensors = tensors.iter().map(Tensor::bytes).collect::<Result<Vec<_>>>()?;
    cpu::pack_chunks(&layout, first, &tensors, chunks.bytes_mut()?, hashes.slice_mut()?, &TorchPool)
}

/// Copies chunks back, except for blocks whose hash is not the given one, which are counted for each chunk.
pub(super) fn unpack_chunks(
    chunks: Tensor,
    hashes: Tensor,
    first_chunk: i64,
    mut tensors: Vec<Tensor>,
    mut wrong: Tensor,
) -> Result<()> {
    let (layout, first) = check_layout(&tensors, first_chunk, &chunks, &hashes)?;
    check_is("wrong", &wrong, Dtype::Int64, &chunks.sizes()[..1], &chunks)?;
    let inputs = [("chunks", &chunks), ("hashes", &hashes)];
    check_disjoint("wrong", &wrong, &inputs)?;
    for tensor in &tensors {
        check_disjoint("tensors", tensor, &inputs)?;
        check_disjoint("tensors", tensor, &[("wrong", &wrong)])?;
    }
    check_apart(&tensors)?;
    wrong.bump_version()?;
    for tensor in &tensors {
        tensor.bump_version()?;
    }
    if chunks.device() != Device::Cpu {
        return on_cuda!(unpack_chunks(&layout, first, &chunks, &hashes, &tensors, &wrong));
    }
    let mut tensors = tensors.iter_mut().map(Tensor::bytes_mut).collect::<Result<Vec<_>>>()?;
    let (chunks, hashes) = (chunks.bytes()?, hashes.slice()?);
    cpu::unpack_chunks(&layout, first, chunks, hashes, &mut tensors, wrong.slice_mut()?, &TorchPool)
}

/// Hashes each block of 4096 bytes.
pub(super) fn hash_blocks(chunks: Tensor, mut hashes: Tensor) -> Result<()> {
    check_chunks(&chunks, &hashes)?;
    check_disjoint("hashes", &hashes, &[("chunks", &chunks)])?;
    hashes.bump_version()?;
    if chunks.device() != Device::Cpu {
        return on_cuda!(hash_blocks(&chunks, &hashes));
    }
    cpu::hash_blocks(chunks.bytes()?, hashes.slice_mut()?, &TorchPool)
}

/// Returns the layout of the tensors, which must contain the chunks, and the first chunk.
fn check_layout(
    tensors: &[Tensor],
    first_chunk: i64,
    chunks: &Tensor,
    hashes: &Tensor,
) -> Result<(ChunkLayout, usize)> {
    let [num_chunks, chunk_bytes] = check_chunks(chunks, hashes)?;
    for (index, tensor) in tensors.iter().enumerate() {
        let name = format!("tensors[{index}]");
        check_device(&name, tensor, chunks)?;
        ensure!(tensor.is_contiguous(), "{name}: expected a contiguous tensor");
    }
    let sizes: Vec<usize> = tensors.iter().map(Tensor::num_bytes).collect();
    let layout = ChunkLayout::new(&sizes, chunk_bytes)?;
    let all = layout.num_chunks();
    let first = usize::try_from(first_chunk).ok().filter(|&first| first <= all && num_chunks <= all - first);
    let Some(first) = first else {
        return Err(Error::invalid(format!(
            "chunks: these tensors take {all} chunks of {chunk_bytes} bytes, expected a part of them, got {num_chunks} \
             from {first_chunk} on"
        )));
    };
    Ok((layout, first))
}

/// Returns the number of chunks, and the bytes of one.
fn check_chunks(chunks: &Tensor, hashes: &Tensor) -> Result<[usize; 2]> {
    let sizes = chunks.sizes();
    let shaped = sizes.len() == 2 && sizes[1] > 0 && (sizes[1] as usize).is_multiple_of(BLOCK_BYTES);
    ensure!(
        shaped && chunks.dtype() == Dtype::Uint8 && chunks.is_contiguous(),
        "chunks: expected contiguous uint8 of shape [C, a multiple of {BLOCK_BYTES}], got {} of shape {sizes:?}",
        chunks.dtype()
    );
    ensure!(
        chunks.address().addr().is_multiple_of(16),
        "chunks: expected memory aligned to 16 bytes, as torch.empty gives"
    );
    let expected = [sizes[0], sizes[1] / BLOCK_BYTES as i64];
    check_is("hashes", hashes, Dtype::Int64, &expected, chunks)?;
    Ok([sizes[0] as usize, sizes[1] as usize])
}

fn check_is(name: &str, tensor: &Tensor, dtype: Dtype, sizes: &[i64], like: &Tensor) -> Result<()> {
    ensure!(
        tensor.dtype() == dtype && tensor.sizes() == sizes && tensor.is_contiguous(),
        "{name}: expected contiguous {dtype} of shape {sizes:?}, got {} of shape {:?}",
        tensor.dtype(),
        tensor.sizes()
    );
    check_device(name, tensor, like)
}

/// Checks that no two tensors share a byte.
fn check_apart(tensors: &[Tensor]) -> Result<()> {
    let mut ranges: Vec<_> = tensors.iter().map(Tensor::address_range).enumerate().collect();
    ranges.retain(|(_, range)| !range.is_empty());
    ranges.sort_by_key(|(_, range)| range.start);
    for pair in ranges.windows(2) {
        let ([first, second], [one, other]) = ([&pair[0].1, &pair[1].1], [pair[0].0, pair[1].0]);
        ensure!(
            first.end <= second.start,
            "tensors: expected memory of their own, got tensors {one} and {other} that overlap"
        );
    }
    Ok(())
}
