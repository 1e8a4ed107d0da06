"""One checkpoint on its way to disk, beside training.

    begin ─ read ─ [update] ─ write ─ say so to rank 0 ─ published by it ─ known to all ─ VOTE: all know

Every member writes its units to a draft in a thread of its own. The same threads tell rank 0 what is written, which
then publishes it and tells all. The training thread waits for nothing but that its state is read.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evermoe._native import copy_units
from evermoe.comm.background_consensus import BackgroundConsensus
from evermoe.comm.group import Group
from evermoe.comm.tags import CHECKPOINT
from evermoe.comm.task import T, Task, Worker
from evermoe.errors import PeerLost, PersistFailed
from evermoe.persist.checkpoint_store import CheckpointStore
from evermoe.persist.manifest import Entry, manifest_text
from evermoe.persist.object_store import Location
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import read_tensors

THREAD = "evermoe-checkpoint"
"""Name of the threads that write."""
PROGRESS_CHECKS, MAX_CHECK = 16, 1.0
"""Looks whether others are late, per hang limit, and the seconds between two of them at most."""
MAX_PROBLEMS = 3
"""Ranks whose problems are named when a checkpoint cannot be written."""


class Result(NamedTuple):
    """What a member did of a checkpoint, or became of it; or why that could not be."""

    value: Any = None
    problem: str = ""


class CheckpointWrite:
    """One checkpoint on its way to the store. All ranks make it alike.

    Args:
        store: of rank 0 the one that publishes.
        state: this rank's units; not to be changed before `wait_captured`.
        mine: names of the units that this rank writes. Over all ranks every unit must be in exactly one `mine`.
        version: of the state.
        generation: of the group's members.
        group: all that train.
        attempt: the same word on all ranks, which no other attempt has; a member that is alone needs none.
        worker: the thread that writes; None for a new one.

    Raises:
        PeerLost: a member is gone.
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
    ) -> None:
        assert attempt or group.size == 1
        self.version = version
        self._store, self._state, self._mine, self._group = store, state, mine, group
        self._council = BackgroundConsensus(group, CHECKPOINT)
        self._draft = store.draft(version, generation, attempt or uuid.uuid4().hex[:8])
        self._captured = threading.Event()
        self._is_busy = True
        """Whether it waits for this rank's disk, not for other ranks."""
        # What the script puts in a parameter's place meanwhile, as `EMA.applied` does, is not what is written.
        self._tensors = dict(zip(mine, state.tensors(mine), strict=True))
        self._task = self._start(self._run, worker)

    def wait_captured(self) -> None:
        """Waits until the state may be changed: what this rank writes of it is in memory of its own."""
        self._captured.wait()

    @property
    def is_over(self) -> bool:
        """Whether this rank knows what became of it."""
        return self._task.is_over_within(0)

    def complete(self) -> Location:
        """Waits until it is published; returns where it is.

        A rank waits for its own disk as long as that takes, and for others as long as a collective would.

        Raises:
            PersistFailed: some rank could not do its part; the same on all of them, and no other checkpoint changed.
            PeerLost: a member is gone or late, and this one does not know whether it is published.
        """
        if self._group.size > 1:
            self._wait_for_others()
        if not self._task.wait():
            raise PeerLost(self._task.lost or "")
        assert self._task.result is not None
        name, problem = self._task.result
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

        def run_beside() -> None:
            if device is None:
                task.run()
                return
            with torch.cuda.stream(torch.cuda.Stream(device)):
                task.run()

        task = Task(part, after)
        if worker is not None:
            worker.submit(run_beside)
        else:
            threading.Thread(target=run_beside, name=THREAD, daemon=True).start()
        return task

    def _run(self) -> Result:
        mine = _tried(self._write)
        self._is_busy = False
        return Result(*self._council.decide(mine, self._conclude))

    def _write(self) -> Mapping[str, Entry]:
        """Writes this rank's units, and says where they are."""
        try:
            copies = self._read()
        finally:
            self._tensors = {}
            self._captured.set()
        units = {name: (self._state.catalog.by_name[name], data) for name, data in copies.items()}
        return self._store.write(self._draft, self._council.rank, units)

    def _read(self) -> dict[str, Tensor]:
        """Copies of this rank's units, uint8 `[nbytes]`."""
        sizes = {name: self._state.catalog.by_name[name].nbytes for name in self._mine}
        copies = {name: torch.empty(nbytes, dtype=torch.uint8) for name, nbytes in sizes.items()}
        there = [name for name in self._mine if all(map(_is_in_one_piece, self._tensors[name]))]
        runs = [[(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors[name]] for name in there]
        copy_units(runs, [copies[name].numpy() for name in there])
        for name in copies.keys() - set(there):
            read_tensors(self._tensors[name], copies[name])
        return copies

    def _conclude(self, everyone: list[Any]) -> Result:
        """On rank 0: publishes what all have written, unless some could not."""
        parts = [Result(*each) for each in everyone]
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(parts) if each.problem]
        if problems:
            return Result(problem="; ".join(problems[:MAX_PROBLEMS]))
        units = {name: entry for each in parts for name, entry in each.value.items()}
        self._is_busy = True
        text = manifest_text(self.version, self._state.catalog.layout, units)
        published = _tried(lambda: str(self._store.publish(self._draft, self.version, text).name))
        return published._replace(problem=published.problem and f"rank 0: {published.problem}")


def _is_in_one_piece(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _tried(part: Callable[[], Any]) -> Result:
    try:
        return Result(part())
    except Exception as error:  # whatever it is, training continues
        return Result(problem=str(error) or type(error).__name__)
