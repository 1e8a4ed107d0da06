"""Finds out which checkpoints of a running session are verified, by the digests that its votes compare.

    checkpoint of step 120 ─ 121 ─ … ─ all state compared in the votes on 121 to 131 ─ verified.json
    a difference in one of these votes, or a lost member ─ the checkpoint is never verified

All members record the same, since votes are the same on all. Rank 0 writes the marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from evermoe.checkpoint.checkpoint_store import CheckpointStore, newest_verified
from evermoe.checkpoint.object_store import LOOK_SECONDS, Location, hurried
from evermoe.checkpoint.retention import Retention
from evermoe.checkpoint.verified_mark import mark_verified
from evermoe.comm.group import Group
from evermoe.comm.task import Task, Worker
from evermoe.events import CheckpointVerified
from evermoe.events.base_event import Listener
from evermoe.state.version import step_of

CLOSE_SECONDS = 10.0
"""Seconds for which the end of a session waits for marks under way."""


class Verification:
    """Checkpoints of a session that may soon be verified."""

    def __init__(self, store: CheckpointStore | None, retention: Retention, group: Group, emit: Listener) -> None:
        self._store, self._retention, self._group, self._emit = store, retention, group, emit
        self.through: int | None = None
        """Steps taken in the newest state that is known to have been the same on all members that train it."""
        self._awaiting: dict[int, Location] = {}
        """Checkpoints that are complete and not verified, by version, older ones first."""
        self._newest: tuple[int, Location] | None = None
        """The newest verified checkpoint of this session."""
        self._newest_step = 0
        """The step in whose vote it was verified."""
        self._doubted = -1
        """The step in whose vote the latest difference was found: no earlier state is verified any more."""
        self._is_comparing = False
        """Whether members compare anything in their votes."""
        self._generation = -1
        """Generation of the members with which it last resumed; -1 before a first time."""
        self._doubts = 0
        """Recoveries since then that have not compared all state."""
        self._worker: Worker | None = None
        """The thread that writes marks."""
        self._last: Task[None] | None = None
        """The latest of its marks."""

    # ---- votes

    def add(self, version: int, path: Location) -> None:
        """Record a complete checkpoint, during whose write no vote has found a difference."""
        if self._is_comparing and step_of(version) > self._doubted:
            self._awaiting[version] = path
            self._note_awaited()

    def advance(self, through: int | None, step: int, *, is_last: bool = False) -> None:
        """Record that the state after `through` steps was the same on all members that train it; None: unknown.

        Args:
            through: steps taken in the state.
            step: in whose vote this has become known.
            is_last: whether no further checkpoint is under way, which could supersede one of these.
        """
        self._drop_superseded(is_last=is_last)
        if through is not None:
            self.through = max(through, self.through or 0)
        if self.through is None:
            return
        for version in [each for each in self._awaiting if step_of(each) <= self.through]:
            path = self._awaiting.pop(version)
            self._newest, self._newest_step = (version, path), step
            self._mark(path, version, step)
            self._emit(CheckpointVerified(step_of(version), str(path)))
        self._note_awaited()

    def _drop_superseded(self, *, is_last: bool) -> None:
        """Leave out what is removed once the next checkpoint is published, which rank 0 may have done already.

        The oldest one stays, as the store knows that it is awaited.
        """
        if self._awaiting:
            coming = () if is_last else (max(self._awaiting) + 1,)
            versions = {*self._awaiting, *coming}
            for version in self._retention.superseded(versions) - {min(self._awaiting)}:
                self._awaiting.pop(version, None)

    def doubt(self, step: int = -1) -> None:
        """Record that the state of a member may be wrong: no checkpoint that awaits its verification gets it.

        `step`: in whose vote this was found; nor does one of it or of an earlier step that is under way.
        """
        self._doubted = max(self._doubted, step)
        if self._store is not None:
            self._store.awaited.difference_update(self._awaiting)
        self._awaiting.clear()

    def _note_awaited(self) -> None:
        if self._store is not None and self._awaiting:
            self._store.awaited.add(min(self._awaiting))

    def _mark(self, path: Location, version: int, step: int) -> None:
        store = self._store
        if store is None:
            return
        if self._group.rank:
            store.awaited.discard(version)
            return
        store.awaited.add(version)  # until it has its mark

        def write() -> None:
            try:
                mark_verified(path, version, step)
            except OSError:  # it was removed, or the store is away: then it counts as unverified
                return
            finally:
                store.awaited.discard(version)
            with contextlib.suppress(OSError):
                store.remove_superseded(path, version)

        self._worker = self._worker or Worker("evermoe-verified")
        self._last = Task(write)
        self._worker.submit(self._last.run)

    def close(self) -> None:
        """Wait a little for marks under way, and end their thread."""
        if self._worker is not None and self._last is not None:
            self._last.is_over_within(CLOSE_SECONDS)
            self._worker.close()
            self._worker = None

    # ---- recoveries

    def begin_recovery(self) -> None:
        """Doubt all state until this recovery has compared it."""
        self._doubts += 1

    def compared(self) -> None:
        """Record that the recovery has found all state equal on several members."""
        self._doubts -= 1

    def standing(self) -> Any:
        """Return what the other members of a recovery need to know, as JSON."""
        return (
            self._generation,
            self._doubts,
            self.through,
            [(each, path.name) for each, path in self._awaiting.items()],
        )

    def resume(self, standings: Sequence[Any], version: int, generation: int) -> None:
        """Resume with the current members; the same on all of them.

        Checkpoints that awaited their verification are verified if the recovery has compared the state of all members
        that took part in them, and never if some of these are gone or have differed.
        """
        latest = max(each[0] for each in standings)
        known = [each for each in standings if each[0] == latest and latest >= 0]
        self.doubt()
        if self._store is not None:
            names = {key: name for each in known for key, name in each[3]}
            self._awaiting = {key: self._store.directory / name for key, name in sorted(names.items())}
        step, found = step_of(version), [each[2] for each in known if each[2] is not None]
        self.through = min(step, *found) if found else None
        if known and not any(each[1] for each in known):
            self.advance(step, step)
        self.doubt()
        self._generation, self._doubts = generation, 0
        if self._newest is not None:  # the first member may have died before it wrote the mark
            self._mark(self._newest[1], self._newest[0], self._newest_step)

    def compare(self, *, is_comparing: bool) -> None:
        """Begin with the current members, which compare something in their votes or do not."""
        self._is_comparing = is_comparing

    # ---- corruption

    def advice(self) -> str:
        """Return a sentence about the newest verified checkpoint, for an error; empty without a store."""
        if self._store is None:
            return ""
        newest = self._newest
        with contextlib.suppress(OSError):
            found = newest_verified(hurried(self._store.directory, LOOK_SECONDS))
            newest = max(filter(None, (newest, found)), key=lambda each: each[0], default=None)
        if newest is None:
            return f". No checkpoint in {self._store.directory} is verified"
        return (
            f". The newest verified checkpoint is {newest[1]}, of step {step_of(newest[0])}: "
            "Checkpoints(resume_from='verified') resumes from it"
        )
