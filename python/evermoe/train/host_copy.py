"""Copies in host memory of what a pipeline's stages sent from a GPU, and digests of it without a wait for the GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from evermoe import ops
from evermoe.ops.chunks import BLOCK_BYTES
from evermoe.state.unit import digests_of


class HostCopy:
    """A GPU's tensor in page-locked memory of the host, whose memory on the GPU is free for others.

    It is copied beside what follows on the GPU; the host waits for nothing.

    Args:
        tensor: as torch's current stream will have left it; nobody writes it afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.data = torch.empty_like(tensor, device="cpu", pin_memory=True)
        """Whole once the copy is over, for which nobody waits."""
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
    """Nested values with tensors that are part of no graph: those of a GPU as `HostCopy`."""
    return tree_map_only(Tensor, lambda each: HostCopy(each.detach()) if each.is_cuda else each.detach(), values)


def on_device(values: Any) -> Any:
    """The inverse of `to_host`; what is no copy stays."""
    return tree_map_only(HostCopy, HostCopy.on_device, values)


class BorderDigest:
    """Digests of tensors, which tell whether two have the same bits. Those of a GPU's are made there and stay there.

    So nobody waits for them unless they are compared.

    Args:
        tensors: on the CPU or on GPUs.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        is_hashed_there = ops.has_cuda_kernels()
        there = [each for each in tensors if each.is_cuda and is_hashed_there]
        here = [each for each in tensors if not (each.is_cuda and is_hashed_there)]
        self._number = digests_of([here], beside_steps=True)[0]
        self._hashes = [_block_hashes(each) for each in there]

    def __eq__(self, other: object) -> bool:
        """Whether the tensors had the same bits; waits for GPUs."""
        if not isinstance(other, BorderDigest):
            return NotImplemented
        hashes, others = self._hashes, other._hashes
        is_same = self._number == other._number and [each.shape for each in hashes] == [each.shape for each in others]
        return is_same and all(torch.equal(mine, theirs) for mine, theirs in zip(hashes, others, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _block_hashes(tensor: Tensor) -> Tensor:
    """Hashes of a GPU's tensor, int64 `[1, n]`, one for each 4 KiB; the last of them is filled up with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % ops.chunks.ALIGNMENT:
        data = data.clone()
    whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
    parts = [data[:whole].view(1, whole)] * bool(whole)
    if whole < len(data):
        rest = data.new_zeros(1, BLOCK_BYTES)
        rest[0, : len(data) - whole] = data[whole:]
        parts.append(rest)
    hashes = [torch.empty(1, part.shape[1] // BLOCK_BYTES, dtype=torch.int64, device=data.device) for part in parts]
    for part, found in zip(parts, hashes, strict=True):
        ops.hash_blocks(part, found)
    return torch.cat([*hashes, torch.empty(1, 0, dtype=torch.int64, device=data.device)], dim=1)
