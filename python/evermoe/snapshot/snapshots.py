"""Snapshots of the state: the bundles scheduled at a step, and the round that copies them in the background.

Peers' copies follow the windows that `window_plan` finds; local copies are made as often as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.config.copies import CopyConfig
from evermoe.events import Listener
from evermoe.keeper import Assignment, Due, StateKeeper
from evermoe.presets import Gemini, LocalSnapshots, Pec
from evermoe.profile.follower import StreamFollower
from evermoe.profile.memory import share_of_host_bytes
from evermoe.snapshot.bundles import Bundle, bundles
from evermoe.snapshot.gpu_sources import GpuSources
from evermoe.snapshot.page_locks import PageLocks
from evermoe.snapshot.previous_epoch import PreviousEpochSnapshots
from evermoe.snapshot.round import SnapshotRound
from evermoe.snapshot.snapshot_schedule import SnapshotSchedule
from evermoe.snapshot.store import SnapshotStore, SnapshotUnit
from evermoe.snapshot.window_plan import WindowPlanner
from evermoe.state.catalog import UnitCatalog
from evermoe.state.stored import NO_COPIES
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

MAX_LOCAL_STEPS = 1000
"""Steps between two snapshots on a unit's own node, at most."""
SHARE_ON_HOST = 0.1
"""Part of the budget that these take where the model is on the host, since they take processors from training, and
the copies on other nodes do, too, which come first."""


def planned_bundles(assignment: Assignment, options: CopyConfig) -> tuple[list[Bundle], list[Bundle]]:
    """The bundles of a plan: those that others keep, too, and those that stay on the nodes of ranks that train them.

    Args:
        assignment: the plan.
        options: preset and copies; without any there are none.
    """
    if not options.replication:
        return [], []
    some = [kept for kept in assignment.plan.units if kept.kind == "snapshot"]
    found = bundles([k.unit for k in some], [[k.primary, *k.holders] for k in some], [k.period for k in some])
    own = [(kept.unit, rank) for kept in assignment.plan.units for rank in kept.own]
    local = bundles([unit for unit, _ in own], [[rank] for _, rank in own])
    if options.choices.per_expert_versions:
        local = [Bundle(bundle.holders, (unit,)) for bundle in local for unit in bundle.units]
    return found, local


class Snapshots(StateKeeper):
    """The rounds of a session.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: who takes part.
        options: the preset, with its options, and the number of copies.
        emit: of the session.
    """

    def __init__(
        self,
        state: TrainingState,
        store: SnapshotStore,
        membership: MembershipManager,
        options: CopyConfig,
        emit: Listener,
    ) -> None:
        self._state, self._store, self._membership = state, store, membership
        self._options, self._emit = options, emit
        self.sources = store.sources = GpuSources(options.preset.snapshot_memory)
        """Through which captures from a GPU go."""
        self.pacer = Pacer()
        self.courier = Courier(membership.transport, self.pacer, "evermoe-snapshots", device=membership.device)
        self._blocks = options.preset.group(Gemini).copy_pacing == "blocking"
        policy = options.choices.schedule if options.replication and not self._blocks else None
        self._follower = StreamFollower() if policy is not None and membership.device.type == "cuda" else None
        self.pacer.attach(membership.trainer_group, self._follower)
        if self._follower is not None:
            self.pacer.on_idle = store.pace
        self.window_planner = WindowPlanner(
            self.pacer, self.courier, store, membership, options.windows, policy, options.steps_per_version
        )
        self.snapshot_schedule = SnapshotSchedule()
        """Schedule of versions, where the copies of a step are made during the next one."""
        self.copies_late = False
        """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
        self._round: SnapshotRound | None = None
        self._is_settled = False
        """Whether nothing is sent until `restart`, as the members change."""
        self._local: dict[int, tuple[str, ...]] = {}
        """Units of the bundles that only a rank that trains them keeps, by the bundle's number."""
        self._sent: dict[int, tuple[tuple[str, ...], int]] = {}
        """Units and period of the bundles that others keep, too."""
        self.missing: dict[str, set[int]] = {}
        """Per unit, the ranks that should keep a snapshot of it and have no room; empty if all have."""
        self.locked_bytes = 0
        """Bytes of this member's arenas that are page-locked, so that its GPU writes to them itself."""
        self._whole: dict[int, int] = {}
        """Steps taken in the newest complete version of this member's own bundles, by number."""
        self._page_locks = PageLocks()
        local, in_turns = options.preset.group(LocalSnapshots), options.preset.group(Pec)
        self._copy_budget = local.copy_budget
        self._fixed_steps = in_turns.snapshot_interval if options.choices.takes_turns else local.snapshot_interval
        """Steps between local snapshots; None for as few as the budget allows."""
        self._local_steps = 1
        self._newest_local: float = 0
        self._is_local_later = False
        """Whether the first local snapshots of the plan come a step later."""
        self._former = PreviousEpochSnapshots(lambda: store.prune(self._generation))
        self._generation = 0
        self._copies = NO_COPIES
        """Previous copies, which need not be sent again."""

    # ---- which bundles there are

    def replan(self, assignment: Assignment) -> None:
        """Make the arenas of a plan next to the previous ones; `protect_all`, `release` and `restart` must follow.

        Where a running job has no room for all of them, `missing` says which holders have none.

        Raises:
            OSError: a job starts, and the shared memory is too small.
        """
        had_room, self.problem = not self.problem, ""
        self.missing, self.locked_bytes = {}, 0
        self._former.forget()
        self.copies_late, self._generation = assignment.copies_late, assignment.generation
        self.snapshot_schedule.is_used = self.copies_late
        self._copies = assignment.copies
        self._local_steps = self._fixed_steps or 1
        as_budget_allows = self._fixed_steps is None and not self._options.choices.per_expert_versions
        self._is_local_later = assignment.is_beside and as_budget_allows and not self.copies_late and had_room
        if not self._options.replication:
            return
        found, local = planned_bundles(assignment, self._options)
        by_unit, planned = assignment.plan.by_unit, [*found, *local]
        share = share_of_host_bytes(self._membership.nodes, self._membership.everyone.rank)
        is_on_gpu = self._membership.device.type == "cuda"  # whose driver page-locks the arenas
        kept = self._store.replace_arenas(
            planned,
            assignment.generation,
            self._membership,
            assignment.copies,
            reserves=is_on_gpu or not assignment.is_beside,
        )
        self._is_local_later &= bool(assignment.copies)  # else the previous ones have made room
        self.locked_bytes = self._page_locks.lock(self._store, share)
        left = {number: bundle.units for number, bundle in enumerate(kept) if bundle.holders}
        self._local = {number: units for number, units in left.items() if number >= len(found)}
        self._sent = {n: (units, by_unit[units[0]].period) for n, units in left.items() if n < len(found)}
        for bundle, now in zip(planned, kept, strict=True):
            for unit in bundle.units if len(now.holders) < len(bundle.holders) else ():
                self.missing.setdefault(unit, set()).update({*bundle.holders} - {*now.holders})

    @property
    def local_units(self) -> list[str]:
        """Units of which the first copies of the plan have snapshots that stay on their own nodes."""
        return [] if self._is_local_later else self._units_of(self._local)

    def _units_of(self, numbers: Iterable[int]) -> list[str]:
        """Units of local bundles, each once: those that several nodes train are in as many bundles."""
        return list(dict.fromkeys(unit for number in sorted(numbers) for unit in self._local[number]))

    # ---- everything once

    def protect_all(self, version: int) -> Collection[str]:
        """Begins to copy all bundles as of `version`; to other members what they do not have already.

        Where local snapshots come as the budget allows, they begin a step later: what others need is first.
        """
        due = set(self._sent) if self._is_local_later else None
        if self._sent or (self._local and not self._is_local_later):
            self._round = SnapshotRound(self._store, version, self.courier, due, self._emit, self._copies).start()
        return ()

    def release(self, step: int) -> None:
        """Removes the arenas of earlier plans, unless their local snapshots are all there is."""
        copied = self._sent if self._is_local_later else self._sent | self._local
        self._whole = dict.fromkeys(copied.keys() & {kept.number for kept in self._store.own}, step)
        if self._options.replication:
            self._former.release(are_needed=self._is_local_later and bool(self._local))

    def restart(self, step: int) -> None:
        """Begins the next step, whose windows are not known yet."""
        self._is_settled, self._newest_local = False, -math.inf if self._is_local_later else step
        is_urgent = bool(self._sent) or self._options.choices.selects_by_budget
        self.window_planner.restart(step, self.copies_late, is_urgent=is_urgent)
        self.snapshot_schedule.restart(step)
        self.pacer.begin_step()

    # ---- a step

    def make_room(self, step: int) -> None:
        """One version at a time: wait for the one under way if another is scheduled. Previous ones may be removed."""
        self._former.give_up()
        is_due = (
            self.snapshot_schedule.is_due(step) if self.copies_late else self._due_for_peers(step) or not self._sent
        )
        if self._round is not None and is_due:
            self.pacer.hurry()
            self.wait()

    def before_vote(self, step: int) -> bool:
        """Waits for what must be safe by then; whether that is so."""
        if self._round is not None and self.copies_late:
            return not self.snapshot_schedule.is_due(step) or self.wait()
        if self._round is not None and self._former.are_replaced:
            self.pacer.hurry()
            return self._former.note_whole(self.wait())
        if self._round is not None and not self._sent:  # no peer is waited for
            self._round.task.wait()
        return True

    def wait(self) -> bool:
        """Whether the version under way is complete here. The training thread waits, but not for a silent peer."""
        if self._round is None:
            return True
        task, group = self._round.task, self._membership.trainer_group
        is_done = self.courier.wait(task, group)
        self.problem = self._round.problem
        if self.problem:
            group.drop(f"no memory for copies: {self.problem}")  # others wait for what is not sent
        return is_done and bool(task.result)

    @property
    def lost(self) -> str | None:
        """Why the version under way will not be complete: a peer is gone."""
        return None if self._round is None else self._round.task.lost

    def before_update(self) -> None:
        """Waits until the state may be changed."""
        if self._round is not None:
            self._round.wait_captured()

    def settle(self, version: int | None = None) -> bool:
        """Wait until nothing is under way, and begin nothing more; whether all that was is complete.

        `version`: of the state now, if it is to be copied where what is under way is older: collective then.
        """
        self.pacer.hurry("recovery")
        self._is_settled = True
        self.before_update()
        is_whole = self.wait()
        self._round = None
        self.sources.clear()
        if version is not None and self.copies_late and self.snapshot_schedule.begun < step_of(version):
            self._is_settled = False
            self.start(version, Due(bundles=None))
            is_whole = self.settle() and is_whole
        return is_whole

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest capture took."""
        return 0.0 if self._round is None else self._round.capture_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """Sets, from the sums over all members, how often local snapshots cost no more than the budget."""
        if self._fixed_steps is None and step_seconds > 0:
            share = SHARE_ON_HOST if self._membership.device.type == "cpu" else 1.0
            steps = math.ceil(capture_seconds / (share * self._copy_budget * step_seconds))
            self._local_steps = min(max(steps, 1), MAX_LOCAL_STEPS)

    # ---- what is scheduled

    def due(self, step: int, choose: Callable[[], Collection[str]] | None) -> Due:
        """Bundles of which a round should begin now; `choose` gives the experts for local snapshots."""
        if self.copies_late:  # also where there is no memory for any: steps are committed with versions
            return Due(bundles=None) if self.snapshot_schedule.is_due(step) else Due()
        if not self._sent and not self._local:
            return Due()
        sent = self._due_for_peers(step)
        if not sent and self._round is not None and not self._round.task.is_over_within(0):
            return Due()  # the round takes several steps; local snapshots can wait for it
        local = set(self._local) if step >= self._newest_local + self._local_steps else set()
        if self._options.choices.takes_turns and not local:
            return Due()
        if self._options.choices.per_expert_versions and choose is not None:
            local = _only_chosen(self._local, self._state.catalog, choose(), local)
        if self._options.choices.takes_turns:
            return Due(frozenset(local), local=self._units_of(local))
        return Due(
            frozenset(sent | local),
            remote=[unit for number in sent for unit in self._sent[number][0]] if sent else None,
            local=self._units_of(local),
        )

    def _due_for_peers(self, step: int) -> set[int]:
        return {number for number, (_, period) in self._sent.items() if step % period == 0}

    def start(self, version: int, due: Due) -> None:
        """Begin a round of what is scheduled of the state, which is that of `version`."""
        if due.bundles == frozenset():
            return
        if due.bundles is not None and step_of(version) >= self._newest_local + self._local_steps:
            self._newest_local = step_of(version)
        if due.bundles is not None and due.bundles & self._local.keys():
            self._former.replace()
        if not self._is_settled:  # where the members change, no peer would receive it
            if self._round is not None:
                self._whole |= self._round.whole
                self.window_planner.host_speed = self._round.host_speed or self.window_planner.host_speed
            self._round = SnapshotRound(self._store, version, self.courier, due.bundles, self._emit).start()
            self.snapshot_schedule.begin(step_of(version), self.window_planner.version_steps)
            if self._blocks:
                self.pacer.hurry()
                self.wait()

    def lag(self, step: int) -> dict[str, int]:
        """Return the oldest complete one of the `snapshot` on other nodes and of the `local` ones."""
        if self._round is not None:
            self._whole |= self._round.whole
        kinds: dict[str, Mapping[int, object]] = {"snapshot": self._sent, "local": self._local}
        found = {kind: [at for number, at in self._whole.items() if number in some] for kind, some in kinds.items()}
        return {kind: step - min(steps) for kind, steps in found.items() if steps}

    def stored(self) -> Iterator[tuple[SnapshotUnit, str]]:
        """List every complete version of every unit in this node's memory, also of processes that have died on it."""
        for stored in self._store.stored():
            yield stored, "snapshot"

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""
        self.courier.close()
        if self._follower is not None:
            self._follower.close()


def _only_chosen(
    units: Mapping[int, Sequence[str]], catalog: UnitCatalog, experts: Collection[str], due: Collection[int]
) -> set[int]:
    """Of the bundles with experts those that are chosen; of the others those that are scheduled."""
    return {
        number
        for number, (first, *_) in units.items()
        if (first in experts if catalog.by_name[first].layer is not None else number in due)
    }
