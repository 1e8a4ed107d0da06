"""Digests of units on GPUs: one launch reads the bytes at the speed of the GPU's memory.

No byte crosses the link to the host for its digest. A block of threads takes a unit, whose digest can only be computed
from its first byte to its last. The kernel is `digest_units` of `kernels/copy.cu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe import _native
from evermoe.ops.cache import has_cuda_kernels
from evermoe.process.warn import warn

MAX_SHORT_BYTES = 240
"""Maximum bytes of units that only the host digests: XXH3 has other algorithms for them."""
MAX_HOST_PART = 1 / 16
"""Maximum part of a unit's bytes that is copied to the GPU first, as an optimizer's `step` on the CPU."""


def gpu_digests(units: Sequence[Sequence[Tensor]]) -> dict[int, int]:
    """Compute the XXH3-64 of each unit's bytes, as torch's current stream leaves them, by its place among the units.

    Omitted are short units, those that are mostly on the CPU, on several GPUs or not contiguous, all in a build without
    kernels, and those of a GPU that lacks the memory for a table of tensors, which a warning reports.

    Args:
        units: tensors, whose bytes follow each other; they may overlap.

    Raises:
        RuntimeError: an error of a device.
    """
    found: dict[int, int] = {}
    for device, places in _by_gpu(units).items() if has_cuda_kernels() else ():
        try:
            digests = _digests_on(device, [units[place] for place in places])
        except torch.OutOfMemoryError as error:
            warn(f"digests are made from plain copies of each unit, which is slower: {error}")
            continue
        found |= dict(zip(places, digests, strict=True))
    return found


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, of a contiguous one on the CPU without a copy."""
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy()


def _by_gpu(units: Sequence[Sequence[Tensor]]) -> dict[torch.device, list[int]]:
    """Places of the units that one GPU can digest, for each GPU."""
    found: dict[torch.device, list[int]] = {}
    for place, tensors in enumerate(units):
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        nbytes, here = (sum(tensor.nbytes for tensor in some) for some in (tensors, on_gpu))
        is_plain = all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in on_gpu)
        is_here = is_plain and nbytes > MAX_SHORT_BYTES and nbytes - here <= MAX_HOST_PART * nbytes
        devices = {tensor.device for tensor in on_gpu}
        if is_here and len(devices) == 1:
            found.setdefault(devices.pop(), []).append(place)
    return found


def _digests_on(device: torch.device, units: Sequence[Sequence[Tensor]]) -> list[int]:
    spans: list[int] = []
    ends: list[int] = []
    copied: dict[tuple[object, ...], Tensor] = {}
    for tensors in units:
        start = 0
        for tensor in tensors:
            here = tensor
            if not tensor.is_cuda:  # many units may share it
                place = tensor.data_ptr(), tensor.nbytes, tensor.stride()
                here = copied[place] = copied[place] if place in copied else tensor.contiguous().to(device)
            if here.nbytes:
                spans += [here.data_ptr(), start, here.nbytes]
                start += here.nbytes
        ends.append(len(spans) // 3)
    with torch.cuda.device(device):
        table = torch.tensor(spans + ends, dtype=torch.int64).to(device)
        digests = torch.empty(len(ends), dtype=torch.int64, device=device)
        stream, at = torch.cuda.current_stream(device).cuda_stream, table.data_ptr()
        _native.digest_units(device.index, stream, at, at + 8 * len(spans), len(ends), digests.data_ptr())
        return [digest % 2**64 for digest in digests.tolist()]
