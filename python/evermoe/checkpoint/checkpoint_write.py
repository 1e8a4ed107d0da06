"""Writes one checkpoint, or one save of some units, in the background.

    begin ─ read ─ [update] ─ write ─ report to rank 0 ─ published by rank 0 ─ reported to all ─ VOTE

Every member writes its units to a draft in a background thread. The same threads report to rank 0 what is written; it
then publishes the checkpoint and notifies all members. The training thread waits only until its state is read.

The manifest of a save also has all other units, in the files of earlier saves.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evermoe._native import copy_units
from evermoe.checkpoint.checkpoint_store import CheckpointStore
from evermoe.checkpoint.manifest import CHECKPOINT, SAVE, Manifest, Part, Row, manifest_text
from evermoe.checkpoint.object_store import Location
from evermoe.checkpoint.unit_share import Share
from evermoe.comm import tags
from evermoe.comm.background_consensus import BackgroundConsensus
from evermoe.comm.group import Group
from evermoe.comm.membership import MembershipManager
from evermoe.comm.task import T, Task, Worker
from evermoe.errors import PeerLost, PersistFailed
from evermoe.state.still import is_frozen
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import digests_of, read_part, read_tensors

THREAD = "evermoe-checkpoint"
"""Name of the threads that write."""
PROGRESS_CHECKS, MAX_CHECK = 16, 1.0
"""Checks for late members per hang timeout, and the maximum number of seconds between two checks."""
MAX_PROBLEMS = 3
"""Ranks whose problems are named when a checkpoint cannot be written."""


class Result(NamedTuple):
    """A member's part of a checkpoint, or the published checkpoint; or the problem that prevented it."""

    value: Any = None
    problem: str = ""
    needs_all: bool = False
    """Whether a save was refused because units are missing that no earlier save has."""


class Increment(NamedTuple):
    """Contents of a save, which has some units only."""

    parts: Mapping[str, Part]
    """Ranges of the bytes of units that this rank writes in part."""
    resumed_from: int
    """Version from which the members resumed: newer saves of earlier members were undone."""


class CheckpointWrite:
    """One checkpoint or save on its way to the store. All ranks create it with the same arguments, except for `mine`.

    Args:
        store: the one on rank 0 publishes.
        state: this rank's units; they must not change before `wait_captured`.
        mine: names of the units that this rank writes. Over all ranks every unit of a checkpoint must be in exactly one
            `mine`, and of a save every byte of its units.
        version: of the state.
        generation: of the group's members.
        group: all members that train.
        attempt: a word that is the same on all ranks and unique to the attempt; a member that is alone needs none.
        worker: the thread that writes; None for a new one.
        increment: of a save; None for a checkpoint.

    Raises:
        PeerLost: a member is lost.
    """

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainingState,
        mine: Sequence[str],
        version: int,
        generation: int,
        group: Group,
        attempt: str = "",
        worker: Worker | None = None,
        increment: Increment | None = None,
    ) -> None:
        assert attempt or group.size == 1
        self.version, self._generation, self._increment = version, generation, increment
        self._store, self._state, self._mine, self._group = store, state, mine, group
        self._council = BackgroundConsensus(group, tags.CHECKPOINT if increment is None else tags.SAVE)
        kind = CHECKPOINT if increment is None else SAVE
        self._draft = store.draft(version, generation, attempt or uuid.uuid4().hex[:8], kind)
        self.needs_all = False
        """Whether a save was refused because units are missing that no earlier save has."""
        self._captured = threading.Event()
        self._is_busy = True
        """Whether it waits for this rank's disk, not for other ranks."""
        # Values that the script puts in a parameter's place meanwhile, as `EMA.applied` does, must not be written.
        self._tensors = dict(zip(mine, state.tensors(mine), strict=True))
        self._frozen = {name for name in mine if is_frozen(state, name)}
        self._task = self._start(self._run, worker)

    def wait_captured(self) -> None:
        """Wait until the state may change: the units that this rank writes are copied."""
        self._captured.wait()

    @property
    def is_over(self) -> bool:
        """Return whether this rank knows the outcome."""
        return self._task.is_over_within(0)

    def wait_at_most(self, seconds: float) -> None:
        """Wait for the outcome, but no longer than this."""
        self._task.is_over_within(seconds)

    def wait_published(self) -> Location:
        """Wait until the checkpoint is published; return its location.

        A rank waits for its own disk without a limit, and for other ranks as long as a collective would.

        Raises:
            PersistFailed: some rank could not write its part. All ranks raise it, and no other checkpoint changed.
            PeerLost: a member is lost or late, and this one does not know whether the checkpoint is published.
        """
        if self._group.size > 1:
            self._wait_for_others()
        if not self._task.wait():
            raise PeerLost(self._task.lost or "")
        assert self._task.result is not None
        name, problem, self.needs_all = self._task.result
        if problem:
            if self._council.rank == 0:
                self._start(lambda: self._store.discard(self._draft))
            raise PersistFailed(problem)
        path: Location = self._store.directory / name
        return path

    def _wait_for_others(self) -> None:
        limit, since, is_waiting = self._group.limit_seconds, time.monotonic(), False
        while not self._task.is_over_within(min(limit / PROGRESS_CHECKS, MAX_CHECK)):
            if is_waiting == self._is_busy:
                is_waiting, since = not is_waiting, time.monotonic()
                self._group.on_wait(is_waiting)
            elif is_waiting and time.monotonic() - since >= limit:
                self._group.timed_out = True
                self._group.drop("a checkpoint has stopped: a member is silent, or its disk is")
                break
        if is_waiting:
            self._group.on_wait(False, not self._group.broken)

    def _start(self, part: Callable[[], T], worker: Worker | None = None) -> Task[T]:
        device = next((t.device for tensors in self._tensors.values() for t in tensors if t.is_cuda), None)
        after = None if device is None else torch.cuda.current_stream(device).record_event()

        def run_in_background() -> None:
            if device is None:
                task.run()
                return
            with torch.cuda.stream(torch.cuda.Stream(device)):
                task.run()

        task = Task(part, after)
        if worker is not None:
            worker.submit(run_in_background)
        else:
            threading.Thread(target=run_in_background, name=THREAD, daemon=True).start()
        return task

    def _run(self) -> Result:
        mine = _tried(self._write)
        self._is_busy = False
        return Result(*self._council.decide(mine, self._conclude))

    def _write(self) -> list[Row]:
        """Write this rank's units and return their rows."""
        try:
            self._state.late.wait(self._mine)
            shares = [*self._read_complete(), *self._read_parts()]
        finally:
            self._tensors = {}
            self._captured.set()
        return self._store.write(self._draft, self._council.rank, shares)

    @property
    def _parts(self) -> Mapping[str, Part]:
        return {} if self._increment is None else self._increment.parts

    def _read_complete(self) -> list[Share]:
        """Return copies of the units of which this rank writes all bytes."""
        units = [self._state.catalog.by_name[name] for name in self._mine if name not in self._parts]
        copies = {unit.name: torch.empty(unit.nbytes, dtype=torch.uint8) for unit in units}
        contiguous = [name for name in copies if all(map(_is_in_one_piece, self._tensors[name]))]
        runs = [[(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors[name]] for name in contiguous]
        copy_units(runs, [copies[name].numpy() for name in contiguous])
        for name in copies.keys() - set(contiguous):
            read_tensors(self._tensors[name], copies[name])
        return [Share(unit, copies[unit.name], is_frozen=unit.name in self._frozen) for unit in units]

    def _read_parts(self) -> list[Share]:
        """Return copies of the parts that this rank writes, each with the digest of all the unit's bytes."""
        shares = []
        for name, part in self._parts.items():
            data = torch.empty(part.end - part.start, dtype=torch.uint8)
            read_part(self._tensors[name], part.start, data)
            shares.append(Share(self._state.catalog.by_name[name], data, part))
        found = digests_of([self._tensors[name] for name in self._parts])
        return [share._replace(digest=value) for share, value in zip(shares, found, strict=True)]

    def _conclude(self, everyone: list[Any]) -> Result:
        """Publish on rank 0 what all ranks have written, unless some could not."""
        parts = [Result(*each) for each in everyone]
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(parts) if each.problem]
        if problems:
            return Result(problem="; ".join(problems[:MAX_PROBLEMS]))
        rows = [Row.from_list(row) for each in parts for row in each.value]
        self._is_busy = True
        published = _tried(lambda: self._publish(rows))
        if isinstance(published.value, Result):
            return published.value
        return published._replace(problem=published.problem and f"rank 0: {published.problem}")

    def _publish(self, rows: list[Row]) -> str | Result:
        if self._increment is not None:
            base = self._store.newest_save(self._increment.resumed_from, self._generation)
            rows = rows + carried_rows(base, rows, self._state.catalog.experts(), self.version)
            missing = self._state.catalog.by_name.keys() - {row.unit for row in rows}
            if missing:
                what = f"no earlier save has {min(missing)}" + f" and {len(missing) - 1} other units" * (
                    len(missing) > 1
                )
                return Result(problem=what, needs_all=True)
        text = manifest_text(self.version, self._state.catalog.layout, rows)
        return str(self._store.publish(self._draft, self.version, text).name)


class BackgroundWriter:
    """Writes one checkpoint or save at a time. All members agree on whether one is under way.

    Args:
        state: this member's units.
        membership: the members that train.
        thread: name of the thread that writes.
    """

    def __init__(self, state: TrainingState, membership: MembershipManager, thread: str) -> None:
        self._state, self._membership, self._thread = state, membership, thread
        self.under_way: CheckpointWrite | None = None
        """The one that is under way, on all members or on none."""
        self._attempts: Iterator[str] = iter(())
        """Names of attempts, the same on all members."""
        self._worker: Worker | None = None

    def _name_attempts(self, word: str) -> None:
        self._attempts = (f"{word}{number:04x}" for number in itertools.count())

    def _begin_write(
        self, store: CheckpointStore, mine: Sequence[str], version: int, increment: Increment | None = None
    ) -> CheckpointWrite:
        """Begin to write; the arguments are those of `CheckpointWrite`."""
        group, generation = self._membership.trainer_group, self._membership.generation
        attempt, worker = next(self._attempts), self._worker or Worker(self._thread)
        self._worker = worker
        return CheckpointWrite(store, self._state, mine, version, generation, group, attempt, worker, increment)

    def before_update(self) -> None:
        """Wait until the state may change."""
        if self.under_way is not None:
            self.under_way.wait_captured()

    @property
    def is_over(self) -> bool:
        """Return whether one is under way and this member knows its outcome."""
        return self.under_way is not None and self.under_way.is_over

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def carried_rows(base: Manifest | None, rows: Sequence[Row], experts: Collection[str], version: int) -> list[Row]:
    """Return the rows that a save of a version keeps of the previous one.

    These are the newest versions of the units that it does not contain. Experts keep their previous version as well,
    as one of the two may be damaged. Of other units the previous save has it.
    """
    new, kept = {row.unit for row in rows}, []
    older = [
        saved for saved in ([] if base is None else base.saved) if saved.version < version or saved.unit not in new
    ]
    for unit, versions in itertools.groupby(older, key=lambda saved: saved.unit):
        number = (unit not in new) + (unit in experts)
        kept += [row for saved in itertools.islice(versions, number) for row in saved.rows]
    return kept


def _is_in_one_piece(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _tried(part: Callable[[], Any]) -> Result:
    try:
        return Result(part())
    except Exception as error:  # training continues after any error
        return Result(problem=str(error) or type(error).__name__)
