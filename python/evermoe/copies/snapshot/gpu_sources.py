"""Sources of captures from a GPU, by bundle; decides whether snapshots are copied within the GPU first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from evermoe._native import Capture
from evermoe.copies.snapshot.gpu_source import GpuSource
from evermoe.errors import CaptureCancelled
from evermoe.planning.schedule import snapshot_memory
from evermoe.presets import SnapshotMemory
from evermoe.process.warn import warn

WARM_CAPTURES = 2
"""Captures of a bundle before free memory counts: by then a step has shown how much memory training needs."""
LEFT_FREE, MIN_FREE = 1 / 16, 1 / 64
"""Fractions of a GPU's memory that must be free to begin snapshots on it, and to continue them."""


class GpuSources:
    """The sources of this member's bundles.

    Args:
        memory: where snapshots of a GPU's state are made; see `evermoe.presets`.
    """

    def __init__(self, memory: SnapshotMemory = "host") -> None:
        self._memory = memory
        self._by_bundle: dict[int, GpuSource] = {}
        self._captures: dict[int, int] = {}
        """Number of captures of each bundle."""

    def __contains__(self, bundle: int) -> bool:
        return bundle in self._by_bundle

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that snapshots take."""
        return sum(source.nbytes for source in self._by_bundle.values())

    def of(self, bundle: int, tensors: Sequence[Tensor], device: torch.device) -> GpuSource:
        """Return the source of a bundle's tensors, once no earlier capture reads them.

        Raises:
            RuntimeError: too little page-locked memory.
        """
        source = self._by_bundle.get(bundle)
        if source is not None:
            _finish(source)
        copies_first = self._copies_on_gpu_first(bundle, sum(tensor.nbytes for tensor in tensors), device)
        if source is None or not source.is_of(tensors) or source.copies_first != copies_first:
            del source
            self._by_bundle.pop(bundle, None)  # frees its memory
            self._by_bundle[bundle] = self._make(tensors, device, copies_first)
        return self._by_bundle[bundle]

    def _make(self, tensors: Sequence[Tensor], device: torch.device, copies_first: bool) -> GpuSource:
        if copies_first:
            try:
                return GpuSource(tensors, device, copies_first=True)
            except torch.OutOfMemoryError as error:
                self._memory = "host"
                warn(f"snapshots are made in host memory from now on: {error}")
        return GpuSource(tensors, device)

    def _copies_on_gpu_first(self, bundle: int, nbytes: int, device: torch.device) -> bool:
        """Return whether a bundle's captures are copied within the GPU first."""
        if self._memory != "auto" or device.type != "cuda":
            return self._memory == "gpu"
        free, total = torch.cuda.mem_get_info(device)
        source = self._by_bundle.get(bundle)
        if source is not None and source.copies_first:
            return free >= total * MIN_FREE
        is_warm = self._captures.get(bundle, 0) >= WARM_CAPTURES
        return is_warm and snapshot_memory(free, [nbytes], reserve=int(total * LEFT_FREE)) == ["device"]

    def note_capture(self, bundle: int, capture: Capture) -> None:
        """Record that a capture of a bundle has begun."""
        self._by_bundle[bundle].capture = capture
        self._captures[bundle] = self._captures.get(bundle, 0) + 1

    def release(self, bundle: int) -> bool:
        """Return whether torch's current stream may write a bundle's tensors again while they are captured."""
        source = self._by_bundle.get(bundle)
        if source is None or not source.copies_first:
            return False
        source.release()
        return True

    def clear(self) -> None:
        """Release the tensors, once nothing reads them any more, to free their memory for their successors."""
        for source in self._by_bundle.values():
            _finish(source)
        self._by_bundle, self._captures = {}, {}


def _finish(source: GpuSource) -> None:
    """Wait until nothing reads a source any more."""
    if source.capture is not None:
        with suppress(CaptureCancelled):
            source.capture.hurry()
            source.capture.wait()
