"""Scattered tensors <-> chunks of a fixed size in host memory, with a checksum of each, in the background.

    copy = ChunkedCopy(state_tensors)       # once: the tensors stay the same, their values change
    saved = copy.save()                     # after a step; returns at once
    ...                                     # the next forward and backward pass run meanwhile
    saved.release()                         # before the optimizer: it writes the tensors
    saved.wait()                            # when the chunks are needed
    send(copy.chunks, copy.checksums())     # uint8 [C, chunk_bytes], and a number for each chunk
    copy.restore()                          # the other way; CorruptCopy names the chunks that are wrong

Letters: C chunks, B bytes of a chunk, N = B / 4096 blocks of a chunk. The chunks contain the tensors one after the
other, each at the next multiple of 16; gaps are zero. Each block of 4096 bytes has a hash, XXH3-64, computed during the
copy. The checksum of a chunk is the XXH3-64 of its blocks' hashes (little-endian). CPU and CUDA tensors of the same
bytes give the same chunks and checksums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from evermoe import _native
from evermoe._native import Arena, Capture, CopyEngine
from evermoe.errors import CorruptCopy
from evermoe.ops.cache import has_cuda_kernels
from evermoe.ops.chunks import (
    ALIGNMENT,
    BLOCK_BYTES,
    checksums,
    hash_blocks,
    num_chunks,
    open_copier,
    pack_chunks,
    unpack_chunks,
)

__all__ = ["ChunkTransfer", "ChunkedCopy"]


class ChunkedCopy:
    """Repeated copies of the same tensors to the same host memory.

    The addresses of the tensors are read once: they must not be resized or get new storage (`set_`, `.data = ...`).

    On CUDA the copies run on lowest-priority streams of their own, through page-locked memory. Only `wait`, `verify`,
    `checksums` and `restore` wait for the GPU. On the CPU a copy is done when the method returns. Not thread-safe, and
    not allowed while a CUDA graph is captured.

    Args:
        tensors: contiguous, of any dtypes and sizes, all on the CPU or all on one CUDA device; memory of their own.
        chunk_bytes: a multiple of 4096.
        host: uint8 `[C, B]` on the CPU, contiguous: memory for the chunks, a part of shared memory for example. On CUDA
            it is page-locked for the life of this object. None allocates it.
        staging: CUDA only: number of buffers in device memory, each for one transfer (of one chunk, or of several with
            4 MiB in total); the number of concurrent transfers. With enough buffers for all chunks, tensors are free as
            soon as they are packed, not only when the last chunk but one has reached the host.
        for_captures: for `capture` only, without `chunks`: on CUDA the host has memory for `staging` + 1 transfers,
            which use it in turn.

    Attributes:
        chunks: uint8 `[C, B]` on the CPU. Changes until the transfer is done.
        hashes: int64 `[C, N]` on the CPU, of the blocks, computed on the device of the tensors.

    Raises:
        ValueError: the tensors cannot be copied, or `chunk_bytes`, `host` or `staging` is invalid.
        RuntimeError: CUDA tensors with a build without kernels, or too little page-locked memory.
    """

    chunks: Tensor
    hashes: Tensor

    def __init__(
        self,
        tensors: Sequence[Tensor],
        chunk_bytes: int = 4 << 20,
        *,
        host: Tensor | None = None,
        staging: int = 3,
        for_captures: bool = False,
    ) -> None:
        self._tensors = list(tensors)
        self._device = _check_tensors(self._tensors)
        shape = (num_chunks(self._tensors, chunk_bytes), chunk_bytes)
        if for_captures and host is not None:
            raise ValueError("host: expected None with for_captures")
        if host is not None:
            _check_host(host, shape)
        self._copier = None if self._device.type == "cpu" else self._open(chunk_bytes, host, staging, for_captures)
        if for_captures:
            shape = (0, chunk_bytes)
        if self._copier is None:
            self.chunks = torch.zeros(shape, dtype=torch.uint8, device="cpu") if host is None else host
            self.hashes = torch.zeros(shape[0], chunk_bytes // BLOCK_BYTES, dtype=torch.int64, device="cpu")
            self._wrong = torch.zeros(shape[0], dtype=torch.int64, device="cpu")
        else:
            blocks = shape[0] * (chunk_bytes // BLOCK_BYTES)
            self.chunks = torch.from_numpy(self._copier.chunks())[: shape[0] * chunk_bytes].view(shape)
            self.hashes = torch.from_numpy(self._copier.hashes())[:blocks].view(shape[0], chunk_bytes // BLOCK_BYTES)
            self._wrong = torch.from_numpy(self._copier.wrong())[: shape[0]]

    def _open(self, chunk_bytes: int, host: Tensor | None, staging: int, for_captures: bool) -> _native.ChunkCopier:
        if not has_cuda_kernels():
            raise RuntimeError("tensors: got CUDA tensors, but this build of evermoe has no CUDA kernels")
        return open_copier(self._tensors, chunk_bytes, staging, host=host, for_captures=for_captures)

    def save(self, first: int = 0, end: int | None = None) -> ChunkTransfer:
        """Start to copy the tensors into chunks `first..end`, after all work on torch's current stream.

        Call `ChunkTransfer.release` before the tensors are written again.

        Raises:
            ValueError: a range beyond the chunks.
        """
        first, end = self._range(first, end)
        if self._copier is not None:
            self._copier.save(self._stream(), first, end)
        else:
            pack_chunks(self._tensors, first, self.chunks[first:end], self.hashes[first:end])
        return ChunkTransfer(self, first, end)

    def restore(self, first: int = 0, end: int | None = None) -> None:
        """Copy chunks `first..end` back into the tensors, and wait for it.

        It runs after all earlier work on torch's current stream; later work sees the new values.

        Raises:
            CorruptCopy: some blocks do not match their hash. If the host finds them, nothing was written. If only the
                device does, since they were damaged in transit, those blocks were not written.
            ValueError: a range beyond the chunks.
        """
        first, end = self._range(first, end)
        self.verify(first, end)
        if self._copier is not None:
            self._copier.restore(self._stream(), first, end)
            ChunkTransfer(self, first, end).wait()
            for tensor in self._tensors:
                torch.autograd.graph.increment_version(tensor)
        else:
            wrong = self._wrong[first:end]
            unpack_chunks(self.chunks[first:end], self.hashes[first:end], first, self._tensors, wrong)
        _raise_corrupt(first + index for index in self._wrong[first:end].nonzero().flatten().tolist())

    def verify(self, first: int = 0, end: int | None = None) -> None:
        """Hash the chunks `first..end` on the host, and compare the hashes with those of the tensors' device.

        Waits until they have arrived.

        Raises:
            CorruptCopy: the hashes differ; the message names the chunks.
            ValueError: a range beyond the chunks.
        """
        first, end = self._range(first, end)
        ChunkTransfer(self, first, end).wait()
        expected = self.hashes[first:end]
        found = torch.empty_like(expected)
        hash_blocks(self.chunks[first:end], found)
        _raise_corrupt(first + index for index in (found != expected).any(1).nonzero().flatten().tolist())

    def checksums(self) -> list[int]:
        """Return the verified checksum of each chunk, which a receiver compares with its own `checksums(hashes)`.

        Waits until the chunks have arrived.

        Raises:
            CorruptCopy: chunks do not match the hashes of the tensors' device; the message names them.
        """
        self.verify()
        return checksums(self.hashes)

    def capture(self, engine: CopyEngine, arena: Arena, version: int, tensors_per_unit: Sequence[int]) -> Capture:
        """Begin a version in an arena and let the engine's thread copy the tensors into it while its gate is open.

        On CUDA the tensors are copied directly into a page-locked arena, else through a page-locked buffer, after all
        earlier work on torch's current stream. The arena's first unit is the first `tensors_per_unit[0]` tensors, and
        so on. Until the capture is over (`Capture.hurry`, then `Capture.wait`), do not write the tensors, and use this
        object only for further captures.

        Raises:
            ValueError: the counts do not fit the tensors, or the tensors do not fit the arena's units, which are named.
        """
        if sum(tensors_per_unit) != len(self._tensors) or min(tensors_per_unit, default=0) < 0:
            got = f"{len(self._tensors)} tensors, got {list(tensors_per_unit)}"
            raise ValueError(f"tensors_per_unit: expected counts that add up to {got}")
        if self._copier is not None:
            return engine.capture_device(arena, version, self._copier, tensors_per_unit, self._stream())
        runs = iter([(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors])
        sources = [list(itertools.islice(runs, count)) for count in tensors_per_unit]
        return engine.capture(arena, version, sources, self._tensors)

    def _range(self, first: int, end: int | None) -> tuple[int, int]:
        end = len(self.chunks) if end is None else end
        if not 0 <= first <= end <= len(self.chunks):
            raise ValueError(f"chunks: expected a range within 0..{len(self.chunks)}, got {first}..{end}")
        return first, end

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


class ChunkTransfer:
    """Chunks on their way to the host; made by `ChunkedCopy.save`."""

    def __init__(self, copy: ChunkedCopy, first: int, end: int) -> None:
        self._copy, self._first, self._end = copy, first, end

    def done(self, chunk: int | None = None) -> bool:
        """Return whether a chunk, or the complete transfer, is on the host; later transfers of it count, too.

        Raises:
            ValueError: `chunk` is not of this transfer.
        """
        copier, chunks = self._copy._copier, self._chunks(chunk)
        return copier is None or copier.is_done(*chunks)

    def wait(self, chunk: int | None = None) -> None:
        """Block until `done`; other threads of Python run meanwhile."""
        copier, chunks = self._copy._copier, self._chunks(chunk)
        if copier is not None:
            copier.wait(*chunks)

    def release(self) -> None:
        """Make torch's current stream wait until the tensors have been read; return at once.

        Later work on the stream may write the tensors.
        """
        if self._copy._copier is not None:
            self._copy._copier.release(self._copy._stream())

    def _chunks(self, chunk: int | None) -> tuple[int, int]:
        """Return the range to wait for."""
        if chunk is None:
            return self._first, self._end
        if not self._first <= chunk < self._end:
            raise ValueError(f"chunk: expected one of {self._first}..{self._end}, got {chunk}")
        return chunk, chunk + 1


def _raise_corrupt(chunks: Iterable[int]) -> None:
    wrong = list(chunks)
    if wrong:
        named = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        raise CorruptCopy(f"{len(wrong)} of the chunks do not match their checksum: {named}; save or fetch them again")


def _check_tensors(tensors: Sequence[Tensor]) -> torch.device:
    """Check the tensors and return their device."""
    if not tensors:
        return torch.device("cpu")
    device = tensors[0].device
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"tensors: expected them on the CPU or on CUDA, got {device}")
    for index, tensor in enumerate(tensors):
        if tensor.device != device or tensor.layout != torch.strided or not tensor.is_contiguous():
            what = "contiguous" if tensor.layout == torch.strided and tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"tensors[{index}]: expected contiguous on {device}, got {what} on {tensor.device}")
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, index) for index, t in enumerate(tensors) if t.nbytes)
    for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError(f"tensors: expected memory of their own, got tensors {one} and {other} that overlap")
    return device


def _check_host(host: Tensor, shape: tuple[int, int]) -> None:
    fits = host.dtype == torch.uint8 and tuple(host.shape) == shape and host.is_contiguous()
    if not fits or host.device.type != "cpu" or host.data_ptr() % ALIGNMENT:
        expected = f"contiguous uint8 of shape {list(shape)} on the CPU, aligned to {ALIGNMENT} bytes"
        raise ValueError(f"host: expected {expected}, got {host.dtype} of shape {list(host.shape)} on {host.device}")
