"""Checkpoints of a session, written beside training: read while the next step computes, agreed on at the votes.

    begin ─ read ─ [update] ─ write ─ VOTE: all have written ─ publish ─ VOTE: it is published

Every member writes its units to a draft in a thread of its own. What the ballots say, all members see at the same
step; so all know alike whether a checkpoint is under way.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.membership import Membership
from evermoe.comm.task import Task
from evermoe.errors import PersistFailed
from evermoe.events import Checkpoint, Listener
from evermoe.options import Options, option
from evermoe.persist.checkpoint_store import CheckpointStore, find, is_read_only, open_store
from evermoe.persist.manifest import Entry, manifest_text
from evermoe.persist.owner import Owner
from evermoe.persist.place import PATIENCE, Location, locate
from evermoe.persist.retention import Retention
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import primary_units, read_tensors
from evermoe.state.version import step_of

MOST_PROBLEMS = 3
"""Ranks whose problems are named when a checkpoint cannot be written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """Where and when checkpoints are written."""

    checkpoint_dir: str | Path | None = None
    """Folder for checkpoints on a file system that all members share, or a URL such as `s3://bucket/run`; None for
    none."""
    checkpoint_every: int = option(0, shared=True, least=0)
    """Steps between checkpoints; 0 for none. With a checkpoint_dir one is also written at the end."""
    keep_checkpoints: int = option(2, shared=True, least=1)
    """How many of the newest checkpoints stay on disk."""
    keep_checkpoint_every: int = option(0, shared=True, least=0)
    """Checkpoints of the steps that are multiples of it stay for ever; 0: none do."""
    checkpoint_patience: float = option(PATIENCE, above=0)
    """Seconds for which a request to the URL of a checkpoint_dir is tried again, with back-off, before it fails."""
    checkpoint_upload_limit: float = option(0.0, least=0)
    """Bytes per second that each member writes to the URL of a checkpoint_dir at most; 0 for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise ValueError("checkpoint_every is set, so checkpoint_dir must say where to write")

    def checkpoints(self, patience: float | None = None) -> Location | None:
        """Where checkpoints are; None for nowhere.

        Args:
            patience: of requests to a URL; None for that of the options.

        Raises:
            ValueError: checkpoint_dir is a URL of no known kind, or has credentials.
            OSError: there are no credentials for it.
        """
        if self.checkpoint_dir is None:
            return None
        patience = self.checkpoint_patience if patience is None else min(patience, self.checkpoint_patience)
        return locate(self.checkpoint_dir, patience=patience, upload_limit=self.checkpoint_upload_limit)


class Result(NamedTuple):
    """What a rank did of a checkpoint, or why it could not."""

    value: Any = None
    problem: str = ""


class CheckpointWrite:
    """One checkpoint on its way to the store. All ranks make and drive it alike.

    Args:
        store: of rank 0 the one that publishes.
        state: this rank's units; not to be changed before `wait_captured`.
        mine: names of the units that this rank writes. Over all ranks every unit must be in exactly one `mine`.
        version: of the state.
        generation: of the group's members.
        group: all that train.

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
    ) -> None:
        self.version = version
        self._store, self._state, self._mine, self._group = store, state, mine, group
        attempt = gather_json(group, uuid.uuid4().hex[:8])[0]
        self._draft = store.draft(version, generation, attempt)
        self._captured = threading.Event()
        # What the script puts in a parameter's place meanwhile, as `EMA.applied` does, is not what is written.
        self._tensors = dict(zip(mine, state.tensors(mine), strict=True))
        self._is_publishing = False
        self._task = self._start(self._write)

    def wait_captured(self) -> None:
        """Waits until the state may be changed: what this rank writes of it is in memory of its own."""
        self._captured.wait()

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing to do before the next `agree`."""
        return self._task.is_over_within(0)

    def agree(self) -> Location | None:
        """Tells all ranks what each has done, which must be over on all of them; collective.

        Returns:
            Where the checkpoint is, when it is published. None when all have written their units: rank 0 begins to
            publish it.

        Raises:
            PersistFailed: some rank could not do its part; the same on all of them, and no other checkpoint changed.
            PeerLost: a member is gone.
        """
        self._task.wait()
        everyone = [Result(*each) for each in gather_json(self._group, self._task.result)]
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(everyone) if each.problem]
        if problems:
            if self._group.rank == 0:
                self._start(lambda: self._store.discard(self._draft))
            raise PersistFailed("; ".join(problems[:MOST_PROBLEMS]))
        if self._is_publishing:
            path: Location = self._store.directory / everyone[0].value
            return path
        self._is_publishing = True
        units = {name: entry for each in everyone for name, entry in each.value.items()}
        self._task = self._start(lambda: self._publish(units) if self._group.rank == 0 else None)
        return None

    def complete(self) -> Location:
        """Waits until it is published; collective. Raises what `agree` does."""
        while True:
            path = self.agree()
            if path is not None:
                return path

    def _start(self, part: Callable[[], Any]) -> Task[Result]:
        def run() -> Result:
            try:
                return Result(part())
            except Exception as error:  # whatever it is, training continues
                return Result(problem=str(error) or type(error).__name__)

        device = next((t.device for units in self._state.tensors(self._mine) for t in units if t.is_cuda), None)
        after = None if device is None else torch.cuda.current_stream(device).record_event()

        def run_beside() -> None:
            if device is None:
                task.run()
                return
            with torch.cuda.stream(torch.cuda.Stream(device)):
                task.run()

        task = Task(run, after)
        threading.Thread(target=run_beside, name="evermoe-checkpoint", daemon=True).start()
        return task

    def _write(self) -> Mapping[str, Entry]:
        """Writes this rank's units, and says where they are."""
        try:
            copies = {name: self._read(name) for name in self._mine}
        finally:
            self._tensors = {}
            self._captured.set()
        units = {name: (self._state.catalog.by_name[name], data) for name, data in copies.items()}
        return self._store.write(self._draft, self._group.rank, units)

    def _read(self, name: str) -> Tensor:
        data = torch.empty(self._state.catalog.by_name[name].nbytes, dtype=torch.uint8)
        read_tensors(self._tensors[name], data)
        return data

    def _publish(self, units: dict[str, Any]) -> str:
        text = manifest_text(self.version, self._state.catalog.layout, units)
        return str(self._store.publish(self._draft, self.version, text).name)


class Checkpointer:
    """When a session writes checkpoints, and which units each of its members writes.

    Args:
        options: where, and when.
        state: this member's units.
        membership: the job, and who trains.
        emit: is told of every checkpoint that is published.

    Raises:
        ValueError: another job runs in the folder, or its checkpoints are of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self, options: CheckpointOptions, state: TrainingState, membership: Membership, emit: Listener
    ) -> None:
        self._options, self._state, self._membership, self._emit = options, state, membership, emit
        self._newest = -1
        self._write: CheckpointWrite | None = None
        """The checkpoint that is under way, on all members or none."""
        self._is_owed = False
        """Whether the one that was under way when members changed was given up."""
        self._published = 0
        """Steps taken in the newest checkpoint on disk."""
        self._store: CheckpointStore | None = None
        where = options.checkpoints()
        if where is not None and is_read_only(where):
            if options.checkpoint_every:
                raise ValueError(
                    f"checkpoint_every is set, but checkpoint_dir {where} can only be read: write to a folder, s3://, "
                    "gs:// or az://"
                )
        elif where is not None and membership.role == "train":
            owner = Owner(membership.identity.job, state.catalog.layout)
            retention = Retention(options.keep_checkpoints, options.keep_checkpoint_every)
            self._store = open_store(where, owner, membership.id, retention)
            if options.checkpoint_every:
                with suppress(OSError):  # a place that does not answer now may do so later
                    self._published = max(map(step_of, find(where, state.catalog.layout)), default=0)

    def newest_generation(self) -> int:
        """The newest generation that wrote to the folder; 0 if there is none."""
        return 0 if self._store is None else self._store.newest_generation()

    def restart(self, generation: int) -> None:
        """The members of a generation resume: what was written may be unknown to some, what was begun is void.

        Collective.
        """
        if self._membership.role != "train":
            return
        group = self._membership.trainer_group
        self._is_owed = any(gather_json(group, self._is_owed or self._write is not None))
        self._newest, self._write = -1, None
        if self._store is not None and group.rank == 0:
            self._store.sweep(generation)

    # ---- a step

    def before_update(self) -> None:
        """Waits until the state may be changed."""
        if self._write is not None:
            self._write.wait_captured()

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint is under way, and this member has done its part of it."""
        return self._write is not None and self._write.is_over

    def begin_if_due(self, version: int) -> bool:
        """Begins the checkpoint of the state, which is that of `version`, if that is due; collective.

        Returns:
            Whether it has begun; the same on all members that train.

        Raises:
            PeerLost: a member is gone.
        """
        every, step = self._options.checkpoint_every, step_of(version)
        is_due = self._is_owed or (bool(every) and step % every == 0)
        if self._store is None or not is_due:
            return False
        if self._write is not None:
            warnings.warn(
                f"the checkpoint of step {step} is left out: that of step {step_of(self._write.version)} is still "
                "being written",
                stacklevel=5,
            )
            return False
        self._is_owed = False
        self._write = self._begin(version)
        return True

    def _begin(self, version: int) -> CheckpointWrite:
        assert self._store is not None
        group, generation = self._membership.trainer_group, self._membership.generation
        mine = primary_units(self._state.catalog.units, self._state.active(group.size), group.rank, group.size)
        return CheckpointWrite(self._store, self._state, mine, version, generation, group)

    def advance(self) -> None:
        """All members have done their parts of what is under way; collective. A failure is told by a warning.

        Raises:
            PeerLost: a member is gone.
        """
        assert self._write is not None
        version = self._write.version
        try:
            path = self._write.agree()
        except PersistFailed as failed:
            self._write = None
            warnings.warn(
                f"the checkpoint of step {step_of(version)} was not written: {failed}. Training continues, and the "
                "next one is tried when it is due",
                stacklevel=5,
            )
            return
        if path is not None:
            self._write = None
            self._note(version, path)

    def _note(self, version: int, path: Location) -> None:
        self._newest, self._published = version, step_of(version)
        self._emit(Checkpoint(step_of(version), str(path)))

    def lag(self, step: int) -> dict[str, int]:
        """Steps since the newest checkpoint, after so many; empty where none are due."""
        is_due = self._store is not None and self._options.checkpoint_every
        return {"checkpoint": max(0, step - self._published)} if is_due else {}

    # ---- the end

    def finish(self, version: int) -> None:
        """Waits for what is under way, then for the checkpoint of the state, which is that of `version`; collective.

        Raises:
            PersistFailed: the latter could not be written; the same on all members.
            PeerLost: a member is gone, and nothing is written.
        """
        while self._write is not None and self._write.version != version:
            self.advance()
        if self._store is None or self._newest == version:
            return
        path = self._find(version)
        if path is None:
            self._write = write = self._write or self._begin(version)
            try:
                path = write.complete()
            finally:
                self._write = None
            self._note(version, path)

    def _find(self, version: int) -> Location | None:
        """Folder of the checkpoint if it is there, as rank 0 finds it; None while it is under way."""
        assert self._store is not None
        if self._write is not None:
            return None
        group, directory = self._membership.trainer_group, self._store.directory
        path = None
        if group.rank == 0:
            with contextlib.suppress(OSError):  # then it is written, or that says why it cannot be
                path = find(directory).get(version)
        name = gather_json(group, None if path is None else path.name)[0]
        return None if name is None else directory / name

    def close(self) -> None:
        """Lets other jobs have the folder."""
        if self._store is not None:
            self._store.close()
