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
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe._native import Arena, Capture, CopyEngine
from evermoe.chunks import ChunkedCopy
from evermoe.courier import Courier, Listener, Parcel
from evermoe.errors import CorruptCopy
from evermoe.units import SESSION, TrainingState
from evermoe.versions import step_of

MOST_TRIES = 3
"""In which copies must arrive with the bytes that were sent."""
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


class Cut(NamedTuple):
    """A part of a bundle's bytes that travels as one message."""

    bundle: int
    """Number of the bundle."""
    peer: int
    """The rank at the other end."""
    place: int
    """Which of the messages of this bundle from its primary to one holder; both ends count alike."""
    offset: int
    nbytes: int
    window: int | None = None
    """Of the sender's step: see `Parcel.window`."""

    @property
    def tag(self) -> int:
        """Of the message."""
        return FIRST_TAG + self.bundle * _TAGS_EACH + self.place % _TAGS_EACH


class Cuts(NamedTuple):
    """How what this rank sends and receives is cut, from the same plans on all ranks."""

    sends: Sequence[Cut]
    """In this order."""
    receives: Sequence[Cut]


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

    Nothing becomes visible before it is whole, and the version before it stays until then. `emit` is told of `chunk`
    and `published`, in the courier's thread: see `evermoe.Session`.
    """

    def __init__(
        self,
        store: CopyStore,
        version: int,
        courier: Courier,
        due: Collection[int] | None = None,
        emit: Listener = lambda name, fields: None,
    ) -> None:
        self.version = version
        self._emit = emit
        self._sent_bytes = 0
        self._read_seconds = 0.0
        self._store, self._courier = store, courier
        self._own = [kept for kept in store.own if due is None or kept.number in due]
        self._peers = [kept for kept in store.peers if due is None or kept.number in due]
        cuts = store.cuts or store.even_cuts()
        self._sends, self._receives = (
            [cut for cut in all_cuts if due is None or cut.bundle in due] for all_cuts in cuts
        )
        self._total_bytes = sum(cut.nbytes for cut in self._sends)
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
        for kept in self._peers:
            kept.index = kept.arena.begin(self.version)
        arriving = [self._courier.receive(parcel) for parcel in self._parcels(self._receives, self._peers)]
        self._courier.send(self._captured(), self._note_sent)
        for capture in self._captures:
            if capture is not None:
                capture.wait()
        for transfer in arriving:
            self._courier.arrived(transfer)
        return all([self._is_whole(kept) for kept in self._peers])

    def _note_sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
        self._emit("chunk", {"step": step_of(self.version), "sent": self._sent_bytes, "total": self._total_bytes})

    def _read_units(self, kept: KeptArena) -> None:
        kept.index = kept.arena.begin(self.version)
        data = torch.from_numpy(kept.arena.buffer(kept.index))
        for name, offset, nbytes in kept.arena.units():
            self._store.state.read(name, data[offset : offset + nbytes])
            self._courier.progress += 1
        kept.arena.commit(kept.index)

    def _captured(self) -> Iterator[Parcel]:
        """What is sent, each part as soon as it is captured; the one with the digests when all of its bundle is."""
        captures = {kept.number: capture for kept, capture in zip(self._own, self._captures, strict=True)}
        for cut, parcel in zip(self._sends, self._parcels(self._sends, self._own), strict=True):
            capture = captures[cut.bundle]
            if capture is not None:
                capture.wait(cut.offset + cut.nbytes if cut.offset else None)
            yield parcel

    @staticmethod
    def _parcels(cuts: Sequence[Cut], arenas: Sequence[KeptArena]) -> Iterator[Parcel]:
        buffers = {kept.number: torch.from_numpy(kept.arena.buffer(kept.index)) for kept in arenas}
        for cut in cuts:
            data = buffers[cut.bundle][cut.offset : cut.offset + cut.nbytes]
            yield Parcel(data, cut.peer, cut.tag, cut.window)

    def _is_whole(self, kept: KeptArena) -> bool:
        try:
            kept.arena.commit_received(kept.index)
        except CorruptCopy:
            return False
        finally:
            self._courier.progress += 1
        self._emit("published", {"step": step_of(self.version), "units": len(kept.bundle.units)})
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
    """Size of a message at most."""
    engine: CopyEngine = field(default_factory=_open_engine)
    """Captures state in arenas, in a thread of its own."""
    own: list[KeptArena] = field(default_factory=list)
    """Arenas that this rank fills from its state."""
    peers: list[KeptArena] = field(default_factory=list)
    """Arenas that other ranks fill."""
    cuts: Cuts | None = None
    """How the bundles are cut, as planned; None to cut them evenly."""

    def even_cuts(self) -> Cuts:
        """Messages of `chunk_bytes`, one bundle after the other, to any window."""
        sends = [cut for kept in self.own for peer in kept.bundle.holders[1:] for cut in self._even(kept, peer)]
        return Cuts(sends, [cut for kept in self.peers for cut in self._even(kept, kept.bundle.holders[0])])

    def _even(self, kept: KeptArena, peer: int) -> Iterator[Cut]:
        total = kept.arena.payload_bytes
        starts = range(0, total, self.chunk_bytes)
        for place, start in enumerate([*starts[1:], 0]):  # the digests last: they are known when all is captured
            yield Cut(kept.number, peer, place, start, min(self.chunk_bytes, total - start))

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
        self.own, self.peers, self.cuts = [], [], None
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
