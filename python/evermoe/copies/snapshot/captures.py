"""Captures of a version's bundles on the member that has their units."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from evermoe._native import Capture
from evermoe.comm.courier import Courier
from evermoe.copies.snapshot.bundles import BundleArena
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.unit_tensors import UnitTensors
from evermoe.errors import CaptureCancelled
from evermoe.state.unit import read_tensors


class Captures:
    """Captures one version of this member's bundles: by the engine or, where that cannot, in a courier's thread.

    Args:
        store: the arenas.
        bundles: of the version, that this member captures.
        version: of the current state.
    """

    def __init__(self, store: SnapshotStore, bundles: Sequence[BundleArena], version: int) -> None:
        self._store, self._bundles, self._version = store, bundles, version
        self._by_number: dict[int, Capture | None] = {}
        """By number of a bundle; None if a thread must read its units."""
        self._tensors: dict[str, list[Tensor]] = {}
        """Tensors of these units, as they were at the start."""
        self._have_begun = threading.Event()
        """All captures have begun, or never will."""
        self._read = threading.Event()
        """No unit is left to read, or none will be read any more."""
        self._read_seconds = 0.0

    def __iter__(self) -> Iterator[tuple[BundleArena, Capture | None]]:
        """Yield each bundle, and the engine's capture of it; None if there is none."""
        for kept in self._bundles:
            yield kept, self._by_number.get(kept.number)

    @property
    def have_begun(self) -> bool:
        """Whether all captures have begun."""
        return self._have_begun.is_set()

    def begin_captures(self, tensors: Sequence[UnitTensors]) -> None:
        """Begin to capture the tensors of the bundles; record those that `read_rest` must read."""
        found = list(zip(self._bundles, tensors, strict=True))
        self._by_number = {kept.number: self._store.capture(kept, each, self._version) for kept, each in found}
        for kept, each in found:
            if self._by_number[kept.number] is None:
                self._tensors |= zip(kept.bundle.units, each.by_unit, strict=True)
        self._have_begun.set()

    def read_rest(self, courier: Courier) -> None:
        """Read the units that the engine does not capture, in the thread of this courier."""
        started = time.monotonic()
        try:
            for kept, capture in self:
                if capture is None:
                    self._read_units(kept, courier)
        finally:
            self._read_seconds = time.monotonic() - started
        self.release_tensors()
        self._read.set()

    def _read_units(self, kept: BundleArena, courier: Courier) -> None:
        kept.index = kept.arena.begin(self._version)
        data = torch.from_numpy(kept.arena.buffer(kept.index))
        for name, offset, nbytes in kept.arena.units():
            read_tensors(self._tensors[name], data[offset : offset + nbytes])
            courier.progress += 1
        kept.arena.commit(kept.index)

    def release_tensors(self) -> None:
        """Release the tensors that `read_rest` has read, or need not read any more."""
        self._tensors = {}

    def end_waits(self) -> None:
        """End all waits for what has not begun, and never will."""
        self._have_begun.set()
        self._read.set()

    def wait_captured(self) -> None:
        """Wait until the state may change: this version is in the arenas of its primaries.

        If the state and its snapshot are on a GPU, torch's current stream waits instead.
        """
        self._have_begun.wait()
        captures = [
            capture for kept, capture in self if capture is not None and not self._store.sources.release(kept.number)
        ]
        for capture in captures:
            capture.hurry()
        for capture in captures:
            with suppress(CaptureCancelled):  # the arena had no memory: `SnapshotRound.problem` says so
                capture.wait()
        self._read.wait()

    @property
    def seconds(self) -> float:
        """Seconds that this member has taken so far to capture its units."""
        return self._read_seconds + sum(capture.seconds_busy for _, capture in self if capture is not None)

    @property
    def host_speed(self) -> float:
        """Bytes per second at which this member's units were captured; 0 until all are."""
        nbytes, seconds = sum(kept.arena.payload_bytes for kept in self._bundles), self.seconds
        return nbytes / seconds if self._read.is_set() and seconds else 0.0
