"""Protects the state of a job, as the preset of its session says, at the cost of as little time as can be.

    step n   forward, backward ─ reduce ─ [gradients to replicas] ─ VOTE ─ update ─ [snapshot of n + 1 begins]
    kinds    replayed   the gradients of step n are at the replicas before the vote: what is committed is safe at once
             snapshot   version n + 1 is captured and sent during step n + 1, whole before its vote: safe a step later

`ProtectionPlan` says what is kept by which rank; the keepers do it: `Replicas` with gradients, `Snapshots` with states,
`PartialCheckpoints` with a folder. The ledger says how much is copied now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from evermoe.comm.courier import Sent
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.config.copies import CopyConfig
from evermoe.events import Confirm, CoverageChanged, Listener, ProtectionPlanned, Send
from evermoe.first_copies import FirstCopies
from evermoe.keeper import Assignment, Keeper, StateKeeper
from evermoe.loss_ledger import LossLedger
from evermoe.persist.folder import PERSISTED
from evermoe.persist.object_store import Location
from evermoe.persist.partial import PartialCheckpoints
from evermoe.persist.partial_store import open_partial
from evermoe.planning.protection import ProtectionPlan, RankInfo
from evermoe.planning.recovery import Lagging
from evermoe.presets import Pec
from evermoe.profile.memory import return_freed_memory_beside
from evermoe.protection_inputs import (
    about_member,
    about_units,
    copies_are_late,
    covered,
    covered_now,
    gradient_bucket_bytes,
    has_room,
    in_order_of_risk,
    missing_bytes,
    plan_copies,
    unit_infos,
    without,
)
from evermoe.replay.calibrate import Arithmetic
from evermoe.replay.replicas import Replicas
from evermoe.selection import ExpertSelector
from evermoe.snapshot.rank_plan import COPIES
from evermoe.snapshot.snapshots import Snapshots
from evermoe.snapshot.store import SnapshotStore
from evermoe.state.stored import KeptCopies, StoredUnit
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


class Protection:
    """Keeps copies of a session's state on other nodes.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: who takes part; replica nodes keep copies alone.
        options: the preset, with its options, and the number of copies.
        location: of the checkpoint store; None without one.
        arithmetic: of the optimizer, if its steps can be repeated.
        emit: of the session.
    """

    def __init__(
        self,
        state: TrainingState,
        store: SnapshotStore,
        membership: MembershipManager,
        options: CopyConfig,
        location: Location | None,
        arithmetic: Arithmetic | None,
        emit: Listener,
    ) -> None:
        self.state, self.store, self.options, self._emit = state, store, options, emit
        self._membership, self.preset, self._directory = membership, options.choices, store.directory
        self.plan = ProtectionPlan([], "not arranged yet")
        self.active: dict[str, tuple[int, ...]] = {}
        """Per unit, the ranks that train it, as of the latest plan."""
        lagging = self.preset.lagging
        self.lagging: Lagging = lagging if lagging != "if needed" or options.replication else "never"
        """Whether a recovery may take experts at older versions than the rest."""
        self.ledger = LossLedger(state, options.preset.group(Pec), notes_copies=self.lagging != "never")
        selector = self.selector = ExpertSelector(state, options.preset, self.ledger)
        self.snapshots = Snapshots(state, store, membership, options, emit)
        pacer, message_bytes = self.snapshots.pacer, options.windows.copy_buffer_bytes
        self.replicas = Replicas(state, membership, options, arithmetic, emit, pacer, message_bytes)
        self._state_keepers: list[StateKeeper] = [self.snapshots]
        courier = self.snapshots.courier
        if self.preset.needs_checkpoint_dir and location is not None:
            partial = open_partial(location / PERSISTED, state.catalog.layout, membership.identity.job)
            interval = options.preset.group(Pec).save_interval
            self._state_keepers.append(PartialCheckpoints(partial, state, membership, courier, interval))
        self.keepers: list[Keeper] = [*self._state_keepers, self.replicas]
        """All that keep copies, in the order in which they are driven."""
        self.window_planner = self.snapshots.window_planner
        """Plans the times at which snapshots travel."""
        in_memory = {
            "load-aware": selector.to_snapshot,
            "budget": lambda: selector.for_local_memory(self.window_planner.budgets.local),
        }
        self._choose = [in_memory.get(self.preset.selection), selector.to_save]
        """Choice of experts by each keeper of states; None where it makes none."""
        self.couriers = self.window_planner.couriers = self.replicas.courier, self.snapshots.courier
        """The threads that send."""
        self.copies_late = False  # as of `Assignment`
        self._selected: set[str] | None = None
        """Units whose replicas follow the step that runs; None for all."""
        self._followed: set[str] = set()
        """Units that replicas follow."""
        self._behind: set[str] = set()
        """Units whose replicas are a step behind, as they get the state alone."""
        self._skipped: list[tuple[str, int]] = []
        """Units whose copies were never completed, and their versions, which the others do not know yet."""
        self.first = FirstCopies(self.keepers, self.replicas, membership, self.ledger, emit)
        """Those with which a plan begins."""
        self._covered: CoverageChanged | None = None
        """Losses that the latest plan survives once its copies are complete."""
        self._step_began = time.monotonic()
        self.step_seconds = 0.0
        """Time of the last step."""

    # ---- who keeps what

    def replan(self, generation: int, member: str, copies: KeptCopies, *, waits: bool = False) -> None:
        """Decides with all members who keeps what from now on; collective. `protect` must follow.

        Args:
            generation: of the members.
            member: this one's name.
            copies: those that members have of the state now.
            waits: whether training waits in any case until the copies of the plan are complete.
        """
        self.settle()
        self.first.forget()  # where the recovery before was interrupted
        group = self._membership.everyone
        mine = about_member(self._membership, self.window_planner, self.options)
        everyone = gather_json(group, {"member": asdict(mine), "failed": self.first.failed})
        told = None
        if group.rank == 0:  # a member that trains
            told = about_units(self.state, self.replicas), gradient_bucket_bytes(self.state, self.options)
        units, bucket_bytes = share_json(group, told)
        self.active = self.state.active(self._membership.num_trainers)
        self.selector.replan(self.active, self._membership.num_trainers)
        infos = unit_infos(self.state, self.active, units)
        ranks = [RankInfo.from_json(each["member"]) for each in everyone]
        plan = plan_copies(self.options, infos, ranks)
        self.plan = in_order_of_risk(plan, infos, ranks, copies)
        kept = self.plan.units
        self._followed = {each.unit for each in kept if each.kind == "replayed"}
        if self.preset.selects_by_budget:
            self.selector.copied = {each.unit for each in kept if each.holders}
        self._behind = self._followed - {info.name for info in infos if info.replayable}
        self.copies_late = copies_are_late(plan, self.options)
        assignment = Assignment(self.plan, self.active, generation, member, self.copies_late, copies, bucket_bytes)
        is_roomy = has_room(assignment, self.state, self._membership, self.options, self._directory)
        waits = waits or not self.options.replication or any(each["failed"] for each in everyone)
        assignment = replace(assignment, is_beside=self.first.plan(copies, waits=waits, is_roomy=is_roomy))
        if not assignment.is_beside:
            self.state.late.finish()  # what is retained of it is given up with the copies of before
        for keeper in self.keepers:
            keeper.replan(assignment)
        if self.snapshots.missing:
            self.plan = without(self.plan, self.snapshots.missing)
        whole = self._covered = covered(self.plan, self.active, ranks)
        if group.rank == 0:
            odds = "the state survives the loss of a node with probability %.3g, of two at once with %.3g"
            logger.info(f"%s; {odds}", self.plan.summary, whole.survives_one, whole.survives_two)
        sent = missing_bytes(self.plan, dict(self.state.catalog.sizes()), copies)
        locked = self.snapshots.locked_bytes
        self._emit(ProtectionPlanned(self.plan.summary, whole.survives_one, whole.survives_two, locked, sent))
        self._emit(covered_now(self.plan, self.active, ranks, copies))

    def protect(self, version: int) -> bool:
        """Makes the copies of the plan that are missing as of `version`; collective.

        They are sent while the next step computes, and `finish` waits for them; those of before stay until its vote has
        passed. Where memory is short, or copies came damaged, they are complete everywhere on return; `version` is that
        of the state now.

        Returns:
            Whether they are complete; the same on all members.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        step = step_of(version)
        is_beside = self.first.may_arrive_later
        if not is_beside:
            self.snapshots.pacer.hurry("recovery")
            self.state.late.finish()
            self.first.make(version, self.options.replication > 0)
            self._release(version)
        for keeper in self.keepers:
            keeper.restart(step)
        if is_beside:  # now, as the threads that send would be in the way of what all wait for
            self.state.late.start()
            self.first.begin(version)
        return not self.first.is_arriving

    def _release(self, version: int) -> None:
        """The copies of the plan are complete on all members, as of this version: those of before are dropped."""
        kept = [each.unit for each in self.plan.units if each.holders]
        if kept:
            self.ledger.copied(kept, version)
        if self.options.replication:
            self.ledger.copied_locally(self.snapshots.local_units, version)
        for keeper in self.keepers:
            keeper.release(step_of(version))
        self.state.retained.release()
        self.first.end()
        return_freed_memory_beside()
        if self._covered is not None:
            self._emit(self._covered)

    # ---- a step

    def begin_step(self, step: int) -> None:
        """A step begins, after which so many are taken: replicas that cannot follow it get the state of before it."""
        self._step_began = time.monotonic()
        self._selected = self._select()
        self.replicas.begin_step(step, self._selected)
        self.snapshots.pacer.begin_forward()

    def begin_exchange(self, step: int, *, are_final: bool) -> None:
        """This member's gradients are there, not reduced: sends what is whole already, if they are final then."""
        self.replicas.backward(ends=True)
        if are_final and self.replicas.is_early and not self.state.late.is_under_way:
            self.replicas.begin(step, self._selected)

    def finish(self, step: int) -> tuple[bool, int]:
        """Sends the gradients of the next step, now that all are complete; waits for what must be protected before it.

        Returns:
            Whether that is so, as far as this member knows, and of how many units it has to tell the others in `heal`.
        """
        self._emit(Send(step))
        is_due = self.copies_late and self.snapshots.snapshot_schedule.is_due(step)
        if is_due or self.first.is_arriving:
            self.snapshots.pacer.hurry()
        with self.snapshots.pacer.busy(COPIES):
            self.state.late.finish()
            self.replicas.begin(step, self._selected)
            is_whole = all([keeper.before_vote(step) for keeper in self.keepers])
            if self.first.is_arriving:
                is_whole = self.first.have_arrived() and is_whole
        self._emit(Confirm(step))
        for keeper in self._state_keepers:
            self._skipped += keeper.take_skipped()
        return is_whole, len(self.replicas.asked) + len(self._skipped)

    def _select(self) -> set[str] | None:
        """Units whose replicas follow the step that begins; None for all."""
        if not self.preset.selects_by_budget:
            return None
        experts = self._followed.intersection(self.state.catalog.experts())
        return self._followed - experts | self.selector.for_peers(experts, self.window_planner.budgets.remote)

    def before_update(self) -> None:
        """The optimizer wants to write the state: a snapshot of it is finished first."""
        for keeper in self.keepers:
            keeper.before_update()

    def committed(self, version: int, clip: float | None) -> None:
        """Records that the agreed step was taken: `version` is the state now. `clip` is None for a skipped update."""
        if self.first.version is not None:  # all have said in the vote that they have theirs
            self._release(self.first.version)
        for keeper in self.keepers:
            keeper.after_update(version, clip)
        self.step_seconds = time.monotonic() - self._step_began
        self.ledger.add(step_of(version))
        if self._selected:  # of what cannot be repeated the replica has the state before the step
            self.ledger.copied(self._selected, version, self._behind)

    def begin_copies(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`, as far as that is due."""
        step = step_of(version)
        for keeper in self._state_keepers:
            keeper.make_room(step)
        self.snapshots.pacer.begin_step()
        if self.options.replication:
            for keeper, choose in zip(self._state_keepers, self._choose, strict=False):
                due = keeper.due(step, choose)
                if due.remote is not None:
                    self.ledger.copied(due.remote, version)
                if due.local is not None:
                    self.ledger.copied_locally(due.local, version)
                keeper.start(version, due)

    def heal(self) -> None:
        """Some members need full states, which come with the next step, or copies of theirs never came to be.

        Collective; the ledgers of all members stay the same.
        """
        self.replicas.heal(lambda unit: self.plan.by_unit[unit].primary)
        everyone = gather_json(self._membership.everyone, self._skipped)
        self._skipped = []
        skipped: dict[int, set[str]] = {}
        for unit, version in (each for part in everyone for each in part):
            skipped.setdefault(version, set()).add(unit)
        for version in sorted(skipped):
            self.ledger.skipped(sorted(skipped[version]), version)

    def measures(self) -> tuple[float, float]:
        """Seconds that a capture took and that a step takes, on this member."""
        return sum(keeper.capture_seconds for keeper in self._state_keepers), self.step_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """Sets, from the sums of `measures` over all members, how often local snapshots are made."""
        self.snapshots.set_pace(capture_seconds, step_seconds)

    def sent(self) -> list[Sent]:
        """The latest messages of this member's copies, for traces."""
        every = [sent for courier in self.couriers for sent in list(courier.sent)]
        return sorted(every, key=lambda sent: sent.start)

    def write_trace(self, path: str | Path) -> None:
        """Writes this member's latest profiled steps, its windows and its copies for Perfetto.

        Raises:
            ValueError: no profile is complete yet.
        """
        Path(path).write_text(self.window_planner.trace())

    # ---- after a failure

    def settle(self, version: int | None = None) -> bool:
        """Waits until nothing is under way, which is at once in a dropped group; whether all that was is whole.

        `version`: of the state now, if copies of it must be complete, too, as no vote follows that waits for them.
        """
        others = [keeper for keeper in self.keepers if keeper is not self.snapshots]
        return all([self.snapshots.settle(version), *(keeper.settle() for keeper in others)])

    def count_losses(self, stale: Mapping[str, int], version: int, before: int | None) -> dict[str, int]:
        """Tokens that each stale expert has lost: see `LossLedger.agree_on_lost`; collective."""
        if self.lagging == "never" or not self.state.layers:
            return {}
        return self.ledger.agree_on_lost(self._membership.everyone, stale, version, before)

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Every whole version of every unit that this member has a copy of, and the copy's kind."""
        for keeper in self.keepers:
            yield from keeper.stored()

    def close(self) -> None:
        """Ends all threads. Nothing may be under way, or the group must be dropped."""
        self.settle()
        for keeper in self.keepers:
            keeper.close()
