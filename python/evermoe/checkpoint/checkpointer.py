"""Schedules a session's checkpoints; `evermoe.checkpoint.checkpoint_write` writes them in the background.

All members see the same ballots at the same step, so they agree on whether a checkpoint is under way. The training
thread exchanges nothing else for checkpoints while the members stay the same.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from evermoe.checkpoint.checkpoint_store import CheckpointStore, find, is_read_only, open_store
from evermoe.checkpoint.checkpoint_write import THREAD, BackgroundWriter, CheckpointWrite
from evermoe.checkpoint.object_store import Location, locate
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.retention import Retention
from evermoe.checkpoint.save_place import place_to_save
from evermoe.checkpoint.verification import Verification
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.config.checkpoints import Checkpoints, schedule_of
from evermoe.errors import PersistFailed
from evermoe.events import Checkpoint
from evermoe.events.base_event import Listener
from evermoe.process.run_claim import Run
from evermoe.process.warn import warn
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import primary_units
from evermoe.state.version import step_of


def find_location(options: Checkpoints) -> Location | None:
    """Return the location of the checkpoints; None if the options name none.

    Raises:
        ValueError: the URL has an unknown scheme, or contains credentials.
        OSError: there are no credentials for the URL.
    """
    if options.url is None:
        return None
    limits = {"upload_limit": options.upload_limit, "download_limit": options.download_limit}
    return locate(options.url, patience=options.store_timeout, **limits)


class Checkpointer(BackgroundWriter):
    """Decides when a session writes checkpoints, and which units each of its members writes.

    Raises:
        ValueError: another job runs in the folder, or its checkpoints are of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self, options: Checkpoints, state: TrainingState, membership: MembershipManager, emit: Listener
    ) -> None:
        super().__init__(state, membership, THREAD)
        self._options, self._emit = options, emit
        self._newest: tuple[int, Location] | None = None
        """The newest checkpoint since the members resumed, by version."""
        self._mine: list[str] | None = None
        """Units that this member writes, as long as the members stay the same; None: not computed yet."""
        self._has_warned = False
        """Whether a warning was issued that checkpoints are skipped while one is under way."""
        self._is_owed = False
        """Whether a checkpoint is written at the next opportunity: the one under way when the members changed was given
        up, or one is scheduled by time."""
        self._began = time.monotonic()
        """When the latest checkpoint, or this session, began."""
        self._published = 0
        """Steps taken in the newest checkpoint on disk."""
        self.store: CheckpointStore | None = None
        """The checkpoints; None without a location to write to, and on a member that does not train."""
        where, retention = find_location(options), Retention(options.keep, options.keep_interval)
        if where is not None and is_read_only(where):
            if schedule := schedule_of(options):
                raise ValueError(
                    f"checkpoints: {schedule}, but {where} is read-only: write to a folder, s3://, gs:// or az://"
                )
        elif where is not None and membership.role == "train":
            owner = Owner(membership.identity.job, state.catalog.layout)
            self.store = open_store(where, owner, membership.id, retention)
            if schedule_of(options):
                with suppress(OSError):  # the store may answer later
                    self._published = max(map(step_of, find(where, state.catalog.layout)), default=0)
        self.verification = Verification(self.store, retention, membership.trainer_group, emit)
        """Verification of the checkpoints."""

    @property
    def writes(self) -> bool:
        """Whether this member writes checkpoints."""
        return self.store is not None

    def newest_generation(self) -> int:
        """Return the newest generation that wrote to the store; 0 if there is none."""
        return 0 if self.store is None else self.store.newest_generation()

    def found(self) -> Run | None:
        """Return the run that the store belongs to."""
        return None if self.store is None else self.store.found()

    def claim_for(self, run: Run, patience: float) -> None:
        """Claim the store of the checkpoints for a run.

        Raises:
            FolderInUse: living members of another run hold it.
        """
        if self.store is not None:
            self.store.claim_for(run, patience)

    def check_beginning(self) -> None:
        """Check that a job may begin at step 0: with `resume_from="verified"` not where it has other checkpoints.

        Raises:
            ValueError: none of its checkpoints is verified.
            OSError: an object store did not answer.
        """
        where = find_location(self._options)
        if where is None or self._options.resume_from != "verified":
            return
        if found := find(where, self._state.catalog.layout):
            raise ValueError(
                f"checkpoints: resume_from is 'verified', but none of the {len(found)} checkpoints in "
                f"{where} is: give another place, or resume from the newest, which is of step "
                f"{step_of(max(found))}, with Checkpoints(resume_from='newest')"
            )

    def restart(self, version: int, generation: int) -> None:
        """Resume with the members of a generation from a version: give up the checkpoint under way; collective.

        Some members may not know its outcome, so the next scheduled step writes a new one.
        """
        if self._membership.role != "train":
            return
        group = self._membership.trainer_group
        is_owed, verification = self._is_owed or self.under_way is not None, self.verification
        answers = gather_json(group, (is_owed, uuid.uuid4().hex[:8], verification.standing()))
        verification.resume([each for *_, each in answers], version, generation)
        self._is_owed = any(is_owed for is_owed, *_ in answers)
        self._name_attempts(answers[0][1])
        if self.under_way is not None and not self.under_way.is_over:
            self._end_worker()  # a slow disk may keep it busy with a checkpoint that was given up
        self._newest, self.under_way, self._mine = None, None, None
        if self.store is not None and group.rank == 0:  # the members do not wait for the disk
            threading.Thread(target=self.store.sweep, args=[generation], name="evermoe-sweep", daemon=True).start()

    # ---- a step

    @property
    def is_overdue(self) -> bool:
        """Whether a checkpoint is scheduled by time, by this member's clock."""
        seconds = self._options.time_interval
        is_waiting = bool(seconds) and self.store is not None and self.under_way is None
        return is_waiting and time.monotonic() - self._began >= seconds

    def request(self) -> None:
        """Write a checkpoint at the next opportunity; called on all members."""
        self._is_owed = True

    def begin_if_due(self, version: int) -> bool:
        """Begin the checkpoint of the state of `version` if one is scheduled; on all members or on none.

        Returns:
            Whether it has begun; the same on all members that train.

        Raises:
            PeerLost: a member is lost.
        """
        every, step = self._options.interval, step_of(version)
        is_due = self._is_owed or (bool(every) and step % every == 0)
        if self.store is None or not is_due:
            return False
        if self.under_way is not None:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"the checkpoint of step {step} is skipped: that of step {step_of(self.under_way.version)} is "
                    "still being written, and only one is written at a time"
                )
            return False
        self._is_owed = False
        self.under_way = self._begin(version, self.store)
        return True

    def _begin(self, version: int, store: CheckpointStore) -> CheckpointWrite:
        group = self._membership.trainer_group
        if self._mine is None:
            active = self._state.active(group.size)
            self._mine = primary_units(self._state.catalog.units, active, group.rank, group.size)
        self._has_warned, self._began = False, time.monotonic()
        return self._begin_write(store, self._mine, version)

    def advance(self) -> None:
        """Finish the checkpoint under way, whose outcome all members know; warn if it failed.

        Raises:
            PeerLost: a member was lost before this one knew the outcome.
        """
        assert self.under_way is not None
        version = self.under_way.version
        try:
            path = self.under_way.wait_published()
        except PersistFailed as failed:
            self.under_way = None
            warn(
                f"the checkpoint of step {step_of(version)} was not written: {failed}. Training continues, and the "
                "next scheduled checkpoint is written as usual"
            )
            return
        self.under_way = None
        self._record_published(version, path)

    def _record_published(self, version: int, path: Location) -> None:
        self._newest, self._published = (version, path), step_of(version)
        self.verification.add(version, path)
        self._emit(Checkpoint(step_of(version), str(path)))

    def lag(self, step: int) -> dict[str, int]:
        """Return the steps since the newest checkpoint, after `step` steps; empty if no checkpoints are scheduled."""
        is_due = self.store is not None and schedule_of(self._options)
        return {"checkpoint": max(0, step - self._published)} if is_due else {}

    # ---- the end

    def finish(self, version: int) -> None:
        """Wait for the checkpoint under way, then write that of the current state, `version`; collective.

        Raises:
            PersistFailed: the latter could not be written. All members raise it.
            PeerLost: a member is lost, and nothing is written.
        """
        while self.under_way is not None and self.under_way.version != version:
            self.advance()
        if self.store is None or (self._newest is not None and self._newest[0] == version):
            return
        path = None if self.under_way is not None else self._find(version, self.store)
        if path is None:
            self.under_way = write = self.under_way or self._begin(version, self.store)
            try:
                path = write.wait_published()
            finally:
                self.under_way = None
            self._record_published(version, path)
        self._newest = version, path

    def save(self, version: int, path_or_name: str | Path | None, keep: int | None) -> Location:
        """Write a checkpoint of the current state, `version`, and wait for it; collective.

        Args:
            version: of the state.
            path_or_name: as for `Session.save`.
            keep: number of the newest checkpoints that are kept at another location than the session's own; None: all.

        Raises:
            ValueError: there is no location to write to.
            PersistFailed: the checkpoint could not be written. All members raise it.
            PeerLost: a member is lost, and nothing is written.
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
            assert self._newest is not None
            return self._newest[1]
        return self._save_elsewhere(version, where, Retention(newest=sys.maxsize if keep is None else keep))

    def _save_elsewhere(self, version: int, where: Location, retention: Retention) -> Location:
        """Write a checkpoint to a location other than the session's own."""
        owner = Owner(self._membership.identity.job, self._state.catalog.layout)
        store, problem = None, ""
        try:
            store = open_store(where, owner, self._membership.id, retention)
        except (OSError, ValueError) as error:
            problem = str(error)
        try:
            problems = gather_json(self._membership.trainer_group, problem)
            if store is None or any(problems):
                raise PersistFailed(next(filter(None, problems)))
            return self._find(version, store) or self._begin(version, store).wait_published()
        finally:
            if store is not None:
                store.close()

    def _find(self, version: int, store: CheckpointStore) -> Location | None:
        """Return the location of a version's checkpoint in a store, as rank 0 finds it; None: there is none."""
        group, directory, path = self._membership.trainer_group, store.directory, None
        if group.rank == 0:
            with contextlib.suppress(OSError):  # then the write succeeds, or reports why it cannot
                path = find(directory).get(version)
        name = share_json(group, None if path is None else path.name)
        return None if name is None else directory / name

    def release(self) -> None:
        """Release the store for other jobs and runs."""
        self._end_worker()
        self.verification.close()
        if self.store is not None:
            self.store.close()
