"""Sources of captures from a GPU, by bundle, and whether snapshots are made on the GPU first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from evermoe._native import Capture
from evermoe.errors import CaptureCancelled
from evermoe.planning.schedule import snapshot_memory
from evermoe.presets import SnapshotMemory
from evermoe.snapshot.gpu_source import GpuSource
from evermoe.warn import warn

WARM_CAPTURES = 2
"""Captures of a bundle before free memory counts: by then a step has shown what training takes."""
LEFT_FREE, MIN_FREE = 1 / 16, 1 / 64
"""Fractions of a GPU's memory that must be free to begin making snapshots on it, and to continue."""


class GpuSources:
    """The sources of this member's bundles.

    Args:
        memory: where snapshots of a GPU's state are made: see `evermoe.presets`.
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
        """Bytes of a GPU's memory that snapshots take."""
        return sum(source.nbytes for source in self._by_bundle.values())

    def of(self, bundle: int, tensors: Sequence[Tensor], device: torch.device) -> GpuSource:
        """The source of a bundle's tensors, from which nothing is read any more.

        Raises:
            RuntimeError: too little page-locked memory.
        """
        source = self._by_bundle.get(bundle)
        if source is not None:
            _finish(source)
        is_beside = self._goes_beside(bundle, sum(tensor.nbytes for tensor in tensors), device)
        if source is None or not source.is_of(tensors) or source.is_beside != is_beside:
            del source
            self._by_bundle.pop(bundle, None)  # its memory makes room
            self._by_bundle[bundle] = self._make(tensors, device, is_beside)
        return self._by_bundle[bundle]

    def _make(self, tensors: Sequence[Tensor], device: torch.device, is_beside: bool) -> GpuSource:
        if is_beside:
            try:
                return GpuSource(tensors, device, is_beside=True)
            except torch.OutOfMemoryError as error:
                self._memory = "host"
                warn(f"snapshots are made in host memory from now on: {error}")
        return GpuSource(tensors, device)

    def _goes_beside(self, bundle: int, nbytes: int, device: torch.device) -> bool:
        """Whether a bundle's captures are made on the GPU first."""
        if self._memory != "auto" or device.type != "cuda":
            return self._memory == "gpu"
        free, total = torch.cuda.mem_get_info(device)
        source = self._by_bundle.get(bundle)
        if source is not None and source.is_beside:
            return free >= total * MIN_FREE
        is_warm = self._captures.get(bundle, 0) >= WARM_CAPTURES
        return is_warm and snapshot_memory(free, [nbytes], reserve=int(total * LEFT_FREE)) == ["device"]

    def note(self, bundle: int, capture: Capture) -> None:
        """A capture of a bundle has begun."""
        self._by_bundle[bundle].capture = capture
        self._captures[bundle] = self._captures.get(bundle, 0) + 1

    def release(self, bundle: int) -> bool:
        """Whether torch's current stream may write a bundle's tensors again, though they are being captured."""
        source = self._by_bundle.get(bundle)
        if source is None or not source.is_beside:
            return False
        source.release()
        return True

    def clear(self) -> None:
        """Lets go of the tensors, once nothing is read any more: their memory is needed for what takes their place."""
        for source in self._by_bundle.values():
            _finish(source)
        self._by_bundle, self._captures = {}, {}


def _finish(source: GpuSource) -> None:
    """Waits until nothing of a source is read any more."""
    if source.capture is not None:
        with suppress(CaptureCancelled):
            source.capture.hurry()
            source.capture.wait()
