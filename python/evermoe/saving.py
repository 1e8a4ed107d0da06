"""PEC (MoC-System): after each step some experts of each layer, and each member's share of the rest, go to a folder.

What is saved is read by the courier's thread before the next update, and written by the persister's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evermoe import planning
from evermoe.courier import Courier, Errand
from evermoe.errors import CorruptCopy
from evermoe.persist import Persister
from evermoe.persisted import PersistedUnit, find_persisted, read_persisted
from evermoe.units import TrainingState


@dataclass(frozen=True)
class SavedCopy:
    """A durable version of one unit, which is read when it is needed."""

    found: PersistedUnit

    @property
    def unit(self) -> str:
        """Its name."""
        return self.found.unit

    @property
    def version(self) -> int:
        """That was saved."""
        return self.found.version

    @property
    def digest(self) -> int:
        """XXH3-64 of its bytes."""
        return self.found.digest

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`; empty if they cannot be read or are not those of the digest."""
        try:
            return read_persisted(self.found)
        except CorruptCopy:
            return torch.empty(0, dtype=torch.uint8)


class Saving:
    """One version of some units on its way to the persister, in the thread of a courier."""

    def __init__(self, state: TrainingState, persister: Persister, units: Sequence[str], version: int) -> None:
        self.version = version
        self.capture_seconds = 0.0
        self._state, self._persister, self._units = state, persister, units
        self._captured = threading.Event()
        self.errand: Errand[bool]

    def start(self, courier: Courier) -> Saving:
        """In the courier's thread from now on."""
        self.errand = courier.go(self._run)
        return self

    def wait_captured(self) -> None:
        """Until the state may be changed."""
        self._captured.wait()

    def _run(self) -> bool:
        started = time.monotonic()
        try:
            views = self._persister.begin(
                self.version, {name: self._state.by_name[name].nbytes for name in self._units}
            )
            for name, view in views.items():
                self._state.read(name, view)
        finally:
            self.capture_seconds = time.monotonic() - started
            self._captured.set()
        self._persister.commit()
        return True


class Saver:
    """The folder of a job, and what this member writes to it."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        self.folder, self._state = folder / "persisted", state
        self._persister: Persister | None = None

    def open(self, member: str, version: int) -> None:
        """All members go on from `version`: what is newer was never committed, and is removed."""
        if self._persister is None:
            self._persister = Persister(self.folder, member, self._state.layout, units=self._state.units)
        self._persister.rewind(version)

    def save(
        self,
        version: int,
        experts: Sequence[str],
        holders: Mapping[str, Sequence[int]],
        rank: int,
        ranks: int,
        courier: Courier,
    ) -> Saving | None:
        """Begins to save this rank's part of the experts and of all other units; None if it has none.

        Each unit is saved by one of the ranks that hold it. The experts are dealt out with the rest, so that who saves
        many of them saves less of that (PEC's adaptive sharding, here by whole units).
        """
        assert self._persister is not None
        chosen = set(experts)
        units = [unit for unit in self._state.units if unit.layer is None or unit.name in chosen]
        owners = planning.primaries([holders[unit.name] for unit in units], [unit.nbytes for unit in units], ranks)
        mine = [unit.name for unit, owner in zip(units, owners, strict=True) if owner == rank]
        return Saving(self._state, self._persister, mine, version).start(courier) if mine else None

    def flush(self) -> None:
        """Waits until what was saved last is durable.

        Raises:
            PersistFailed: it could not be written.
        """
        if self._persister is not None:
            self._persister.flush()

    def saved(self) -> Iterator[SavedCopy]:
        """Every durable version of every unit."""
        for found in find_persisted(self.folder, self._state.layout):
            yield SavedCopy(found)

    def close(self) -> None:
        """Ends the persister's thread; what is on its way is still written."""
        if self._persister is not None:
            self._persister.close()
            self._persister = None
