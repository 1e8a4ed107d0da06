"""Snapshots of the state: the bundles scheduled at a step, and the round that copies them in the background.

Peers' copies follow the windows that `window_plan` finds; local copies are made as often as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from evermoe._native import VersionSchedule
from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.config.copies import CopyConfig
from evermoe.copies.snapshot.bundles import Bundle, bundles
from evermoe.copies.snapshot.held_parts import HeldParts, still_parts
from evermoe.copies.snapshot.previous_epoch import PreviousEpochSnapshots
from evermoe.copies.snapshot.rounds import Rounds
from evermoe.copies.snapshot.step_source import StepSource
from evermoe.copies.snapshot.store import SnapshotStore, SnapshotUnit
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.events.base_event import Listener
from evermoe.presets import Gemini, LocalSnapshots, Pec
from evermoe.profile.follower import StreamFollower
from evermoe.state.catalog import UnitCatalog
from evermoe.state.keeper import Assignment, Keeper, ScheduledCopies
from evermoe.state.stored import NO_COPIES
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

MAX_LOCAL_STEPS = 1000
"""Maximum steps between two snapshots on a unit's own node."""
SHARE_ON_HOST = 0.1
"""Part of the budget for them if the model is on the host: like the copies on other nodes, which come first, they take
processor time from training."""


def planned_bundles(assignment: Assignment, options: CopyConfig) -> tuple[list[Bundle], list[Bundle]]:
    """Return the bundles of a plan: those with copies on other nodes, and those that stay on the nodes that train them.

    Args:
        assignment: the plan.
        options: preset and copies; without any, the lists are empty.
    """
    if not options.replication:
        return [], []
    some = [kept for kept in assignment.plan.units if kept.kind == "snapshot"]
    found = bundles([k.unit for k in some], [[k.primary, *k.holders] for k in some], [k.period for k in some])
    own = [(kept.unit, rank) for kept in assignment.plan.units for rank in kept.own]
    local = bundles([unit for unit, _ in own], [[rank] for _, rank in own])
    if options.choices.per_expert_versions:
        local = [part for bundle in local for part in bundle.divided(*([unit] for unit in bundle.units))]
    return found, local


class Snapshots(Keeper):
    """Schedules and runs the rounds of a session.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: the members that take part.
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
        self._options = options
        self.pacer = Pacer()
        self.courier = Courier(membership.transport, self.pacer, "evermoe-snapshots", device=membership.device)
        self._blocks = options.preset.group(Gemini).copy_pacing == "blocking"
        policy = options.choices.schedule if options.replication and not self._blocks else None
        self._follower = StreamFollower() if policy is not None and membership.device.type == "cuda" else None
        if options.replication:  # otherwise nothing waits for a window
            self.pacer.attach_group(membership.trainer_group, self._follower)
        if self._follower is not None:
            self.pacer.on_idle = store.pace
        self.window_planner = WindowPlanner(
            StepSource(self.pacer), self.courier, store, membership, options.windows, policy, options.steps_per_version
        )
        speeds, memory = self.window_planner.speeds, options.preset.snapshot_memory
        self.rounds = Rounds(store, membership, self.courier, speeds, memory, emit)
        self.snapshot_schedule = VersionSchedule()
        """Schedule of versions, where the copies of a step are made during the next one."""
        self.copies_late = False
        """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
        self._is_settled = False
        """Whether nothing is sent until `restart`, since the members change."""
        self._local: dict[int, tuple[str, ...]] = {}
        """Units of the bundles that only a rank that trains them keeps, by the bundle's number."""
        self._sent: dict[int, tuple[tuple[str, ...], int]] = {}
        """Units and period of the bundles that other ranks keep, too."""
        self.missing: dict[str, set[int]] = {}
        """Per unit, the ranks that should keep a snapshot of it and have no room; empty if all have."""
        self._complete: dict[int, int] = {}
        """Steps taken in the newest complete version of this member's own bundles, by number."""
        local, in_turns = options.preset.group(LocalSnapshots), options.preset.group(Pec)
        self._copy_budget = local.copy_budget
        self._fixed_steps = in_turns.snapshot_interval if options.choices.takes_turns else local.snapshot_interval
        """Steps between local snapshots; None for as few as the budget allows."""
        self._local_steps = 1
        self._newest_local: float = 0
        self._is_local_later = False
        """Whether the first local snapshots of the plan begin one step later."""
        self._former = PreviousEpochSnapshots(lambda: store.prune(self._generation))
        self._generation = 0
        self._copies = NO_COPIES
        """Previous copies, which need not be sent again."""

    # ---- bundles

    def replan(self, assignment: Assignment) -> None:
        """Create the arenas of a plan next to the previous ones; `protect_all`, `release` and `restart` must follow.

        If a running job has no room for all of them, `missing` names the holders without room.

        Raises:
            OSError: a job starts, and the shared memory is too small.
        """
        had_room, self.missing = not self.problem, {}
        self._former.reset()
        self.copies_late, self._generation = assignment.copies_late, assignment.generation
        self.snapshot_schedule.is_used = self.copies_late
        self._copies = assignment.copies
        self._local_steps = self._fixed_steps or 1
        as_budget_allows = self._fixed_steps is None and not self._options.choices.per_expert_versions
        self._is_local_later = assignment.in_background and as_budget_allows and not self.copies_late and had_room
        if not self._options.replication:
            return
        found, local = planned_bundles(assignment, self._options)
        by_unit, planned = assignment.plan.by_unit, [*found, *local]
        kept = self.rounds.replace_arenas(
            planned, assignment.generation, assignment.copies, in_background=assignment.in_background
        )
        for each in (*self._store.own, *self._store.peers):
            each.still = still_parts(each.arena, assignment.still, self._state.catalog.by_name)
        self._is_local_later &= bool(assignment.copies)  # otherwise the previous ones were removed to make room
        left = {number: bundle.units for number, bundle in enumerate(kept) if bundle.holders}
        self._local = {number: units for number, units in left.items() if number >= len(found)}
        self._sent = {n: (units, by_unit[units[0]].period) for n, units in left.items() if n < len(found)}
        for bundle, now in zip(planned, kept, strict=True):
            for unit in bundle.units if len(now.holders) < len(bundle.holders) else ():
                self.missing.setdefault(unit, set()).update({*bundle.holders} - {*now.holders})

    @property
    def local_units(self) -> list[str]:
        """Return the units whose first copies of the plan include snapshots that stay on their own nodes."""
        return [] if self._is_local_later else self._units_of(self._local)

    def _units_of(self, numbers: Iterable[int]) -> list[str]:
        """Return the units of local bundles, each once: a unit that several nodes train is in several bundles."""
        return list(dict.fromkeys(unit for number in sorted(numbers) for unit in self._local[number]))

    # ---- first copies

    def protect_all(self, version: int) -> None:
        """Begin to copy all bundles as of `version`; send other members only what they lack.

        If the budget determines the interval of local snapshots, these begin a step later: peers' copies come first.
        """
        due = set(self._sent) if self._is_local_later else None
        if self._sent or (self._local and not self._is_local_later):
            self.rounds.begin(version, due, self._copies)

    def release(self, step: int) -> None:
        """Remove the arenas of earlier plans, unless their local snapshots are still needed."""
        copied = self._sent if self._is_local_later else self._sent | self._local
        self._complete = dict.fromkeys(copied.keys() & {kept.number for kept in self._store.own}, step)
        if self._options.replication:
            self._former.release(are_needed=self._is_local_later and bool(self._local))

    def restart(self, step: int) -> None:
        """Begin the next step, whose windows are not known yet."""
        self._is_settled, self._newest_local = False, -math.inf if self._is_local_later else step
        is_urgent = bool(self._sent) or self._options.choices.selects_by_budget
        self.window_planner.restart(step, self.copies_late, is_urgent=is_urgent)
        self.snapshot_schedule.restart(step)
        self.pacer.begin_step()

    # ---- a step

    def make_room(self, step: int) -> None:
        """Wait for the version under way if another is scheduled: one at a time. Previous ones may be removed."""
        self._former.give_up()
        is_due = (
            self.snapshot_schedule.is_due(step) if self.copies_late else self._due_for_peers(step) or not self._sent
        )
        if self.rounds.current is not None and is_due:
            self.pacer.hurry()
            self.wait_for_copies()

    def before_vote(self, step: int) -> bool:
        """Wait for the copies that must be complete before the vote; return whether they are."""
        if self.rounds.current is not None and self.copies_late:
            return not self.snapshot_schedule.is_due(step) or self.wait_for_copies()
        if self.rounds.current is not None and self._former.are_replaced:
            self.pacer.hurry()
            return self._former.report_complete(self.wait_for_copies())
        if self.rounds.current is not None and not self._sent:  # does not wait for a peer
            self.rounds.current.task.wait()
        return True

    def wait_for_copies(self) -> bool:
        """Wait for the version under way, but not for a silent peer; return whether it is complete on this member."""
        return self.rounds.wait_complete()

    @property
    def problem(self) -> str:  # type: ignore[override]
        """Why copies are incomplete although no member is lost: this host has too little memory."""
        return self.rounds.problem

    @property
    def lost(self) -> str | None:
        """Why the version under way will not be complete: a peer is lost."""
        return self.rounds.lost

    def before_update(self) -> None:
        """Wait until the state may change."""
        self.rounds.wait_captured()

    def settle(self, version: int | None = None) -> bool:
        """Wait until nothing is under way, and begin nothing more; return whether all copies are complete.

        `version`: of the current state, to be copied if the version under way is older; collective then.
        """
        self.pacer.hurry("recovery")
        self._is_settled = True
        self.before_update()
        is_complete = self.wait_for_copies()
        self.rounds.current = None
        self.rounds.sources.clear()
        self._store.listed.forget()
        if version is not None and self.copies_late and self.snapshot_schedule.begun < step_of(version):
            self._is_settled = False
            self.begin_copies(version, ScheduledCopies(bundles=None))
            is_complete = self.settle() and is_complete
        return is_complete

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest capture took."""
        return self.rounds.capture_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """Set the interval at which local snapshots stay within the budget, from the sums over all members."""
        if self._fixed_steps is None and step_seconds > 0:
            share = SHARE_ON_HOST if self._membership.device.type == "cpu" else 1.0
            steps = math.ceil(capture_seconds / (share * self._copy_budget * step_seconds))
            self._local_steps = min(max(steps, 1), MAX_LOCAL_STEPS)

    # ---- what is scheduled

    def scheduled_copies(self, step: int, choose: Callable[[], Collection[str]] | None) -> ScheduledCopies:
        """Return the bundles to copy now; `choose` returns the experts for local snapshots."""
        if self.copies_late:  # even without memory for copies: steps are committed with versions
            return ScheduledCopies(bundles=None) if self.snapshot_schedule.is_due(step) else ScheduledCopies()
        if not self._sent and not self._local:
            return ScheduledCopies()
        sent = self._due_for_peers(step)
        if not sent and self.rounds.current is not None and not self.rounds.current.task.is_over_within(0):
            return ScheduledCopies()  # the round takes several steps; local snapshots can wait for it
        local = set(self._local) if step >= self._newest_local + self._local_steps else set()
        if self._options.choices.takes_turns and not local:
            return ScheduledCopies()
        if self._options.choices.per_expert_versions and choose is not None:
            local = _only_chosen(self._local, self._state.catalog, choose(), local)
        if self._options.choices.takes_turns:
            return ScheduledCopies(frozenset(local), local=self._units_of(local))
        return ScheduledCopies(
            frozenset(sent | local),
            remote=[unit for number in sent for unit in self._sent[number][0]] if sent else None,
            local=self._units_of(local) if local or self._options.choices.per_expert_versions else None,
        )

    def _due_for_peers(self, step: int) -> set[int]:
        return {number for number, (_, period) in self._sent.items() if step % period == 0}

    def begin_copies(self, version: int, scheduled: ScheduledCopies) -> None:
        """Begin a round of the scheduled bundles of the state of `version`."""
        bundles = scheduled.bundles
        if bundles == frozenset():
            return
        if bundles is not None and step_of(version) >= self._newest_local + self._local_steps:
            self._newest_local = step_of(version)
        if bundles is not None and bundles & self._local.keys():
            self._former.replace()
        if not self._is_settled:  # while the members change, no peer would receive it
            if self.rounds.current is not None:
                self._complete |= self.rounds.current.complete_steps
            self.rounds.begin(version, bundles, contents=HeldParts(self._store))
            self.snapshot_schedule.begin_version(step_of(version), self.window_planner.versions.steps)
            if self._blocks:
                self.pacer.hurry()
                self.wait_for_copies()

    def lag(self, step: int) -> dict[str, int]:
        """Return the lag of the oldest complete `snapshot` on other nodes and of the oldest `local` one."""
        if self.rounds.current is not None:
            self._complete |= self.rounds.current.complete_steps
        kinds: dict[str, Mapping[int, object]] = {"snapshot": self._sent, "local": self._local}
        found = {kind: [at for number, at in self._complete.items() if number in some] for kind, some in kinds.items()}
        return {kind: step - min(steps) for kind, steps in found.items() if steps}

    def stored(self) -> Iterator[tuple[SnapshotUnit, str]]:
        """Yield every complete version of every unit in this node's memory, including those of dead processes."""
        for stored in self._store.stored():
            yield stored, "snapshot"

    def close(self) -> None:
        """Stop all threads. Nothing may be under way."""
        self.courier.close()
        if self._follower is not None:
            self._follower.close()


def _only_chosen(
    units: Mapping[int, Sequence[str]], catalog: UnitCatalog, experts: Collection[str], due: Collection[int]
) -> set[int]:
    """Return the chosen bundles of those with experts, and the scheduled ones of the others."""
    return {
        number
        for number, (first, *_) in units.items()
        if (first in experts if catalog.by_name[first].layer is not None else number in due)
    }
