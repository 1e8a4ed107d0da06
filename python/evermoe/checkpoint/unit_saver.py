"""Schedules the saves of `pec` (MoC-System's persist-PEC): some experts of each layer, and all other units.

`evermoe.checkpoint.checkpoint_write` writes one save at a time, in the background. A save that is scheduled meanwhile
begins when the previous one is complete. All members see the same ballots at the same step, so they agree on whether a
save is under way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

import torch

from evermoe.checkpoint.checkpoint_store import CheckpointStore
from evermoe.checkpoint.checkpoint_write import BackgroundWriter, Increment
from evermoe.checkpoint.manifest import Part
from evermoe.checkpoint.object_store import LOOK_SECONDS, ObjectPath
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.errors import PersistFailed
from evermoe.planning.save_shares import save_shares
from evermoe.process.warn import warn
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

CLOSE_SECONDS = 10.0
"""Seconds for which the end of a job waits for a save under way."""


class UnitSaver(BackgroundWriter):
    """Saves some units of a session's state at a time. A member that does not train has none."""

    def __init__(
        self, store: CheckpointStore, state: TrainingState, membership: MembershipManager, interval: int
    ) -> None:
        super().__init__(state, membership, "evermoe-save")
        self._store, self._interval = store, interval
        self._experts: Collection[str] = ()
        """Experts in it."""
        self._resumed_from = 0
        """Version from which the members resumed."""
        self._is_owed = False
        """Whether a save was scheduled while one was under way."""
        self._owes_all = False
        """Whether the next save includes every unit."""
        self._published = 0
        """Steps taken in the newest save."""
        self._has_warned = False
        """Whether a warning was issued that saves fail."""

    # ---- a recovery

    def restart(self, version: int) -> tuple[int, Collection[str]]:
        """Resume with the current members from a version; collective.

        The save under way is given up if it was not published: some members may not know its outcome.

        Returns:
            Version and experts of a save that was given up; no experts if there is none.

        Raises:
            PeerLost: a member is lost.
        """
        membership, group = self._membership, self._membership.trainer_group
        is_running, begun = membership.established, 0 if self.under_way is None else self.under_way.version
        answers = gather_json(group, (is_running, begun, sorted(self._experts), uuid.uuid4().hex[:8]))
        self._name_attempts(answers[0][3])
        self._end_worker()  # a slow disk may keep it busy with a save that was given up
        self.under_way, self._experts = None, ()
        # An earlier start may have saved units before its first step; they do not belong to this one.
        self._resumed_from = version if any(each[0] for each in answers) or step_of(version) else 0
        newest = share_json(group, self._newest() if group.rank == 0 else None)
        self._is_owed, self._owes_all = False, newest is None
        self._published = step_of(newest or 0)
        given_up = max((each for each in answers), key=lambda each: each[1])
        return given_up[1], () if newest is not None and newest >= given_up[1] else given_up[2]

    def _newest(self) -> int | None:
        """Return the version of the newest save that a recovery could use; None if there is none, or no answer."""
        try:
            found = self._store.newest_save(self._resumed_from, self._membership.generation)
        except OSError as error:
            warn(f"units cannot be saved to {self._store.directory}: {error}. Training continues")
            return None
        return None if found is None else found.version

    def save_all(self, version: int) -> Collection[str]:
        """Save every unit once, unless a save has all; wait for it. Return the experts in the save. Collective.

        Training continues without it if the store cannot be written to, or if an object store takes long.

        Raises:
            PeerLost: a member is lost.
        """
        if not self._owes_all:
            return ()
        group, every = self._membership.trainer_group, self._state.catalog.experts()
        self._begin(version, every)
        assert self.under_way is not None
        if isinstance(self._store.directory, ObjectPath):
            self.under_way.wait_at_most(LOOK_SECONDS)
            if group.all_reduce(torch.tensor([int(self.is_over)])) < group.size:
                return every
        return () if self.advance()[1] else every

    # ---- a step

    def begin_if_due(self, version: int, choose: Callable[[], Collection[str]]) -> Collection[str] | None:
        """Begin to save the state of `version` if a save is scheduled; on all members or on none.

        Returns:
            The experts in the save; None if none has begun. The same on all members.

        Raises:
            PeerLost: a member is lost.
        """
        if not self._is_owed and step_of(version) % self._interval:
            return None
        self._is_owed = self.under_way is not None
        if self._is_owed:
            return None
        experts = self._state.catalog.experts() if self._owes_all else choose()
        self._begin(version, experts)
        return experts

    def _begin(self, version: int, experts: Collection[str]) -> None:
        """Begin to save this rank's part of the experts and of all other units.

        A rank that saves more experts saves less of the rest: see `planning.save_shares`.
        """
        group = self._membership.trainer_group
        chosen, active = set(experts), self._state.active(group.size)
        units = [unit for unit in self._state.catalog.units if unit.layer is None or unit.name in chosen]
        shares = save_shares(
            [unit.nbytes for unit in units],
            [active[unit.name] for unit in units],
            [unit.expert is not None for unit in units],
            group.size,
        )
        mine = {units[at].name: Part(start, end, units[at].nbytes) for at, start, end in shares[group.rank]}
        cut = {name: part for name, part in mine.items() if not part.is_complete}
        increment = Increment(cut, self._resumed_from)
        self.under_way = self._begin_write(self._store, list(mine), version, increment)
        self._experts, self._owes_all = chosen, False

    def advance(self) -> tuple[int, Collection[str]]:
        """Finish the save under way, whose outcome all members know; warn if it failed.

        Returns:
            Its version, and the experts that were not saved: none if it is complete.

        Raises:
            PeerLost: a member was lost before this one knew the outcome.
        """
        assert self.under_way is not None
        version, experts, write = self.under_way.version, self._experts, self.under_way
        try:
            write.wait_published()
        except PersistFailed as failed:
            self._is_owed, self._owes_all = False, write.needs_all or len(experts) == len(self._state.catalog.experts())
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"the save of step {step_of(version)} was not written: {failed}. Training continues, and later "
                    "saves are tried without another warning"
                )
        else:
            self._published, self._has_warned, experts = step_of(version), False, ()
        self.under_way, self._experts = None, ()
        return version, experts

    def lag(self, step: int) -> dict[str, int]:
        """Return the steps since the newest save, after `step` steps."""
        return {"persisted": step - self._published}

    # ---- the end

    def close(self) -> None:
        """Wait a little for the save under way, and end its thread."""
        if self.under_way is not None:
            self.under_way.wait_at_most(CLOSE_SECONDS)
        self._end_worker()
