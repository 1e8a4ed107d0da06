"""Snapshots of units in named shared memory: on their own node and on other nodes.

Each unit has one *primary*: the rank that writes its copies. Units with the same primary and the same other holders
form a *bundle*; a bundle's bytes lie in one arena on each node that keeps it, with room for two versions. A primary
captures its units in its own arena, then sends those bytes, digests included, to the peers' arenas; all of it in a
courier's thread, beside training.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from evermoe._native import Arena, Capture, CopyEngine
from evermoe.chunks import ChunkedCopy
from evermoe.courier import Courier, Parcel
from evermoe.errors import CorruptCopy
from evermoe.units import SESSION, TrainingState

SLOTS = 4
"""Page-locked chunks that a capture from a GPU goes through."""
FIRST_TAG = 16
"""Of the messages of snapshots."""
_TAGS_EACH = 4096
_FILE = re.compile(r"^(\d{10})-.*\.arena$")


@dataclass(frozen=True)
class Bundle:
    """Units that travel together: `holders[0]` is the primary, the others keep copies for it."""

    holders: tuple[int, ...]
    units: tuple[str, ...]


def bundles(units: Sequence[str], holders: Sequence[Sequence[int]]) -> list[Bundle]:
    """Groups units by the ranks that keep their copies, in order of first appearance; `session` stays alone.

    Its tensors are on the CPU wherever the model is.

    Example: holders [[0, 1], [2, 3], [0, 1]] of units a, b, c → (0, 1): a, c and (2, 3): b.
    """
    grouped: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for unit, ranks in zip(units, holders, strict=True):
        grouped.setdefault((tuple(ranks), unit == SESSION), []).append(unit)
    return [Bundle(ranks, tuple(names)) for (ranks, _), names in grouped.items()]


@dataclass(frozen=True)
class StoredCopy:
    """A whole version of one unit in an arena of this node."""

    unit: str
    version: int
    digest: int
    data: Tensor
    """uint8 `[nbytes]`, a view of the shared memory."""


@dataclass
class KeptArena:
    """An arena of this node, for a bundle of the arrangement."""

    number: int
    """Of the bundle, the same on all its holders."""
    bundle: Bundle
    arena: Arena
    index: int = -1
    """The buffer that is being written."""
    chunks: tuple[list[int], ChunkedCopy] | None = None
    """Of tensors on a GPU at these addresses, what they are captured through."""


class Round:
    """One version on its way into the memories of all holders, in the thread of a courier.

    Nothing becomes visible before it is whole, and the version before it stays until then.
    """

    def __init__(self, store: CopyStore, version: int, courier: Courier, due: Collection[int] | None = None) -> None:
        self.version = version
        self._read_seconds = 0.0
        self._store, self._courier = store, courier
        self._own = [kept for kept in store.own if due is None or kept.number in due]
        self._peers = [kept for kept in store.peers if due is None or kept.number in due]
        self._read = threading.Event()
        """What the engine cannot capture was read by the courier."""
        self._captures = [store.capture(kept, version) for kept in self._own]
        self.errand = courier.go(self._run)
        """Its result: whether all copies that came match their digests."""

    @property
    def capture_seconds(self) -> float:
        """That this member took so far to capture its units."""
        return self._read_seconds + sum(capture.seconds_busy for capture in self._captures if capture is not None)

    def wait_captured(self) -> None:
        """Until the state may be changed: this version of it is in the arenas of its primaries."""
        for capture in self._captures:
            if capture is not None:
                capture.hurry()
        for capture in self._captures:
            if capture is not None:
                capture.wait()
        self._read.wait()

    def _run(self) -> bool:
        started = time.monotonic()
        try:
            for kept, capture in zip(self._own, self._captures, strict=True):
                if capture is None:
                    self._read_units(kept)
        finally:
            self._read_seconds = time.monotonic() - started
            self._read.set()
        arriving = [self._courier.receive(parcel) for kept in self._peers for parcel in self._incoming(kept)]
        pairs = zip(self._own, self._captures, strict=True)
        self._courier.send(parcel for kept, capture in pairs for parcel in self._outgoing(kept, capture))
        for capture in self._captures:
            if capture is not None:
                capture.wait()
        for transfer in arriving:
            transfer.wait()
        return all([self._is_whole(kept) for kept in self._peers])

    def _read_units(self, kept: KeptArena) -> None:
        kept.index = kept.arena.begin(self.version)
        data = torch.from_numpy(kept.arena.buffer(kept.index))
        for name, offset, nbytes in kept.arena.units():
            self._store.state.read(name, data[offset : offset + nbytes])
        kept.arena.commit(kept.index)

    def _incoming(self, kept: KeptArena) -> Iterator[Parcel]:
        kept.index = kept.arena.begin(self.version)
        return self._parcels(kept, kept.bundle.holders[0])

    def _outgoing(self, kept: KeptArena, capture: Capture | None) -> Iterator[Parcel]:
        """Each chunk as soon as it is captured; the first one, with the digests, when all are."""
        for holder in kept.bundle.holders[1:]:
            chunks = list(self._parcels(kept, holder))
            for place in [*range(1, len(chunks)), 0]:
                if capture is not None:
                    end = min((place + 1) * self._store.chunk_bytes, kept.arena.payload_bytes)
                    capture.wait(end if place else None)
                yield chunks[place]

    def _parcels(self, kept: KeptArena, peer: int) -> Iterator[Parcel]:
        data = torch.from_numpy(kept.arena.buffer(kept.index))
        for place, start in enumerate(range(0, len(data), self._store.chunk_bytes)):
            tag = FIRST_TAG + kept.number * _TAGS_EACH + place % _TAGS_EACH
            yield Parcel(data[start : start + self._store.chunk_bytes], peer, tag)

    @staticmethod
    def _is_whole(kept: KeptArena) -> bool:
        try:
            kept.arena.commit_received(kept.index)
        except CorruptCopy:
            return False
        return True


def _open_engine() -> CopyEngine:
    engine = CopyEngine()
    engine.open()
    return engine


@dataclass
class CopyStore:
    """The arenas of this node's directory and the exchange that fills them.

    `directory` belongs to one job and one node: its files outlive a crash of the process, not the node.
    """

    directory: Path
    state: TrainingState
    chunk_bytes: int = 1 << 20
    """Size of a message."""
    engine: CopyEngine = field(default_factory=_open_engine)
    """Captures state in arenas, in a thread of its own."""
    own: list[KeptArena] = field(default_factory=list)
    """Arenas that this rank fills from its state."""
    peers: list[KeptArena] = field(default_factory=list)
    """Arenas that other ranks fill."""

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
        self.own, self.peers = [], []
        for number, bundle in enumerate(arrangement):
            if rank not in bundle.holders:
                continue
            path = self.directory / f"{generation:010d}-{number}-{member}.arena"
            meta = json.dumps({"generation": generation, "member": member, "layout": self.state.layout})
            units = [(name, self.state.by_name[name].nbytes) for name in bundle.units]
            kept = KeptArena(number, bundle, Arena.create(str(path), meta, units))
            (self.own if bundle.holders[0] == rank else self.peers).append(kept)

    def capture(self, kept: KeptArena, version: int) -> Capture | None:
        """Begins to capture a bundle's units as they are now; None if they are on several devices or not contiguous."""
        tensors = self.state.tensors(kept.bundle.units)
        every = [tensor for each in tensors for tensor in each]
        if len({tensor.device for tensor in every}) != 1 or not all(tensor.is_contiguous() for tensor in every):
            return None
        if every[0].is_cuda:
            capture = self._through_chunks(kept, every).capture(self.engine, kept.arena, version, [*map(len, tensors)])
        else:
            runs = [[(tensor.data_ptr(), tensor.nbytes) for tensor in each] for each in tensors]
            capture = self.engine.capture(kept.arena, version, runs, every)
        kept.index = capture.index
        return capture

    def _through_chunks(self, kept: KeptArena, tensors: list[Tensor]) -> ChunkedCopy:
        """Page-locked chunks for tensors on a GPU, made once as long as the tensors stay where they are."""
        places = [tensor.data_ptr() for tensor in tensors]
        if kept.chunks is None or kept.chunks[0] != places:
            kept.chunks = places, ChunkedCopy(tensors, slots=SLOTS)
        return kept.chunks[1]

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
        self.own, self.peers = [], []
        for _, path in self._files():
            if path.name.endswith(f"-{member}.arena"):
                path.unlink(missing_ok=True)
        for directory in (self.directory, self.directory.parent):
            try:
                directory.rmdir()
            except OSError:
                return  # others still use it
