"""Snapshots of the state: the bundles scheduled at a step, and the round that copies them in the background.

Peers' copies follow the windows that `window_plan` finds; local copies are made as often as the budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from evermoe._native import VersionSchedule
from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.config.copies import CopyConfig
from evermoe.copies.snapshot.held_parts import HeldParts, still_parts
from evermoe.copies.snapshot.local_schedule import LocalSchedule
from evermoe.copies.snapshot.planned_bundles import PlannedBundles, planned_bundles
from evermoe.copies.snapshot.previous_epoch import PreviousEpochSnapshots
from evermoe.copies.snapshot.rounds import Rounds
from evermoe.copies.snapshot.step_source import StepSource
from evermoe.copies.snapshot.store import SnapshotStore, SnapshotUnit
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.events.base_event import Listener
from evermoe.presets import Gemini
from evermoe.profile.follower import StreamFollower
from evermoe.state.keeper import Assignment, Keeper, ScheduledCopies
from evermoe.state.stored import NO_COPIES
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

SHARE_ON_HOST = 0.1
"""Part of the budget for them if the model is on the host: like the copies on other nodes, which come first, they take
processor time from training."""


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
        self._state, self._store, self._membership, self._options = state, store, membership, options
        self.pacer = Pacer()
        self.courier = Courier(membership.transport, self.pacer, "evermoe-snapshots", device=membership.device)
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
        self._is_settled = False
        """Whether nothing is sent until `restart`, since the members change."""
        self.bundles = PlannedBundles()
        self._local = LocalSchedule(options)
        self._former = PreviousEpochSnapshots(store)
        self._copies = NO_COPIES
        """Previous copies, which need not be sent again."""

    @property
    def _blocks(self) -> bool:
        """Whether training waits for each version."""
        return self._options.preset.group(Gemini).copy_pacing == "blocking"

    @property
    def copies_late(self) -> bool:
        """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
        return self.snapshot_schedule.is_used

    # ---- bundles

    def replan(self, assignment: Assignment) -> None:
        """Create the arenas of a plan next to the previous ones; `protect_all`, `release` and `restart` must follow.

        If a running job has no room for all of them, `bundles.missing` names the holders without room.

        Raises:
            OSError: a job starts, and the shared memory is too small.
        """
        self._local.replan(assignment, had_room=not self.problem)
        self._former.restart(assignment.generation)
        self.snapshot_schedule.is_used = assignment.copies_late
        self._copies = assignment.copies
        if not self._options.replication:
            return
        found, local = planned_bundles(assignment, self._options)
        kept = self.rounds.replace_arenas(
            [*found, *local], assignment.generation, assignment.copies, in_background=assignment.in_background
        )
        for each in (*self._store.own, *self._store.peers):
            each.still = still_parts(each.arena, assignment.still, self._state.catalog.by_name)
        self._local.begins_later &= bool(assignment.copies)  # otherwise the previous ones were removed to make room
        self.bundles.replan(found, local, kept, assignment.plan)

    @property
    def local_units(self) -> list[str]:
        """Return the units whose first copies of the plan include snapshots that stay on their own nodes."""
        return [] if self._local.begins_later else self.bundles.local_units(self.bundles.local)

    # ---- first copies

    def protect_all(self, version: int) -> None:
        """Begin to copy all bundles as of `version`; send other members only what they lack.

        If the budget determines the interval of local snapshots, these begin a step later: peers' copies come first.
        """
        due = set(self.bundles.sent) if self._local.begins_later else None
        if self.bundles.sent or (self.bundles.local and not self._local.begins_later):
            self.rounds.begin(version, due, self._copies)

    def release(self, step: int) -> None:
        """Remove the arenas of earlier plans, unless their local snapshots are still needed."""
        sent, local = self.bundles.sent, self.bundles.local
        copied = sent if self._local.begins_later else sent | local
        self.bundles.begin_plan(dict.fromkeys(copied.keys() & {kept.number for kept in self._store.own}, step))
        if self._options.replication:
            self._former.release(are_needed=self._local.begins_later and bool(local))

    def restart(self, step: int) -> None:
        """Begin the next step, whose windows are not known yet."""
        self._is_settled = False
        self._local.restart(step)
        is_urgent = bool(self.bundles.sent) or self._options.choices.selects_by_budget
        self.window_planner.restart(step, self.copies_late, is_urgent=is_urgent)
        self.snapshot_schedule.restart(step)
        self.pacer.begin_step()

    # ---- a step

    def make_room(self, step: int) -> None:
        """Wait for the version under way if another is scheduled: one at a time. Previous ones may be removed."""
        self._former.give_up()
        is_due = (
            self.snapshot_schedule.is_due(step)
            if self.copies_late
            else self.bundles.due_for_peers(step) or not self.bundles.sent
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
        if self.rounds.current is not None and not self.bundles.sent:  # does not wait for a peer
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
        share = SHARE_ON_HOST if self._membership.device.type == "cpu" else 1.0
        self._local.set_pace(capture_seconds, step_seconds, share)

    # ---- what is scheduled

    def scheduled_copies(self, step: int, choose: Callable[[], Collection[str]] | None) -> ScheduledCopies:
        """Return the bundles to copy now; `choose` returns the experts for local snapshots."""
        if self.copies_late:  # even without memory for copies: steps are committed with versions
            return ScheduledCopies(bundles=None) if self.snapshot_schedule.is_due(step) else ScheduledCopies()
        bundles, choices = self.bundles, self._options.choices
        if not bundles.sent and not bundles.local:
            return ScheduledCopies()
        sent = bundles.due_for_peers(step)
        if not sent and self.rounds.current is not None and not self.rounds.current.task.is_over_within(0):
            return ScheduledCopies()  # the round takes several steps; local snapshots can wait for it
        local = set(bundles.local) if self._local.is_due(step) else set()
        if choices.takes_turns and not local:
            return ScheduledCopies()
        if choices.per_expert_versions and choose is not None:
            local = bundles.local_of(choose(), self._state.catalog, local)
        if choices.takes_turns:
            return ScheduledCopies(frozenset(local), local=bundles.local_units(local))
        return ScheduledCopies(
            frozenset(sent | local),
            remote=[unit for number in sent for unit in bundles.sent[number][0]] if sent else None,
            local=bundles.local_units(local) if local or choices.per_expert_versions else None,
        )

    def begin_copies(self, version: int, scheduled: ScheduledCopies) -> None:
        """Begin a round of the scheduled bundles of the state of `version`."""
        bundles = scheduled.bundles
        if bundles == frozenset():
            return
        if bundles is not None:
            self._local.begin_round(step_of(version))
            if bundles & self.bundles.local.keys():
                self._former.replace()
        if not self._is_settled:  # while the members change, no peer would receive it
            if self.rounds.current is not None:
                self.bundles.note_complete(self.rounds.current.complete_steps)
            self.rounds.begin(version, bundles, contents=HeldParts(self._store))
            self.snapshot_schedule.begin_version(step_of(version), self.window_planner.versions.steps)
            if self._blocks:
                self.pacer.hurry()
                self.wait_for_copies()

    def lag(self, step: int) -> dict[str, int]:
        """Return the lag of the oldest complete `snapshot` on other nodes and of the oldest `local` one."""
        if self.rounds.current is not None:
            self.bundles.note_complete(self.rounds.current.complete_steps)
        return self.bundles.lag(step)

    def stored(self) -> Iterator[tuple[SnapshotUnit, str]]:
        """Yield every complete version of every unit in this node's memory, including those of dead processes."""
        for stored in self._store.stored():
            yield stored, "snapshot"

    def close(self) -> None:
        """Stop all threads. Nothing may be under way."""
        self.courier.close()
        if self._follower is not None:
            self._follower.close()
