"""Copies of every unit in named shared memory: on its own node and on other nodes.

Each unit has one *primary*: the rank that writes its copies. Units with the same primary and the same other holders
form a *bundle*; a bundle's bytes lie in one arena on each node that keeps it, with room for two versions. A primary
writes its own arena, then sends those bytes, digests included, to the peers' arenas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from evermoe._native import Arena
from evermoe.elastic import Group
from evermoe.errors import CorruptCopy
from evermoe.units import TrainingState

_FILE = re.compile(r"^(\d{10})-.*\.arena$")


@dataclass(frozen=True)
class Bundle:
    """Units that travel together: `holders[0]` is the primary, the others keep copies for it."""

    holders: tuple[int, ...]
    units: tuple[str, ...]


def bundles(units: Sequence[str], holders: Sequence[Sequence[int]]) -> list[Bundle]:
    """Groups units by the ranks that keep their copies, in order of first appearance.

    Example: holders [[0, 1], [2, 3], [0, 1]] of units a, b, c → (0, 1): a, c and (2, 3): b.
    """
    grouped: dict[tuple[int, ...], list[str]] = {}
    for unit, ranks in zip(units, holders, strict=True):
        grouped.setdefault(tuple(ranks), []).append(unit)
    return [Bundle(ranks, tuple(names)) for ranks, names in grouped.items()]


@dataclass(frozen=True)
class StoredCopy:
    """A whole version of one unit in an arena of this node."""

    unit: str
    version: int
    digest: int
    data: Tensor
    """uint8 `[nbytes]`, a view of the shared memory."""


@dataclass
class _Kept:
    bundle: Bundle
    arena: Arena
    index: int = -1


@dataclass
class CopyStore:
    """The arenas of this node's directory and the exchange that fills them.

    `directory` belongs to one job and one node: its files outlive a crash of the process, not the node.
    """

    directory: Path
    state: TrainingState
    _own: list[_Kept] = field(default_factory=list)
    _peers: list[_Kept] = field(default_factory=list)

    def newest_generation(self) -> int:
        """Of the arenas found in the directory; 0 when there is none."""
        return max((generation for generation, _ in self._files()), default=0)

    def check_model(self) -> None:
        """Refuses to work in memory that another model has left behind.

        Raises:
            ValueError: the message names the folder.
        """
        for _, path in self._files():
            try:
                layout = json.loads(Arena.open(str(path)).meta).get("layout")
            except (CorruptCopy, FileNotFoundError):
                continue
            if layout != self.state.layout:
                raise ValueError(
                    f"{self.directory} holds the memory of a job that trained another model or optimizer. To go on "
                    "with it, start its own script; to start afresh, give the job another name or remove the folder."
                )

    def _files(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.directory.glob("*.arena")):
            match = _FILE.match(path.name)
            if match:
                yield int(match[1]), path

    def arrange(self, arrangement: Sequence[Bundle], generation: int, member: str, rank: int) -> None:
        """Makes new, empty arenas for what this rank is primary for and what it keeps for peers.

        The arenas of earlier generations stay until `prune`: they are what a failure would need now.

        Raises:
            OSError: the shared memory is too small; the message says how many bytes are needed and free.
        """
        self._own, self._peers = [], []
        for number, bundle in enumerate(arrangement):
            if rank not in bundle.holders:
                continue
            path = self.directory / f"{generation:010d}-{number}-{member}.arena"
            meta = json.dumps({"generation": generation, "member": member, "layout": self.state.layout})
            units = [(name, self.state.by_name[name].nbytes) for name in bundle.units]
            kept = _Kept(bundle, Arena.create(str(path), meta, units))
            (self._own if bundle.holders[0] == rank else self._peers).append(kept)

    def write(self, version: int, group: Group) -> bool:
        """Copies every unit's state as `version`; collective. False when a received copy did not match its digests.

        Nothing becomes visible before it is whole, and the version before it stays until then.
        """
        for kept in self._own:
            kept.index = kept.arena.begin(version)
            data = torch.from_numpy(kept.arena.buffer(kept.index))
            for name, offset, nbytes in kept.arena.units():
                self.state.read(name, data[offset : offset + nbytes])
            kept.arena.commit(kept.index)
        return self._exchange(version, group)

    def _exchange(self, version: int, group: Group) -> bool:
        sends, receives = [], []
        for kept in self._own:
            data = torch.from_numpy(kept.arena.buffer(kept.index))
            sends += [(data, holder) for holder in kept.bundle.holders[1:]]
        for kept in self._peers:
            kept.index = kept.arena.begin(version)
            receives.append((torch.from_numpy(kept.arena.buffer(kept.index)), kept.bundle.holders[0]))
        group.exchange(sends, receives)
        whole = True
        for kept in self._peers:
            try:
                kept.arena.commit_received(kept.index)
            except CorruptCopy:
                whole = False
        return whole

    def stored(self) -> Iterator[StoredCopy]:
        """Every whole version of every unit in this node's memory, also of processes that have died here."""
        for _, path in self._files():
            try:
                arena = Arena.open(str(path))
            except (CorruptCopy, FileNotFoundError):
                continue  # torn by a crash while it was made, or pruned by a peer on this node
            for index, version in arena.versions():
                data = torch.from_numpy(arena.buffer(index))
                for (name, offset, nbytes), digest in zip(arena.units(), arena.digests(index), strict=True):
                    yield StoredCopy(name, version, digest, data[offset : offset + nbytes])

    def prune(self, generation: int) -> None:
        """Removes the arenas of earlier generations: a newer version is whole on all nodes."""
        for path in self.directory.glob("*.arena*"):  # with drafts of a process that was killed while it made one
            if path.name[:10].isdigit() and int(path.name[:10]) < generation:
                path.unlink(missing_ok=True)

    def close(self, member: str) -> None:
        """Removes this member's arenas, and the directories when they are empty then: a clean exit needs no copies."""
        self._own, self._peers = [], []
        for _, path in self._files():
            if path.name.endswith(f"-{member}.arena"):
                path.unlink(missing_ok=True)
        for directory in (self.directory, self.directory.parent):
            try:
                directory.rmdir()
            except OSError:
                return  # others still use it
