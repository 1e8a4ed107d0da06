"""Digests of units on GPUs: captures whose destination is nothing but the hash.

    torch's stream ──●            the tensors, as it will have left them
    GPU              pack ─ copy ─ copy ─ …      transfers of 4 MiB to page-locked memory, a few on their way at once
    thread                       └ hash ─ hash ─ …   each as it has arrived; then its memory takes another one

The units are shared among *lanes*, each with a thread, a copier and its ring of transfers, since one thread hashes more
slowly than a link brings bytes. The lanes of a GPU hold up to 64 MiB of its memory and 96 MiB of page-locked memory
together, and little more, however large the units are.

**The floor** is the time in which the bytes cross the link: bytes / bandwidth. Example: 10⁹ parameters with 16 bytes of
state each are 16 GB. PCIe 5.0 with 16 lanes transfers 32 · 10⁹ · 16 · 128 / 130 bits a second, 63 GB/s before what its
packets take: 0.25 s at least. `benches/bench_copies.py` has what is reached of one large copy's bandwidth ("digest").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe import _native
from evermoe.ops.cache import has_cuda_kernels
from evermoe.ops.chunks import open_copier
from evermoe.process.warn import warn

CHUNK_BYTES = 4 << 20
"""Bytes of a transfer."""
MIN_BYTES = 4 * CHUNK_BYTES
"""Fewer, of all units on a GPU, are copied at once: to page-lock memory would take longer."""
TRANSFERS = 16
"""Transfers of all lanes that are on their way at once; 2 to 4 of each lane."""

Parts = list[list[NDArray[np.uint8] | None]]
"""Of each unit the tensors on the CPU, and None for those on the GPU."""


def gpu_digests(
    units: Sequence[Sequence[Tensor]],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    least_bytes: int = MIN_BYTES,
    lanes: int | None = None,
) -> dict[int, int]:
    """XXH3-64 of each unit's bytes, by its place among the units; of those alone whose bytes take this way.

    Others have tensors on several GPUs, on none, or such as are not contiguous: those need memory on the GPU to become
    so. Tensors on the CPU, such as `step`, are read where they are. Nothing takes this way where all units of a GPU are
    small, in a build without kernels, and where there is too little memory for the transfers, which a warning reports.

    Args:
        units: tensors, whose bytes follow each other; they may overlap.
        chunk_bytes: bytes of a transfer, a multiple of 4096. Several of less than 4 MiB together are one.
        least_bytes: of all units on a GPU together.
        lanes: threads for each GPU; None for as many as are worth it, up to 8 and half of the processors.

    Raises:
        RuntimeError: an error of a device.
    """
    if not has_cuda_kernels():
        return {}
    jobs, places = [], []
    try:
        for here in _by_gpu(units):
            sizes = [sum(tensor.nbytes for tensor in units[place]) for place in here]
            if sum(sizes) < least_bytes:
                continue
            shares = _native.digest_lanes(sizes, lanes)
            transfers = min(4, max(2, TRANSFERS // len(shares)))
            for share in shares:
                places.append([here[index] for index in share])
                jobs.append(_lane([units[place] for place in places[-1]], chunk_bytes, transfers))
    except RuntimeError as error:
        warn(f"digests are made from plain copies of each unit, which is slower: {error}")
        return {}
    found = _native.digests_on_device(jobs)
    return {
        place: digest
        for share, digests in zip(places, found, strict=True)
        for place, digest in zip(share, digests, strict=True)
    }


def in_batches(units: Sequence[Sequence[Tensor]], places: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of units in batches of up to `MIN_BYTES`; a larger unit is alone."""
    some, nbytes = list[int](), 0
    for place in places:
        size = sum(tensor.nbytes for tensor in units[place])
        if some and nbytes + size > MIN_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(place)
        nbytes += size
    if some:
        yield some


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, of a contiguous one on the CPU without a copy."""
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy()


def bytes_of_units(units: Sequence[Sequence[Tensor]]) -> list[list[NDArray[np.uint8]]]:
    """Return the bytes of each unit's tensors, of contiguous ones on the CPU without a copy.

    Those of a GPU come in one copy, for which the host waits once, unless they have more than `MIN_BYTES` or the GPU
    has no room for them.
    """
    flat = [tensor.reshape(-1).view(torch.uint8) for tensors in units for tensor in tensors]
    for device in {each.device for each in flat if each.is_cuda}:
        places = [place for place, each in enumerate(flat) if each.device == device]
        lengths = [len(flat[place]) for place in places]
        if len(places) == 1 or sum(lengths) > MIN_BYTES:
            continue
        with suppress(torch.OutOfMemoryError):
            joined = torch.cat([flat[place] for place in places]).cpu()
            for place, part in zip(places, joined.split(lengths), strict=True):
                flat[place] = part
    found = iter(flat)
    return [[bytes_of(next(found)) for _ in tensors] for tensors in units]


def _by_gpu(units: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Places of the units that lie on one GPU, for each GPU."""
    found: dict[torch.device, list[int]] = {}
    for place, tensors in enumerate(units):
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        devices = {tensor.device for tensor in on_gpu}
        is_plain = all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in on_gpu)
        if len(devices) == 1 and is_plain:
            found.setdefault(devices.pop(), []).append(place)
    return list(found.values())


def _lane(
    units: Sequence[Sequence[Tensor]], chunk_bytes: int, transfers: int
) -> tuple[_native.ChunkCopier, int, Parts]:
    on_gpu = [tensor for tensors in units for tensor in tensors if tensor.is_cuda]
    copier = open_copier(on_gpu, chunk_bytes, transfers, for_captures=True)
    stream = torch.cuda.current_stream(on_gpu[0].device).cuda_stream
    return copier, stream, [[None if tensor.is_cuda else bytes_of(tensor) for tensor in tensors] for tensors in units]
