"""When a session writes checkpoints. How they are written beside training is in `evermoe.persist.checkpoint_write`.

What the ballots say, all members see at the same step; so all know alike whether a checkpoint is under way. The
training thread exchanges nothing else for them while the members stay the same.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.task import Worker
from evermoe.config.checkpoints import Checkpoints
from evermoe.errors import PersistFailed
from evermoe.events import Checkpoint, Listener
from evermoe.persist.checkpoint_store import CheckpointStore, find, is_read_only, open_store
from evermoe.persist.checkpoint_write import THREAD, CheckpointWrite
from evermoe.persist.object_store import Location, locate
from evermoe.persist.owner import Owner
from evermoe.persist.retention import Retention
from evermoe.persist.save_place import place_to_save
from evermoe.run_claim import Run
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import primary_units
from evermoe.state.version import step_of
from evermoe.warn import warn


def find_location(options: Checkpoints, patience: float | None = None) -> Location | None:
    """Return where checkpoints are; None without any.

    Args:
        options: of the session.
        patience: seconds during which a request to a URL is retried; None for that of the options.

    Raises:
        ValueError: the URL is of no known kind, or has credentials.
        OSError: there are no credentials for it.
    """
    if options.url is None:
        return None
    patience = options.store_timeout if patience is None else min(patience, options.store_timeout)
    limits = {"upload_limit": options.upload_limit, "download_limit": options.download_limit}
    return locate(options.url, patience=patience, **limits)


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
        self, options: Checkpoints, state: TrainingState, membership: MembershipManager, emit: Listener
    ) -> None:
        self._options, self._state, self._membership, self._emit = options, state, membership, emit
        self._newest = -1
        self._path: Location | None = None
        """Of the newest checkpoint."""
        self._write: CheckpointWrite | None = None
        """The checkpoint that is under way, on all members or none."""
        self._mine: list[str] | None = None
        """What this member writes of each, as long as the members stay the same; None: not known yet."""
        self._attempts: Iterator[str] = iter(())
        """Names of attempts, the same on all members."""
        self._worker: Worker | None = None
        """The thread that writes."""
        self._is_told = False
        """Whether a warning has told that checkpoints are left out while one is under way."""
        self._is_owed = False
        """Whether the one that was under way when members changed was given up."""
        self._published = 0
        """Steps taken in the newest checkpoint on disk."""
        self._store: CheckpointStore | None = None
        where = find_location(options)
        if where is not None and is_read_only(where):
            if options.interval:
                raise ValueError(
                    f"checkpoints: interval is {options.interval} steps, but {where} can only be read: write to a "
                    "folder, s3://, gs:// or az://"
                )
        elif where is not None and membership.role == "train":
            owner = Owner(membership.identity.job, state.catalog.layout)
            retention = Retention(options.keep, options.keep_interval)
            self._store = open_store(where, owner, membership.id, retention)
            if options.interval:
                with suppress(OSError):  # a place that does not answer now may do so later
                    self._published = max(map(step_of, find(where, state.catalog.layout)), default=0)

    @property
    def writes(self) -> bool:
        """Whether this member writes checkpoints."""
        return self._store is not None

    def newest_generation(self) -> int:
        """The newest generation that wrote to the folder; 0 if there is none."""
        return 0 if self._store is None else self._store.newest_generation()

    def found(self) -> Run | None:
        """The run that the place of the checkpoints belongs to."""
        return None if self._store is None else self._store.found()

    def take(self, run: Run, patience: float) -> None:
        """Takes the place of the checkpoints for a run.

        Raises:
            FolderInUse: members of another run live and hold it.
        """
        if self._store is not None:
            self._store.take(run, patience)

    def restart(self, generation: int) -> None:
        """The members of a generation resume: what was written may be unknown to some, what was begun is void.

        Collective.
        """
        if self._membership.role != "train":
            return
        group = self._membership.trainer_group
        told = gather_json(group, (self._is_owed or self._write is not None, uuid.uuid4().hex[:8]))
        self._is_owed = any(is_owed for is_owed, _ in told)
        self._attempts = (f"{told[0][1]}{number:04x}" for number in itertools.count())
        if self._write is not None and not self._write.is_over:
            self._end_worker()  # which may be busy with what is void for as long as the disk takes
        self._newest, self._write, self._mine = -1, None, None
        if self._store is not None and group.rank == 0:  # the members do not wait for the disk
            threading.Thread(target=self._store.sweep, args=[generation], name="evermoe-sweep", daemon=True).start()

    # ---- a step

    def before_update(self) -> None:
        """Waits until the state may be changed."""
        if self._write is not None:
            self._write.wait_captured()

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint is under way, and this member knows what became of it."""
        return self._write is not None and self._write.is_over

    def begin_if_due(self, version: int) -> bool:
        """Begins the checkpoint of the state, which is that of `version`, if that is due; on all members alike.

        Returns:
            Whether it has begun; the same on all members that train.

        Raises:
            PeerLost: a member is gone.
        """
        every, step = self._options.interval, step_of(version)
        is_due = self._is_owed or (bool(every) and step % every == 0)
        if self._store is None or not is_due:
            return False
        if self._write is not None:
            if not self._is_told:
                self._is_told = True
                warn(
                    f"the checkpoint of step {step} is left out: that of step {step_of(self._write.version)} is still "
                    "being written, and until it is, none is begun"
                )
            return False
        self._is_owed = False
        self._write = self._begin(version, self._store)
        return True

    def _begin(self, version: int, store: CheckpointStore) -> CheckpointWrite:
        group, generation = self._membership.trainer_group, self._membership.generation
        if self._mine is None:
            active = self._state.active(group.size)
            self._mine = primary_units(self._state.catalog.units, active, group.rank, group.size)
        self._is_told, attempt = False, next(self._attempts)
        self._worker = self._worker or Worker(THREAD)
        return CheckpointWrite(store, self._state, self._mine, version, generation, group, attempt, self._worker)

    def advance(self) -> None:
        """What is under way is over on all members. A failure is told by a warning.

        Raises:
            PeerLost: a member was gone before this one knew what became of it.
        """
        assert self._write is not None
        version = self._write.version
        try:
            path = self._write.complete()
        except PersistFailed as failed:
            self._write = None
            warn(
                f"the checkpoint of step {step_of(version)} was not written: {failed}. Training continues, and the "
                "next one is tried when it is due"
            )
            return
        self._write = None
        self._note(version, path)

    def _note(self, version: int, path: Location) -> None:
        self._newest, self._path, self._published = version, path, step_of(version)
        self._emit(Checkpoint(step_of(version), str(path)))

    def lag(self, step: int) -> dict[str, int]:
        """Steps since the newest checkpoint, after so many; empty where none are due."""
        is_due = self._store is not None and self._options.interval
        return {"checkpoint": max(0, step - self._published)} if is_due else {}

    # ---- the end

    def finish(self, version: int) -> None:
        """Wait for the checkpoint under way, then for that of the state, whose version this is; collective.

        Raises:
            PersistFailed: the latter could not be written; the same on all members.
            PeerLost: a member is gone, and nothing is written.
        """
        while self._write is not None and self._write.version != version:
            self.advance()
        if self._store is None or self._newest == version:
            return
        path = None if self._write is not None else self._find(version, self._store)
        if path is None:
            self._write = write = self._write or self._begin(version, self._store)
            try:
                path = write.complete()
            finally:
                self._write = None
            self._note(version, path)
        self._newest, self._path = version, path

    def save(self, version: int, path_or_name: str | Path | None) -> Location:
        """Write a checkpoint of the state, whose version this is, and wait for it; collective.

        Raises:
            ValueError: it has no place.
            PersistFailed: it could not be written; the same on all members.
            PeerLost: a member is gone, and nothing is written.
        """
        home, timeout = find_location(self._options), self._options.store_timeout
        if path_or_name is not None:
            where: Location | None = place_to_save(path_or_name, self._options.url, timeout)
        else:
            where = home
        if where is None:
            raise ValueError("session.save: this session has no place for checkpoints; give a path or a URL")
        self.finish(version)
        if where == home:
            assert self._path is not None
            return self._path
        return self._save_elsewhere(version, where)

    def _save_elsewhere(self, version: int, where: Location) -> Location:
        """Write a checkpoint to another place than the session's own. All that were written there stay."""
        owner = Owner(self._membership.identity.job, self._state.catalog.layout)
        store, problem = None, ""
        try:
            store = open_store(where, owner, self._membership.id, Retention(newest=sys.maxsize))
        except (OSError, ValueError) as error:
            problem = str(error)
        try:
            problems = gather_json(self._membership.trainer_group, problem)
            if store is None or any(problems):
                raise PersistFailed(next(filter(None, problems)))
            return self._find(version, store) or self._begin(version, store).complete()
        finally:
            if store is not None:
                store.close()

    def _find(self, version: int, store: CheckpointStore) -> Location | None:
        """Return where a store has the checkpoint of a version, as rank 0 finds it. None: it has none."""
        group, directory, path = self._membership.trainer_group, store.directory, None
        if group.rank == 0:
            with contextlib.suppress(OSError):  # then it is written, or that says why it cannot be
                path = find(directory).get(version)
        name = share_json(group, None if path is None else path.name)
        return None if name is None else directory / name

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def release(self) -> None:
        """Lets other jobs and runs have the folder."""
        self._end_worker()
        if self._store is not None:
            self._store.close()
