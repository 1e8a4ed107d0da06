"""Snapshots of units in named shared memory: on their own node and on other nodes.

Each unit has one *primary*: the rank that writes its copies. Units with the same primary and the same other holders
form a *bundle*. A bundle's bytes lie in one arena on each node that keeps it, with room for two versions. A primary
captures its units in its own arena, then sends those bytes with their digests to the peers' arenas, all in a courier's
thread.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from evermoe._native import Arena, Capture, CopyEngine
from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.copies.snapshot.bundles import Bundle, BundleArena
from evermoe.copies.snapshot.gpu_source import GpuSource
from evermoe.copies.snapshot.gpu_sources import GpuSources
from evermoe.copies.snapshot.segments import Segments, even
from evermoe.copies.snapshot.spare_room import SpareRoom, release_all
from evermoe.copies.snapshot.unit_tensors import ListedTensors, UnitTensors
from evermoe.errors import CorruptCopy
from evermoe.planning.protection import OWN_VERSIONS
from evermoe.process.memory_folder import check_private, make_private
from evermoe.process.run_claim import remove_run
from evermoe.process.warn import warn
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.training_state import TrainingState

MAX_TRIES = 3
"""Send attempts before `CorruptCopy`."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""Errors of a file system without enough space."""
_FILE = re.compile(r"^(\d{10})-.*\.arena$")


@dataclass(frozen=True)
class SnapshotUnit:
    """A complete version of one unit in an arena of this node."""

    unit: str
    version: int
    digest: int
    data: Tensor
    """uint8 `[nbytes]`, a view of the shared memory."""
    preset: str = ""
    """Preset of the job that wrote it; empty if unknown."""


def _has_version(path: Path) -> bool:
    """Return whether an arena has a version that a recovery could need."""
    try:
        return bool(Arena.open(str(path)).versions())
    except (CorruptCopy, FileNotFoundError):
        return False


def _all_files(directory: Path) -> list[Path]:
    """Return the arenas, including drafts of a process that was killed while it created one."""
    found = (path for path in directory.glob("*.arena*") if path.name[:10].isdecimal())
    return [path for path in found if not path.is_dir()]


def _reserve(arenas: Sequence[BundleArena]) -> str:
    """Reserve the space of arenas; return the reason of a failure, else an empty string."""
    try:
        for kept in arenas:
            kept.arena.reserve(kept.arena.mapped_bytes)
    except OSError as error:
        return str(error)
    return ""


def _gpu_of(state: TrainingState) -> int | None:
    return next((device.index or 0 for device in state.devices() if device.type == "cuda"), None)


def _open_engine() -> CopyEngine:
    engine = CopyEngine()
    engine.open()
    return engine


@dataclass
class SnapshotStore:
    """The arenas of this node's directory, and the exchange that fills them.

    `directory` belongs to one job and one node: its files outlive a crash of the process, not the node.
    """

    directory: Path
    state: TrainingState
    preset: str = ""
    """Preset of the job, which is written to its arenas."""
    chunk_bytes: int = 4 << 20
    """Maximum size of a message."""
    sources: GpuSources = field(default_factory=GpuSources)
    """Used by captures from a GPU."""
    engine: CopyEngine = field(default_factory=_open_engine)
    """Captures state to arenas, in a background thread."""
    own: list[BundleArena] = field(default_factory=list)
    """Arenas that this rank fills from its state."""
    peers: list[BundleArena] = field(default_factory=list)
    """Arenas that other ranks fill."""
    former: list[BundleArena] = field(default_factory=list)
    """Arenas of the previous plan. Closing them with their files takes time for each byte."""
    segments: Segments | None = None
    """Segments of the bundles, as planned; None for even ones."""
    room: SpareRoom | None = None
    """Space that this member has reserved as a spare, for its first arenas."""

    def __post_init__(self) -> None:
        self.listed = ListedTensors(self.state)
        """Lists the tensors that are captured."""

    def pace(self, is_idle: bool) -> None:
        """Let captures continue, or pause them except for a few transfers already on the GPU."""
        if is_idle:
            self.engine.open()
        else:
            self.engine.close_gate()

    def even_segments(self, copies: KeptCopies = NO_COPIES) -> Segments:
        """Return messages of `chunk_bytes`, bundle by bundle, in any window; omit units that the holders have."""
        sends = [
            segment
            for kept in self.own
            for peer in kept.bundle.holders[1:]
            for segment in even(kept.number, kept.arena, peer, copies.at(peer), self.chunk_bytes)
        ]
        receives = [
            segment
            for kept in self.peers
            for segment in even(kept.number, kept.arena, kept.bundle.holders[0], copies.here, self.chunk_bytes)
        ]
        return Segments(sends, receives)

    def newest_generation(self) -> int:
        """Return the newest generation of the arenas in the directory, drafts included; 0 if it has none."""
        return max((int(path.name[:10]) for path in _all_files(self.directory)), default=0)

    def check_folder(self) -> None:
        """Refuse memory that another user or another model has left behind.

        Raises:
            UnsafeFolder: as for `check_private`. ValueError: the memory is another model's. Both name the folder.
        """
        check_private(self.directory.parent)
        check_private(self.directory)
        for _, path in self._files():
            try:
                layout = json.loads(Arena.open(str(path)).meta).get("layout")
            except (CorruptCopy, FileNotFoundError):
                continue
            if layout != self.state.catalog.layout:
                raise ValueError(
                    f"{self.directory} holds an earlier run of this job, of another model or optimizer, or with other "
                    "slices or experts (sparse, snapshot_interval, expert_selection, replay). Resume it with its own "
                    f"script; or begin with another `evermoe run --job`, or remove the folder {self.directory.parent}."
                )

    def _files(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.directory.glob("*.arena")):
            match = _FILE.match(path.name)
            if match and not path.is_dir():
                yield int(match[1]), path

    def replace_arenas(
        self,
        planned: Sequence[Bundle],
        generation: int,
        membership: MembershipManager,
        copies: KeptCopies = NO_COPIES,
        *,
        reserves: bool = True,
    ) -> list[Bundle]:
        """Create new arenas next to those of earlier generations, or in their place if both do not fit.

        Collective. In place of them, only the members' own state survives a failure until the copies are made. Even
        then a running job keeps the arenas that fit.

        Args:
            planned: all bundles.
            generation: of the members.
            membership: all members.
            copies: the previous ones, which are discarded where earlier arenas are removed to make room.
            reserves: whether to reserve the space before returning; otherwise it is only free now, and the round
                reserves it.

        Returns:
            The bundles with the holders that have room for them; without holders where the primary has none.

        Raises:
            OSError: a job starts, and the shared memory is too small, even without the existing arenas.
        """
        everyone, member = membership.everyone, membership.id
        problem = self._try_arenas(planned, generation, member, everyone.rank, reserves)
        if problem and release_all(self.directory):
            problem = self._try_arenas(planned, generation, member, everyone.rank, reserves)
        if everyone.all_reduce(torch.tensor([int(not problem)])) == everyone.size:
            return list(planned)
        copies.forget()
        self.former = []
        if not reserves and not problem:  # other members are short of memory, and all wait now
            problem = _reserve([*self.own, *self.peers])
            if problem:
                self._give_up()
        if problem:
            warn(f"{problem}. Earlier copies are removed before the new ones exist")
            self.prune(generation)
        # When all members have reached this point, they have closed their earlier arenas and the memory is free.
        is_running = bool(everyone.all_reduce(torch.tensor([int(membership.established)])))
        full: list[int] = []
        if problem and is_running:
            full = self._create_fitting(planned, generation, member, everyone.rank)
        elif problem:
            self.create_arenas(planned, generation, member, everyone.rank)
        kept = [
            bundle.without({rank for rank, numbers in enumerate(everyone_full) if number in numbers})
            for everyone_full in [gather_json(everyone, full)]
            for number, bundle in enumerate(planned)
        ]
        self._keep_only(kept)
        return kept

    def _try_arenas(self, planned: Sequence[Bundle], generation: int, member: str, rank: int, reserves: bool) -> str:
        """Create all arenas of this rank, or none; return the reason of a failure, else an empty string."""
        try:
            self.create_arenas(planned, generation, member, rank, reserves=reserves)
        except OSError as error:
            return str(error)  # the error itself would keep arenas mapped
        finally:
            if self.room is not None:
                self.room.release()
                self.room = None
        return ""

    def _create_fitting(self, planned: Sequence[Bundle], generation: int, member: str, rank: int) -> list[int]:
        """Create the arenas that fit, first those that this rank fills; return the numbers of the others."""
        self.release()
        full, problem = [], ""
        mine = [(number, bundle) for number, bundle in enumerate(planned) if rank in bundle.holders]
        for number, bundle in sorted(mine, key=lambda each: each[1].holders[0] != rank):
            try:
                self._create_arena(number, bundle, generation, member, rank)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                full.append(number)
                problem = problem or str(error)
        if full:
            units = sum(len(planned[number].units) for number in full)
            warn(f"{problem}. {units} units are kept with fewer copies, until members change")
        return full

    def _keep_only(self, kept: Sequence[Bundle]) -> None:
        """Adopt the bundles that are kept: give up arenas of those whose primary has no room."""
        for each in (*self.own, *self.peers):
            each.bundle = kept[each.number]
            if not each.bundle.holders:
                each.arena.unlink()
        self.own = [each for each in self.own if each.bundle.holders]
        self.peers = [each for each in self.peers if each.bundle.holders]

    def create_arenas(
        self, planned: Sequence[Bundle], generation: int, member: str, rank: int, *, reserves: bool = True
    ) -> None:
        """Create new, empty arenas for the bundles of which this rank is the primary, and for its peers' bundles.

        The arenas of earlier generations stay until `prune`, since a failure would need them now; this member's arenas
        without a version are removed. Unless it reserves the space of the new ones, the space is only free now, and a
        round reserves it.

        Raises:
            UnsafeFolder: the directory is not this user's alone.
            OSError: the shared memory is too small; the message gives the bytes needed and free. No arena was created.
        """
        former = [] if reserves else [*self.own, *self.peers]
        self.release()
        self.former = former
        for made, path in self._files():
            if made < generation and path.name.endswith(f"-{member}.arena") and not _has_version(path):
                path.unlink(missing_ok=True)
        try:
            make_private(self.directory.parent)
            make_private(self.directory)
            for number, bundle in enumerate(planned):
                if rank in bundle.holders:
                    self._create_arena(number, bundle, generation, member, rank, reserves=reserves)
        except OSError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        for kept in (*self.own, *self.peers):
            kept.arena.unlink()
        self.release()

    def release(self) -> None:
        """Close this rank's arenas; their files stay."""
        self.own, self.peers, self.former, self.segments = [], [], [], None
        self.sources.clear()
        self.listed.forget()

    def _create_arena(
        self, number: int, bundle: Bundle, generation: int, member: str, rank: int, *, reserves: bool = True
    ) -> None:
        path = self.directory / f"{generation:010d}-{number}-{member}.arena"
        meta = json.dumps(
            {"generation": generation, "member": member, "layout": self.state.catalog.layout, "preset": self.preset}
        )
        units = [(name, self.state.catalog.by_name[name].nbytes) for name in bundle.units]
        room = None if self.room is None else self.room.take_file(OWN_VERSIONS * sum(nbytes for _, nbytes in units))
        arena = Arena.create(str(path), meta, units, reserves=reserves, room=room, gpu=_gpu_of(self.state))
        (self.own if bundle.holders[0] == rank else self.peers).append(BundleArena(number, bundle, arena))

    def capture(self, kept: BundleArena, tensors: UnitTensors, version: int) -> Capture | None:
        """Begin to capture the tensors of a bundle's units; None if they cannot be read in the background.

        That is the case if they are not contiguous, or on a GPU and many of them elsewhere.
        """
        gpu = tensors.gpu
        if not tensors.is_contiguous:
            return None
        if gpu is None:
            capture = self.engine.capture(kept.arena, version, tensors.runs, tensors.every)
        elif GpuSource.fits(tensors.every, gpu):
            source = self.sources.of(kept.number, tensors.every, gpu)
            capture = source.copy().capture(self.engine, kept.arena, version, [*map(len, tensors.by_unit)])
            self.sources.note_capture(kept.number, capture)
        else:
            return None
        kept.index = capture.index
        return capture

    def prepare(self, captured: Sequence[BundleArena]) -> list[UnitTensors]:
        """Return the tensors of bundles. Allocate what captures from a GPU need, before the first one is under way."""
        listed = self.listed.of([kept.bundle.units for kept in captured])
        for kept, tensors in zip(captured, listed, strict=True):
            every, gpu, number = tensors.every, tensors.gpu, kept.number
            if gpu and number not in self.sources and tensors.is_contiguous and GpuSource.fits(every, gpu):
                self.sources.of(number, every, gpu)
        return listed

    def stored(self) -> Iterator[SnapshotUnit]:
        """Yield every complete version of every unit in this node's memory, including those of dead processes."""
        for _, path in self._files():
            try:
                arena = Arena.open(str(path))
            except (CorruptCopy, FileNotFoundError):
                continue  # torn by a crash during its creation, or pruned by a peer on this node
            preset = str(json.loads(arena.meta).get("preset", ""))
            for index, version in arena.versions():
                try:
                    digests = arena.digests(index)
                except ValueError:
                    continue  # overwritten meanwhile: its owner lives on this node
                if (index, version) not in arena.versions():
                    continue  # also damaged, and the next version is complete already
                data = torch.from_numpy(arena.buffer(index))
                for (name, offset, nbytes), digest in zip(arena.units(), digests, strict=True):
                    yield SnapshotUnit(name, version, digest, data[offset : offset + nbytes], preset)

    def prune(self, generation: int) -> None:
        """Remove the arenas of earlier generations: a newer version is complete on all nodes."""
        self.former = []
        for path in _all_files(self.directory):
            if int(path.name[:10]) < generation:
                path.unlink(missing_ok=True)

    def close(self, member: str) -> None:
        """Remove this member's arenas, and the directories if they are empty: a clean exit needs no copies."""
        self.release()
        if self.room is not None:
            self.room.release()
        for _, path in self._files():
            if path.name.endswith(f"-{member}.arena"):
                path.unlink(missing_ok=True)
        remove_run(self.directory)
        for directory in (self.directory, self.directory.parent):
            try:
                directory.rmdir()
            except OSError:
                return  # other members still use it
