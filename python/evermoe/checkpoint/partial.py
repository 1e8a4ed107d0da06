"""PEC (MoC-System): periodically saves some experts of each layer and a share of all other units to one store.

The courier's thread reads the units before the next update; the persister's thread writes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from evermoe.checkpoint.folder import PersistedUnit
from evermoe.checkpoint.manifest import Part
from evermoe.checkpoint.partial_store import PartialStore
from evermoe.checkpoint.persister import Persister
from evermoe.comm.courier import Courier
from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.task import Task
from evermoe.errors import PersistFailed
from evermoe.planning.save_shares import save_shares
from evermoe.process.warn import warn
from evermoe.state.keeper import Assignment, ScheduledCopies, StateKeeper
from evermoe.state.stored import StoredUnit
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import digests_of, read_part
from evermoe.state.version import step_of


class PartialCheckpoint:
    """One version of some units, or of parts of them, on its way to the persister, in the thread of a courier."""

    def __init__(
        self,
        state: TrainingState,
        persister: Persister,
        units: Mapping[str, Part],
        version: int,
        members: Sequence[str],
    ) -> None:
        self.version = version
        self.capture_seconds = 0.0
        self._persister, self._units, self._members = persister, units, members
        # Values that the script puts in a parameter's place meanwhile, as `EMA.applied` does, must not be saved.
        self._tensors = dict(zip(units, state.tensors(list(units)), strict=True))
        self._late = state.late
        self._captured = threading.Event()
        self.task: Task[bool]

    def submit_to(self, courier: Courier) -> PartialCheckpoint:
        """Submit the save to the courier's thread; return itself."""
        self.task = courier.submit(self._run)
        return self

    def wait_captured(self) -> None:
        """Wait until the state may change."""
        self._captured.wait()

    def _run(self) -> bool:
        started = time.monotonic()
        try:
            self._late.wait(self._units)
            views = self._persister.begin_snapshot(self.version, self._units, self._members)
            for name, view in views.items():
                read_part(self._tensors[name], self._units[name].start, view)
            cut = [name for name, part in self._units.items() if not part.is_complete]
            found = digests_of([self._tensors[name] for name in cut], beside_steps=True)
            digests = dict(zip(cut, found, strict=True))
        finally:
            self._tensors = {}
            self.capture_seconds = time.monotonic() - started
            self._captured.set()
        self._persister.commit(digests)
        return True


class PartialCheckpoints(StateKeeper):
    """Plans which units the members of a job save, and saves this member's part.

    Args:
        store: shared by all members.
        state: this member's units.
        membership: the members that take part.
        courier: reads the state.
        save_interval: steps between two saves.
    """

    def __init__(
        self,
        store: PartialStore,
        state: TrainingState,
        membership: MembershipManager,
        courier: Courier,
        save_interval: int,
    ) -> None:
        self.store, self._state, self._membership = store, state, membership
        self._courier, self._save_interval = courier, save_interval
        self._persister: Persister | None = None
        self._assignment: Assignment | None = None
        self._members: list[str] = []
        """By rank."""
        self._latest: PartialCheckpoint | None = None
        self._durable = 0
        """Steps taken in the newest version of which this member's part is on disk."""
        self._owes_all = False
        """Whether the next save includes every unit."""
        self._is_saving = False
        """Whether this member has had a part to save."""
        self._skipped: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        """Experts whose saves were superseded by newer ones, and their versions; from the persister's thread."""

    def replan(self, assignment: Assignment) -> None:
        """Divide the units among these members from now on."""
        self._assignment = assignment

    def protect_all(self, version: int) -> Collection[str]:
        """Save every unit once, unless all are durable; afterwards, saves include a few units at a time. Collective.

        A store that cannot be written to does not end the job: it continues with a warning and without these saves.
        The next save includes every unit if a member cannot save this version: because the store is unavailable, or
        because the member has already begun to save the version.
        """
        assert self._assignment is not None
        group, member = self._membership.everyone, self._assignment.member
        is_running = bool(group.all_reduce(torch.tensor([int(self._membership.established)])))
        self._members = members = gather_json(group, member)
        # An earlier start may have saved units before its first step; they do not belong to this one.
        is_open = self._open(member, members, version if is_running or step_of(version) else 0)
        has_all = is_open and {found.unit for found in _find(self.store, is_established=True)} == set(
            self._state.catalog.by_name
        )
        can_begin = is_open and self._persister is not None and self._persister.can_begin(version)
        everyone = gather_json(group, [has_all, can_begin])
        if all(has_all for has_all, _ in everyone):
            return ()
        self._owes_all = not all(can_begin for _, can_begin in everyone)
        if self._owes_all:
            return ()
        every = self._state.catalog.experts()
        self._save(version, every)
        is_saved = group.all_reduce(torch.tensor([int(self._is_flushed())])) == group.size
        return every if is_saved else ()

    def _open(self, member: str, members: Collection[str], version: int) -> bool:
        """Remove versions newer than `version`, which were never committed; return whether the store answers."""
        assert self._assignment is not None
        generation = self._assignment.generation
        try:
            if self._persister is None:
                units = self._state.catalog.units
                self._persister = Persister(self.store, member, units=units, on_skipped=self._record_skipped)
            self._persister.rewind(version, generation)
            if self._membership.everyone.rank == 0:
                self.store.sweep(members, generation)
        except (OSError, PersistFailed) as error:
            _warn(self.store, error)
            return False
        return True

    def _record_skipped(self, version: int, units: Sequence[str]) -> None:
        for unit in units:
            if self._state.catalog.by_name[unit].expert is not None:
                self._skipped.put((unit, version))

    def take_skipped(self) -> list[tuple[str, int]]:
        """Return experts whose saves were superseded by newer ones, with the superseded versions; each once."""
        return [self._skipped.get_nowait() for _ in range(self._skipped.qsize())]

    def _is_flushed(self) -> bool:
        """Wait until pending saves are durable; return whether they are, or still pending after the timeout."""
        if self._persister is None:
            return False
        try:
            if self._latest is not None:
                self._latest.task.wait()
                self._persister.flush(self.store.first_seconds)
        except TimeoutError:
            pass  # superseded units are reported as skipped
        except PersistFailed as error:
            _warn(self.store, error)
            return False
        return True

    def _save(self, version: int, experts: Collection[str]) -> None:
        """Begin to save this rank's part of the experts and of all other units, if it has one.

        A rank that saves more experts saves less of the rest: see `planning.save_shares`.
        """
        self._latest = None
        assert self._assignment is not None
        chosen, active = set(experts), self._assignment.active
        units = [unit for unit in self._state.catalog.units if unit.layer is None or unit.name in chosen]
        shares = save_shares(
            [unit.nbytes for unit in units],
            [active[unit.name] for unit in units],
            [unit.expert is not None for unit in units],
            len(self._members),
        )
        savers = [
            member
            for member, parts in zip(self._members, shares, strict=True)
            if any(units[each.unit].expert is None for each in parts)
        ]
        parts = shares[self._membership.everyone.rank]
        mine = {units[at].name: Part(start, end, units[at].nbytes) for at, start, end in parts}
        self._is_saving |= bool(mine)
        if self._persister is None:
            self._record_skipped(version, list(mine))
        elif mine:
            task = PartialCheckpoint(self._state, self._persister, mine, version, savers)
            self._latest = task.submit_to(self._courier)

    def wait_for_copies(self) -> bool:
        """Wait until the persister has the save that is in flight; return whether it has."""
        if self._latest is None:
            return True
        return self._courier.wait_for_task(self._latest.task, self._membership.trainer_group) and bool(
            self._latest.task.result
        )

    @property
    def lost(self) -> str | None:
        """Return why the save under way did not reach the persister."""
        return None if self._latest is None else self._latest.task.lost

    def before_vote(self, step: int) -> bool:
        """Do nothing: the state is read before the update, and written at the store's pace."""
        return True

    def before_update(self) -> None:
        """Wait until the state may change."""
        if self._latest is not None:
            self._latest.wait_captured()

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest save took to read the state."""
        return 0.0 if self._latest is None else self._latest.capture_seconds

    def make_room(self, step: int) -> None:
        """Wait for the previous version: one is saved at a time."""
        self.wait_for_copies()

    def scheduled_copies(self, step: int, choose: Callable[[], Collection[str]] | None) -> ScheduledCopies:
        """Return the experts selected next after each `save_interval` steps, and with them all other units."""
        if choose is None or step % self._save_interval:
            return ScheduledCopies()
        return ScheduledCopies(remote=sorted(self._state.catalog.experts() if self._owes_all else choose()))

    def begin_copies(self, version: int, scheduled: ScheduledCopies) -> None:
        """Begin to save the scheduled units of the state of `version`."""
        self._latest = None
        experts = scheduled.remote
        if experts is not None:
            self._owes_all = False
            self._save(version, experts)

    def lag(self, step: int) -> dict[str, int]:
        """Return the steps since the newest version with a persisted part of this member."""
        if self._persister is not None:
            self._durable = step_of(self._persister.durable_version or 0)
        return {"persisted": step - self._durable} if self._is_saving else {}

    def settle(self) -> bool:
        """Wait until no save is under way; return whether the persister has all of them."""
        self.before_update()
        is_complete = self.wait_for_copies()
        self._latest = None
        return is_complete

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Yield all durable units, and those in this member's buffers, which are newer or faster to read."""
        if self._persister is not None:
            yield from ((held, "snapshot") for held in self._persister.complete_units())
        for found in _find(self.store, self._membership.established):
            yield found, "persisted"

    def close(self) -> None:
        """Stop the persister's thread; it first finishes the version that it writes."""
        if self._persister is not None:
            self._persister.close()
            self._persister = None


def _find(store: PartialStore, is_established: bool) -> list[PersistedUnit]:
    """Return the durable units. A member that has state of the job resumes without them while the store is away.

    Raises:
        OSError: the store is unavailable, and this member may depend on it.
    """
    try:
        return store.find_units(is_patient=not is_established)
    except OSError as error:
        if not is_established:
            raise
        warn(f"this recovery does not use saved units: {error.strerror or error}")
        return []


def _warn(store: PartialStore, error: Exception) -> None:
    warn(f"units cannot be saved to {store.where}: {error}. Training continues")
