"""Where versions of the state are kept, each behind the same few methods. One more backend is one more class here."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.checkpoint import checkpoint
from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find, find_manifests
from evermoe.checkpoint.checkpoint_write import CheckpointWrite, Increment
from evermoe.checkpoint.manifest import SAVE, Saved, read_manifest, read_saved
from evermoe.checkpoint.owner import Owner
from evermoe.comm.group import Group
from evermoe.copies.snapshot.bundles import bundles
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.errors import CorruptCopy
from evermoe.state.training_state import TrainingState
from support.kills import boundary
from support.models import everyone, make, read

Units = dict[str, Tensor]
"""Bytes by name."""
NEWEST = (1 << 63) - 1
"""A version that undoes no other."""


@functools.cache
def model() -> TrainingState:
    """The state whose versions are kept."""
    return make("sgd-momentum")[2]


@functools.cache
def contents(version: int) -> Units:
    """The bytes of every unit at a version."""
    _, _, state = make("sgd-momentum")
    draw = torch.Generator().manual_seed(version)
    names = [unit.name for unit in state.catalog.units]
    with torch.no_grad():
        for tensors in state.tensors(names):
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=draw))
    state.loop.store({"version": version})
    return read(state)


class Store(Protocol):
    """One member's side of a store. Reading needs none: any process may, also when all members are dead."""

    def __init__(self, folder: Path, member: str = "m") -> None:
        """As a process of the job starts, which may find what earlier ones have left."""

    def write(self, version: int, units: Units) -> None:
        """The version is visible when this returns. ValueError: it was refused, and nothing has changed."""

    def close(self) -> None:
        """Ends what runs in the background; what was written stays."""

    @staticmethod
    def held(folder: Path) -> dict[str, list[int]]:
        """Return for each unit the versions that the store lists."""

    @staticmethod
    def read(folder: Path, version: int, names: Sequence[str]) -> Units:
        """CorruptCopy: a unit cannot be read, or its bytes are not those that were written."""

    @staticmethod
    def files(folder: Path) -> list[str]:
        """Return the folder's contents, except numbers that count the members' starts."""


def versions(store: type[Store], folder: Path) -> list[int]:
    """The versions that every unit has, newest first."""
    held = store.held(folder)
    return sorted(set.intersection(*(set(held.get(name, ())) for name in names())), reverse=True)


def names() -> list[str]:
    """Of all units."""
    return [unit.name for unit in model().catalog.units]


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class Arenas:
    """Snapshots in named shared memory: an arena for each bundle, new ones for each start."""

    def __init__(self, folder: Path, member: str = "m") -> None:
        self._store = SnapshotStore(folder, model())
        self._generation = self._store.newest_generation() + 1
        self._store.create_arenas(bundles(names(), [[0]] * len(names())), self._generation, member, 0)

    def write(self, version: int, units: Units) -> None:
        for each in self._store.own:
            index = each.arena.begin(version)
            buffer = torch.from_numpy(each.arena.buffer(index))
            boundary()
            for name, offset, nbytes in each.arena.units():
                buffer[offset : offset + nbytes // 2] = units[name][: nbytes // 2]
            boundary()
            for name, offset, nbytes in each.arena.units():
                buffer[offset : offset + nbytes] = units[name]
            boundary()
            buffer[:12].fill_(255)  # a part of the digests, which `commit` writes again
            boundary()
            each.arena.commit(index)
        boundary()
        self._store.prune(self._generation)

    def close(self) -> None:
        self._store.engine.shutdown()

    @staticmethod
    def held(folder: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for each in SnapshotStore(folder, model()).stored():
            found[each.unit].append(each.version)
        return found

    @staticmethod
    def read(folder: Path, version: int, names: Sequence[str]) -> Units:
        found = {each.unit: each for each in SnapshotStore(folder, model()).stored() if each.version == version}
        units = {name: found[name].data.clone() for name in names if name in found}
        wrong = [name for name in names if name not in units or digest(units[name].numpy()) != found[name].digest]
        if wrong:
            raise CorruptCopy(f"{folder}: {wrong} are gone, or their bytes do not match their digests")
        return units

    @staticmethod
    def files(folder: Path) -> list[str]:
        return [re.sub(r"^\d{10}", "GENERATION", name) for name in names_in(folder)]


class Checkpoints:
    """Complete checkpoints, as the only member of a job writes them."""

    def __init__(self, folder: Path, member: str = "m") -> None:
        self._state = make("sgd-momentum")[2]
        self._folder = CheckpointFolder(folder, Owner("job", model().catalog.layout), member)
        self._generation = self._folder.newest_generation() + 1
        self._folder.sweep(self._generation)

    def write(self, version: int, units: Units) -> None:
        self._state.adopt(everyone(self._state), dict(units))
        CheckpointWrite(self._folder, self._state, list(units), version, self._generation, Group()).wait_published()

    def close(self) -> None:
        self._folder.close()

    @staticmethod
    def held(folder: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for version, path in find(folder).items():
            with contextlib.suppress(CorruptCopy):  # it is being removed
                for name in read_manifest(path).units:
                    found[name].append(version)
        return found

    @staticmethod
    def read(folder: Path, version: int, names: Sequence[str]) -> Units:
        path = find(folder).get(version)
        if path is None:
            raise CorruptCopy(f"{folder} has no checkpoint of version {version}")
        return checkpoint.read(read_manifest(path), model(), names)

    @staticmethod
    def files(folder: Path) -> list[str]:
        return names_in(folder)


class Saves(Checkpoints):
    """Saves of all units, as the only member of a job writes them."""

    def write(self, version: int, units: Units) -> None:
        self._state.adopt(everyone(self._state), dict(units))
        increment = Increment({}, resumed_from=NEWEST)
        CheckpointWrite(
            self._folder, self._state, list(units), version, self._generation, Group(), increment=increment
        ).wait_published()

    @staticmethod
    def saved(folder: Path) -> list[Saved]:
        """All versions of all units."""
        found = find_manifests(folder, model().catalog.layout, (SAVE,))
        return [each for manifest in found for each in manifest.saved]

    @staticmethod
    def held(folder: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for each in Saves.saved(folder):
            found[each.unit].append(each.version)
        return found

    @staticmethod
    def read(folder: Path, version: int, names: Sequence[str]) -> Units:
        found = {each.unit: each for each in Saves.saved(folder) if each.version == version}
        if not found.keys() >= set(names):
            raise CorruptCopy(f"{folder} has only {sorted(found)} of version {version}")
        return {name: read_saved(found[name]) for name in names}


STORES: list[Any] = [Arenas, Saves, Checkpoints]
