"""Protect the state of a job as the preset of its session says, at the lowest cost in time.

    step n   forward, backward ─ reduce ─ [gradients to replicas] ─ VOTE ─ update ─ [snapshot of n + 1 begins]
    kinds    replayed   the gradients of step n reach the replicas before the vote: a committed step is safe at once
             snapshot   version n + 1 is captured and sent in step n + 1, complete before its vote: safe a step later

`ProtectionPlan` names the rank that keeps each copy. The keepers make them: `Replicas` from gradients, `Snapshots` from
states. The ledger says how many experts are copied at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from evermoe.comm.courier import Sent
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.config.copies import CopyConfig
from evermoe.copies.copy_selection import CopySelection
from evermoe.copies.first_copies import FirstCopies
from evermoe.copies.loss_ledger import LossLedger
from evermoe.copies.protection_inputs import (
    UnitFacts,
    current_coverage,
    gradient_bucket_bytes,
    has_room,
    log_plan,
    member_info,
    missing_bytes,
    order_by_risk,
    plan_copies,
    planned_coverage,
    unit_facts,
    unit_infos,
    without_copies,
)
from evermoe.copies.replay.calibrate import Arithmetics
from evermoe.copies.replay.replicas import Replicas
from evermoe.copies.snapshot.link import common_message_bytes
from evermoe.copies.snapshot.rank_plan import COPIES
from evermoe.copies.snapshot.snapshots import Snapshots
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.events import Confirm, CoverageChanged, ProtectionPlanned, Send
from evermoe.events.base_event import Listener
from evermoe.planning.protection import ProtectionPlan, RankInfo
from evermoe.presets import Pec
from evermoe.profile.memory import return_freed_memory_beside
from evermoe.state.keeper import Assignment, Keeper
from evermoe.state.stored import KeptCopies, StoredUnit
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of


class Protection:
    """Keeps copies of a session's state on other nodes.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: all members; replica nodes only keep copies.
        options: the preset, with its options, and the number of copies.
        arithmetics: of the optimizers whose steps can be repeated.
        emit: listener of the session.
    """

    def __init__(
        self,
        state: TrainingState,
        store: SnapshotStore,
        membership: MembershipManager,
        options: CopyConfig,
        arithmetics: Arithmetics,
        emit: Listener,
    ) -> None:
        self.state, self.store, self.options, self._emit = state, store, options, emit
        self._membership = membership
        self.plan = ProtectionPlan([], "no plan yet")
        self.active: dict[str, tuple[int, ...]] = {}
        """Ranks that train each unit, in the latest plan."""
        self.ledger = LossLedger(state, options.preset.group(Pec), records_copies=options.lagging != "never")
        self.snapshots = Snapshots(state, store, membership, options, emit)
        self.replicas = Replicas(state, membership, options, arithmetics, emit, self.snapshots.pacer)
        planner = self.snapshots.window_planner
        planner.speeds.couriers = self.replicas.courier, self.snapshots.courier
        self.selection = CopySelection(state, options, self.ledger, planner)
        self.first = FirstCopies(self.keepers, membership, emit, self.replicas)
        """The copies with which a plan begins."""
        self._covered: CoverageChanged | None = None
        """Losses that the latest plan survives once its copies are complete."""
        self._step_began = time.monotonic()
        self.step_seconds = 0.0
        """Duration of the last step."""

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """All keepers of copies, in the order in which they are called."""
        return self.snapshots, self.replicas

    # ---- the plan

    def replan(self, generation: int, member: str, copies: KeptCopies, *, waits: bool = False) -> None:
        """Decide with all members who keeps which copies; collective. `protect_state` must follow.

        Args:
            generation: of the members.
            member: name of this member.
            copies: copies of the current state that members have.
            waits: whether training must wait until the copies of the plan are complete.
        """
        self.settle()
        self.first.drop_earlier_copies()  # in case the previous recovery was interrupted
        group = self._membership.everyone
        mine = member_info(self._membership, self.snapshots.window_planner.speeds, self.options)
        everyone = gather_json(group, {"member": asdict(mine), "failed": self.first.failed})
        shared = None
        if group.rank == 0:  # a member that trains
            shared = unit_facts(self.state, self.replicas), gradient_bucket_bytes(self.state, self.options)
        units, bucket_bytes = share_json(group, shared)
        self.active = self.state.active(self._membership.num_trainers)
        about = [UnitFacts(*each) for each in units]
        infos = unit_infos(self.state, self.active, about)
        ranks = [RankInfo.from_json(each["member"]) for each in everyone]
        links = [info.link for info in ranks]
        self.store.chunk_bytes = self.options.windows.copy_buffer_bytes or common_message_bytes(links)
        plan = plan_copies(self.options, infos, ranks)
        self.plan = order_by_risk(plan, infos, ranks, copies)
        replayable = {info.name for info in infos if info.replayable}
        self.selection.replan(self.plan, self.active, self._membership.num_trainers, replayable)
        still = {info.name: facts.still for info, facts in zip(infos, about, strict=True)}
        assignment = Assignment(self.plan, self.active, generation, member, plan.is_late, copies, bucket_bytes, still)
        is_roomy = has_room(assignment, self.state, self._membership, self.options, self.store.directory)
        waits = waits or not self.options.replication or any(each["failed"] for each in everyone)
        in_background = self.first.begin_plan(copies, waits=waits, has_room=is_roomy)
        assignment = replace(assignment, in_background=in_background)
        if not in_background:
            self.state.late.finish()  # what is retained of it is given up with the earlier copies
        for keeper in self.keepers:
            keeper.replan(assignment)
        if self.snapshots.bundles.missing:
            self.plan = without_copies(self.plan, self.snapshots.bundles.missing)
        coverage = self._covered = planned_coverage(self.plan, self.active, ranks)
        if group.rank == 0:
            log_plan(self.plan, self.active, ranks, self.options, coverage)
        sent = missing_bytes(self.plan, dict(self.state.catalog.sizes()), copies)
        survives, locked = (coverage.survives_one, coverage.survives_two), self.snapshots.rounds.locked_bytes
        self._emit(ProtectionPlanned(self.plan.summary, *survives, locked, sent))
        self._emit(current_coverage(self.plan, self.active, ranks, copies))

    def protect_state(self, version: int) -> bool:
        """Make the copies of the plan that are missing as of `version`, that of the current state; collective.

        They are sent while the next step computes. `finish_exchange` waits for them; earlier copies stay until its vote
        has passed. If memory is short, or copies arrived damaged, this waits until all members have complete ones.

        Returns:
            Whether they are complete; the same on all members.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        step = step_of(version)
        in_background = self.first.may_arrive_later
        if not in_background:
            self.snapshots.pacer.hurry("recovery")
            self.state.late.finish()
            self.first.make_copies(version, self.options.replication > 0)
            self._release(version)
        for keeper in self.keepers:
            keeper.restart(step)
        if in_background:  # only now: the sending threads would delay what all members wait for
            self.state.late.start()
            self.first.begin_copies(version)
        return not self.first.is_arriving

    def _release(self, version: int) -> None:
        """Drop the earlier copies: those of the plan are complete on all members, as of this version."""
        kept = [each.unit for each in self.plan.units if each.holders]
        if kept:
            self.ledger.record_copies(kept, version)
        if self.options.replication:
            self.ledger.record_local_copies(self.snapshots.local_units, version)
        for keeper in self.keepers:
            keeper.release(step_of(version))
        self.state.retained.release()
        self.first.finish_plan()
        return_freed_memory_beside()
        if self._covered is not None:
            self._emit(self._covered)

    # ---- a step

    def begin_step(self, step: int, *, may_send_early: bool = False) -> None:
        """Begin the step that makes `step` the number of steps taken. Replicas that cannot follow it get the state.

        Gradients for replicas `may_send_early`, during backward, or not.
        """
        self._step_began = time.monotonic()
        self.selection.begin_step()
        self.replicas.begin_step(step, self.selection.now, may_send_early=may_send_early)
        self.snapshots.pacer.begin_forward()

    def begin_exchange(self, step: int, *, are_final: bool) -> None:
        """Begin to send what is complete of this member's unreduced gradients, if they `are_final` then."""
        if are_final and self.replicas.is_early and not self.state.late.is_under_way:
            self.replicas.begin_exchange(step, self.selection.now)

    def finish_exchange(self, step: int) -> tuple[bool, int]:
        """Send the gradients of the next step, now that all are complete; wait for what must be protected before it.

        Returns:
            Whether it is protected, as far as this member knows, and the number of units to report in `heal_copies`.
        """
        self._emit(Send(step))
        is_due = self.snapshots.copies_late and self.snapshots.snapshot_schedule.is_due(step)
        if is_due or self.first.is_arriving:
            self.snapshots.pacer.hurry()
        with self.snapshots.pacer.busy(COPIES):
            self.state.late.finish()
            self.replicas.begin_exchange(step, self.selection.now)
            is_complete = all([keeper.before_vote(step) for keeper in self.keepers])
            if self.first.is_arriving:
                is_complete = self.first.have_arrived() and is_complete
        self._emit(Confirm(step))
        return is_complete, len(self.replicas.requests.units)

    def before_update(self) -> None:
        """Finish snapshots of the state before the optimizer writes it."""
        for keeper in self.keepers:
            keeper.before_update()

    def commit_step(self, version: int, clip: float | None) -> None:
        """Record that the agreed step was taken: `version` is the state now. `clip` is None for a skipped update."""
        if self.first.version is not None:  # in the vote, all members have confirmed theirs
            self._release(self.first.version)
        for keeper in self.keepers:
            keeper.after_update(version, clip)
        self.step_seconds = time.monotonic() - self._step_began
        self.ledger.add_step(step_of(version))
        self.selection.record_step(version)

    def begin_copies(self, version: int) -> None:
        """Begin to make the scheduled copies of the state, which is that of `version`."""
        step = step_of(version)
        self.snapshots.make_room(step)
        self.snapshots.pacer.begin_step()
        if self.options.replication:
            scheduled = self.snapshots.scheduled_copies(step, self.selection.for_snapshots)
            if scheduled.remote is not None:
                self.ledger.record_copies(scheduled.remote, version)
            if scheduled.local is not None:
                self.ledger.record_local_copies(scheduled.local, version)
            self.snapshots.begin_copies(version, scheduled)

    def heal_copies(self) -> None:
        """Gather requests for full states, which come with the next step; collective."""
        self.replicas.heal_replicas(lambda unit: self.plan.by_unit[unit].primary)

    def measured_seconds(self) -> tuple[float, float]:
        """Return the seconds of a capture and of a step on this member."""
        return self.snapshots.capture_seconds, self.step_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """Set the interval of local snapshots from the sums of `measured_seconds` over all members."""
        self.snapshots.set_pace(capture_seconds, step_seconds)

    def sent_messages(self) -> list[Sent]:
        """Return the latest messages of this member's copies, for traces."""
        return sorted(self.snapshots.window_planner.speeds.sent_messages(), key=lambda sent: sent.start)

    # ---- after a failure

    def settle(self, version: int | None = None) -> bool:
        """Wait until nothing is in flight, which is at once in a dropped group; return whether all of it was completed.

        With `version`, that of the current state, copies of it must be complete, too: no later vote waits for them.
        """
        others = [keeper for keeper in self.keepers if keeper is not self.snapshots]
        return all([self.snapshots.settle(version), *(keeper.settle() for keeper in others)])

    def count_losses(self, stale: Mapping[str, int], version: int, before: int | None) -> dict[str, int]:
        """Return the tokens that each stale expert has lost: see `LossLedger.agree_on_lost`; collective."""
        if self.options.lagging == "never" or not self.state.layers:
            return {}
        return self.ledger.agree_on_lost(self._membership.everyone, stale, version, before)

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Yield every complete version of every unit that this member has a copy of, and the copy's kind."""
        for keeper in self.keepers:
            yield from keeper.stored()

    def close(self) -> None:
        """End all threads. Nothing may be in flight, or the group must be dropped."""
        self.settle()
        for keeper in self.keepers:
            keeper.close()
