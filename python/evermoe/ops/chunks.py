"""Scattered tensors <-> chunks of a fixed size with a checksum of each.

What lies where in a chunk: `evermoe.copies.snapshot.chunked_copy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evermoe import _native
from evermoe.ops._load import torch_ops

BLOCK_BYTES = 4096
"""Bytes of a block: each has a hash of its own."""
ALIGNMENT = 16
"""Each tensor starts at a multiple of this."""


def num_chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> int:
    """Count the chunks that tensors take.

    Example: tensors of 4090 and 10 bytes, chunks of 4096: 2, as the second one starts at byte 4096.

    Raises:
        ValueError: `chunk_bytes` is not a multiple of 4096 above 0.
    """
    if chunk_bytes <= 0 or chunk_bytes % BLOCK_BYTES:
        raise ValueError(f"chunk_bytes: expected a multiple of {BLOCK_BYTES} above 0, got {chunk_bytes}")
    return -(-sum(-(-tensor.nbytes // ALIGNMENT) for tensor in tensors) * ALIGNMENT // chunk_bytes)


def open_copier(
    tensors: Sequence[Tensor],
    chunk_bytes: int,
    staging: int,
    *,
    host: Tensor | None = None,
    for_captures: bool = False,
) -> _native.ChunkCopier:
    """Make a copier of CUDA tensors, of one device and contiguous, with memory on the device from torch.

    Args:
        tensors: which it keeps; without overlaps, unless they are only read.
        chunk_bytes: a multiple of 4096.
        staging: transfers that may be on their way at once.
        host: as for `evermoe.copies.snapshot.chunked_copy.ChunkedCopy`.
        for_captures: with memory on the host for `staging` + 1 transfers alone, which they use in turn.

    Raises:
        RuntimeError: too little memory on the device, or page-locked memory on the host.
    """
    device = tensors[0].device
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    needed = _native.ChunkCopier.workspace_bytes([nbytes for _, nbytes in places], chunk_bytes, staging)
    workspace = torch.empty(needed, dtype=torch.uint8, device=device)
    return _native.ChunkCopier(
        device.index,
        torch.cuda.current_stream(device).cuda_stream,
        places,
        chunk_bytes,
        staging,
        workspace.data_ptr(),
        None if host is None else host.view(-1).numpy(),
        for_captures,
        (list(tensors), workspace, host),
    )


def pack_chunks(tensors: Sequence[Tensor], first_chunk: int, chunks: Tensor, hashes: Tensor) -> None:
    """Copy tensors into chunks, as many as there is room for, with zeros in the gaps, and hash each block.

    Args:
        tensors: any dtypes and sizes, contiguous, at any address; all on one device.
        first_chunk: which of the chunks that the tensors take is the first one here.
        chunks: uint8 `[C, B]`, written; B a multiple of 4096, at most `num_chunks(tensors, B) - first_chunk` of them;
            contiguous, aligned to 16 bytes.
        hashes: int64 `[C, B / 4096]`, written: the bits of the blocks' XXH3-64.

    Example: tensors of 4090, 0 and 10 bytes, B = 4096, first_chunk 0: C is 2. Tensor 0 is bytes 0..4090 of chunk 0,
    tensor 2 is bytes 0..10 of chunk 1 (4090 rounded up to a multiple of 16 is 4096), and the rest is zero.

    Raises:
        RuntimeError: an argument does not fit; the message names it. Nothing is written then.
    """
    torch_ops.pack_chunks.default(tensors, first_chunk, chunks, hashes)


def unpack_chunks(chunks: Tensor, hashes: Tensor, first_chunk: int, tensors: Sequence[Tensor], wrong: Tensor) -> None:
    """Copy chunks back into tensors, but for the blocks that do not have their hash.

    Args:
        chunks: uint8 `[C, B]`, as `pack_chunks` made them.
        hashes: int64 `[C, B / 4096]`: what the blocks should have.
        first_chunk: as for `pack_chunks`.
        tensors: as for `pack_chunks`, written; they must not overlap.
        wrong: int64 `[C]`, written: how many blocks of each chunk had another hash, and were left out.

    Raises:
        RuntimeError: an argument does not fit; the message names it. Nothing is written then.
    """
    torch_ops.unpack_chunks.default(chunks, hashes, first_chunk, tensors, wrong)


def hash_blocks(chunks: Tensor, hashes: Tensor) -> None:
    """Hash each block of `chunks`, uint8 `[C, B]`, into `hashes`, int64 `[C, B / 4096]`."""
    torch_ops.hash_blocks.default(chunks, hashes)


def checksums(hashes: Tensor) -> list[int]:
    """Combine the hashes of blocks, int64 `[C, N]` on the CPU, into the C checksums of chunks, each in 0..2**64.

    Raises:
        ValueError: `hashes` are not such a tensor.
    """
    if hashes.dtype != torch.int64 or hashes.dim() != 2 or hashes.device.type != "cpu":
        got = f"{hashes.dtype} of shape {list(hashes.shape)} on {hashes.device}"
        raise ValueError(f"hashes: expected int64 of shape [C, N] on the CPU, got {got}")
    rows = hashes.contiguous().numpy().astype("<i8", copy=False).view("uint8")
    return [_native.digest(row) for row in rows]
