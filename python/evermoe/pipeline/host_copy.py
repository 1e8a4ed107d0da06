"""Copies in host memory of the tensors that stages sent from a GPU, and their digests, without a wait for the GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from evermoe import ops
from evermoe.ops.cache import has_cuda_kernels
from evermoe.ops.chunks import BLOCK_BYTES, hash_blocks
from evermoe.state.unit import digests_of


class HostCopy:
    """A copy of a GPU's tensor in page-locked memory of the host, so that its memory on the GPU can be reused.

    The copy overlaps with the kernels that follow on the GPU, and the host does not wait for it.

    Args:
        tensor: as torch's current stream leaves it; it must not be written afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.data = torch.empty_like(tensor, device="cpu", pin_memory=True)
        """Complete once the copy is over, which the host does not wait for."""
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.data.copy_(tensor, non_blocking=True)
            self._event = stream.record_event()
        tensor.record_stream(stream)

    def on_device(self) -> Tensor:
        """The tensor on its GPU again, in torch's current stream."""
        torch.cuda.current_stream(self.device).wait_event(self._event)
        with torch.cuda.device(self.device):
            return self.data.to(self.device, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(values: Any) -> Any:
    """Nested values with their tensors detached from graphs; those of a GPU become a `HostCopy`."""
    return tree_map_only(Tensor, lambda each: HostCopy(each.detach()) if each.is_cuda else each.detach(), values)


def on_device(values: Any) -> Any:
    """The inverse of `to_host`; other values stay."""
    return tree_map_only(HostCopy, HostCopy.on_device, values)


class BorderDigest:
    """Digests of tensors, to compare their bits.

    Digests of a GPU's tensors are computed and kept on the GPU, so that the host waits for them only to compare.

    Args:
        tensors: on the CPU or on GPUs.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        has_kernels = has_cuda_kernels()
        on_gpu = [each for each in tensors if each.is_cuda and has_kernels]
        on_host = [each for each in tensors if not (each.is_cuda and has_kernels)]
        self._number = digests_of([on_host])[0]
        self._hashes = [_block_hashes(each) for each in on_gpu]

    def __eq__(self, other: object) -> bool:
        """Whether the tensors had the same bits; waits for GPUs."""
        if not isinstance(other, BorderDigest):
            return NotImplemented
        hashes, others = self._hashes, other._hashes
        is_same = self._number == other._number and [each.shape for each in hashes] == [each.shape for each in others]
        return is_same and all(torch.equal(mine, theirs) for mine, theirs in zip(hashes, others, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _block_hashes(tensor: Tensor) -> Tensor:
    """Hashes of a GPU's tensor, int64 `[1, n]`, one for each 4 KiB; the last block is padded with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % ops.chunks.ALIGNMENT:
        data = data.clone()
    end = len(data) // BLOCK_BYTES * BLOCK_BYTES
    parts = [data[:end].view(1, end)] * bool(end)
    if end < len(data):
        rest = data.new_zeros(1, BLOCK_BYTES)
        rest[0, : len(data) - end] = data[end:]
        parts.append(rest)
    hashes = [torch.empty(1, part.shape[1] // BLOCK_BYTES, dtype=torch.int64, device=data.device) for part in parts]
    for part, found in zip(parts, hashes, strict=True):
        hash_blocks(part, found)
    return torch.cat([*hashes, torch.empty(1, 0, dtype=torch.int64, device=data.device)], dim=1)
