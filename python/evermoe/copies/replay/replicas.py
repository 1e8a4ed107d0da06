"""Keep replicas current in a session: the gradients of each step arrive before its vote.

    replan ─ protect_all ─ wait_for_copies ─ release ─ [ begin_step ─ begin_exchange ─ before_vote ─ after_update ]
                                                         heal_replicas, if a member has requested states

As a step begins, replicas that cannot follow it receive the state from before it: the replicas of newly selected units,
and those that have requested it. The state travels while the step computes, in idle windows of the network if these are
known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.comm.task import Task
from evermoe.config.copies import CopyConfig
from evermoe.copies.replay.calibrate import Arithmetics
from evermoe.copies.replay.devices import check_device
from evermoe.copies.replay.dispute import Dispute
from evermoe.copies.replay.exchange import ExchangeResult, ReplayExchange
from evermoe.copies.replay.followed_units import FollowedUnits
from evermoe.copies.replay.part import parts_of
from evermoe.copies.replay.repeater import Damage
from evermoe.copies.replay.replay_tasks import ReplayTasks
from evermoe.copies.replay.replayable import can_replay
from evermoe.copies.replay.source import rules_of
from evermoe.copies.replay.state_requests import StateRequests
from evermoe.events import Damaged, GradientsLogged
from evermoe.events.base_event import Listener
from evermoe.planning.schedule import DEFAULT_LINK
from evermoe.presets import ReplayedCopies
from evermoe.state.keeper import Assignment, Keeper
from evermoe.state.stored import KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of, version_of

logger = logging.getLogger(__name__)


@dataclass
class _ReplicaSet:
    """The replicas of one plan."""

    copies: ReplayExchange
    generation: int
    trainers: Mapping[str, Collection[str]]
    """Members that train each unit."""
    earlier: KeptCopies
    """Copies with which they begin."""
    base: int = 0
    """Version with which they began."""
    were_complete: bool = False
    """Whether all copies of the plan have been complete once."""

    def orphans(self, present: Collection[str]) -> set[str]:
        """Return the units kept on this member that no present member trains."""
        return {unit for unit in self.copies.units if not any(each in present for each in self.trainers[unit])}

    def stored(self, present: Collection[str]) -> Iterator[ReplayedUnit]:
        """Yield every copy that this member keeps for others; digests of what a present member trains are None."""
        for unit, step, value in self.copies.stored(self.orphans(present)):
            version = self.base if step == step_of(self.base) else version_of(self.generation, step)
            yield ReplayedUnit(unit, version, value, self.copies)


@dataclass(frozen=True)
class ReplayedUnit:
    """A version of one unit that a replica on this member has, or can be brought to."""

    unit: str
    version: int
    digest: int | None
    """None if its steps are still to be repeated."""
    copies: ReplayExchange

    def read(self, out: Tensor) -> int:
        """Write the bytes to `out`, uint8 `[nbytes]`; return their number, 0 if the replica has passed the version."""
        return len(self.copies.read(self.unit, step_of(self.version), out))

    def lend(self) -> Tensor | None:
        """Return the bytes in place, uint8 `[nbytes]`, until the unit's next step; None if they are not one piece."""
        if self.copies.device.type != "cpu" or len(parts_of(self.copies.state.catalog.by_name[self.unit])) > 1:
            return None
        return self.copies.read(self.unit, step_of(self.version), lends=True)

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`; empty if the replica has moved past the version."""
        return self.copies.read(self.unit, step_of(self.version))


class Replicas(Keeper):
    """The replicas that follow this member's units, and those that it keeps for others.

    Args:
        state: this member's units.
        membership: all members; replica nodes only keep copies.
        options: bound of the log, and device of the replicas.
        arithmetics: of the optimizers whose steps can be repeated.
        emit: listener of the session.
        pacer: knows when the network is idle. Gradients, and states with which a plan begins, do not wait for that.
    """

    def __init__(
        self,
        state: TrainingState,
        membership: MembershipManager,
        options: CopyConfig,
        arithmetics: Arithmetics,
        emit: Listener,
        pacer: Pacer,
    ) -> None:
        self._state, self._membership, self._options, self._emit = state, membership, options, emit
        check_device(options.preset.group(ReplayedCopies))
        self._pacer, device = pacer, membership.device
        self.courier = Courier(membership.transport, pacer, "evermoe-gradients", device=device, link=DEFAULT_LINK)
        self.arithmetics = arithmetics
        """Of the optimizers whose steps other members may repeat from their gradients."""
        self._now: _ReplicaSet | None = None
        self._older: _ReplicaSet | None = None
        self._tasks = ReplayTasks()
        self.is_early = False
        """True if no other rank contributes to these gradients, so they can be sent before reduction."""
        self._followed = FollowedUnits()
        self.requests = StateRequests()
        self.keeps_disputes = False
        """Whether copies that differ from their trainer's stay, unread, until members have found which is wrong."""

    # ---- the plan

    def replayable(self, units: Iterable[str]) -> set[str]:
        """Return the units among these whose steps can be repeated, as far as this member knows."""
        rules = rules_of(self._state.optimizer, self.arithmetics)
        return {unit for unit in units if can_replay(self._state, unit, rules)}

    def replan(self, assignment: Assignment) -> None:
        """Follow a new plan; `protect_all` and `release` must follow."""
        kept = [each for each in assignment.plan.units if each.kind == "replayed"]
        rank = self._membership.everyone.rank
        if self._now is not None:
            self._now.copies.gradients.close()
            if self._now.were_complete:
                _close(self._older, self._emit)
                self._older = self._now
            else:  # never complete: the copies of its predecessor are still the only complete ones
                _close(self._now, self._emit)
        self.requests.restart()
        experts = set(self._state.catalog.experts())
        alone = {each.unit for each in kept if each.unit in experts and len(assignment.active[each.unit]) == 1}
        self.is_early = all(each.unit in alone for each in kept if each.primary == rank)
        replayed = self._options.preset.group(ReplayedCopies)
        copies = ReplayExchange(
            self._state,
            kept,
            rank,
            self.arithmetics,
            log_bytes=replayed.replay_log_bytes,
            keeps_previous=assignment.copies_late,
            device=replayed.replica_device,
            message_bytes=self._options.windows.copy_buffer_bytes,
            alone=alone,
            bucket_bytes=assignment.gradient_bucket_bytes,
            keeps_disputes=self.keeps_disputes,
        )
        members = list(self._membership.members) or [self._membership.id]
        trainers = {each.unit: [members[rank] for rank in assignment.active[each.unit]] for each in kept}
        self._now = _ReplicaSet(copies, assignment.generation, trainers, assignment.copies)
        sent = {each.unit for each in kept if each.primary == rank and each.holders}
        self._followed = FollowedUnits(sent, sent - self.replayable(sent))

    def release(self, step: int) -> None:
        """Drop the copies of the previous plan: those of the latest one are complete on all members."""
        assert self._now is not None
        self._now.were_complete = True
        self._followed.complete(step)
        _close(self._older, self._emit)
        self._older = None

    # ---- a step

    def begin_step(self, step: int, selected: Collection[str] | None, *, may_send_early: bool) -> None:
        """Begin a step, in which nothing writes the state until its messages are through.

        `begin_exchange` sends the gradients of these units that have not left during backward, if they
        `may_send_early`. For units that replicas cannot follow, the states from before the step are sent now.
        """
        self._tasks.begin_step()
        if self._now is None or not self._now.copies.has_peers:
            return
        copies, has_states = self._now.copies, self.requests.are_answered or self._options.choices.selects_by_budget
        may_send = may_send_early and not self._state.late.is_under_way
        copies.gradients.begin_step(self.courier, step, selected, may_send=may_send)
        read = copies.next_digests()
        self._tasks.digests = None if read is None else self.courier.submit(read)
        self.requests.are_answered = False
        if has_states:
            self._tasks.early = self.courier.submit(lambda: copies.early.exchange_states(self.courier, step, selected))

    def on_backward(self, *, ends: bool) -> None:
        """Called as the script begins a backward pass, or with `ends` once its gradients exist, before reduction."""
        if self._now is not None:
            gradients = self._now.copies.gradients
            (gradients.end_backward if ends else gradients.begin_backward)()

    def protect_all(self, version: int) -> None:
        """Begin to send the states of `version` to replicas that do not have them."""
        assert self._now is not None
        self._now.base = version
        self.requests.lacks_first = False
        replicas, earlier, late = self._now.copies, self._now.earlier, self._state.late

        def begin() -> ExchangeResult:
            late.wait(late.missing)
            return replicas.begin_with(self.courier, step_of(version), earlier)

        if replicas.has_peers:
            self._tasks.states = self.courier.submit(begin)

    def begin_exchange(self, step: int, selected: Collection[str] | None) -> None:
        """Begin to send the gradients of the next step that were not sent early: of these units, None for all; once."""
        assert self._now is not None
        copies = self._now.copies
        if self._tasks.exchange is not None or not copies.has_peers:
            return
        self._pacer.hurry(everything=False)  # the rest of its states, which come first
        self._followed.begin_exchange(selected)

        def exchange() -> ExchangeResult:
            exchanged = copies.exchange_step(self.courier, step, selected)
            _report(self._emit, exchanged.damages)
            if exchanged.held:
                self._emit(GradientsLogged(step))
            return exchanged

        self._tasks.exchange = self.courier.submit(exchange)

    def wait_for_copies(self) -> bool:
        """Wait until all messages that were begun are through; return False if a member was `lost`."""
        group = self._membership.trainer_group
        if not self._tasks.wait_for_states(self.courier, group):
            return False
        is_done = self._tasks.wait_for_all(group, self._early_gradients)
        for exchanged, begins_plan in self._tasks.results():
            self.requests.add(exchanged, begins_plan=begins_plan)
        if is_done:
            self._tasks.states = None
        return is_done

    def before_vote(self, step: int) -> bool:
        """Wait until the gradients of the step are through."""
        return self.wait_for_copies()

    @property
    def lost(self) -> str | None:
        """Reason why the messages did not get through."""
        return next((task.lost for task in self._tasks.begun(self._early_gradients) if task.lost), None)

    @property
    def _early_gradients(self) -> list[Task[Any]]:
        """Tasks that send gradients during backward."""
        return [] if self._now is None else self._now.copies.gradients.tasks

    def after_update(self, version: int, clip: float | None) -> None:
        """Let replicas take the step, with gradients multiplied by `clip`; None: they skip its update, too."""
        assert self._now is not None
        self._now.copies.commit_step(clip)
        self._followed.after_update(step_of(version))

    def lag(self, step: int) -> dict[str, int]:
        """Return the lag of the oldest `replayed` copy."""
        return self._followed.lag(step)

    def heal_replicas(self, primary: Callable[[str], int]) -> None:
        """Gather the requests for full states, which their senders send with the next step; collective."""
        assert self._now is not None
        everyone = self._membership.everyone
        for unit in self.requests.gather(everyone):
            if primary(unit) == everyone.rank:
                self._now.copies.sender.request_full_state(unit)

    @property
    def dispute(self) -> tuple[int, Dispute] | None:
        """The first copy on this member that differs from its trainer's state, after the rank of the trainer."""
        found = None if self._now is None else self._now.copies.replica.dispute
        return None if found is None or self._now is None else (self._now.copies.primaries[found.unit], found)

    def end_disputes(self, wrong: Collection[int] = ()) -> None:
        """Wait for the trainers' full states in place of the copies that differ, but not for those of `wrong` ranks."""
        if self._now is not None:
            copies = self._now.copies
            copies.replica.end_disputes([unit for unit, rank in copies.primaries.items() if rank in wrong])

    # ---- after a failure

    def settle(self) -> bool:
        """Wait until nothing is in flight; return whether all of it got through."""
        self._pacer.hurry(everything=False)
        is_complete = all([task.wait() for task in self._tasks.begun(self._early_gradients)])
        self._tasks = ReplayTasks()
        if self._now is not None:
            self._now.copies.gradients.tasks.clear()
            self._now.copies.gradients.stop_sending()
        return is_complete

    def catch_up(self) -> Iterator[None]:
        """Bring units that no member named by the Lighthouse trains to where `stored` needs them, a part at a time.

        Runs in any thread, while no plan is made.
        """
        for replicas in filter(None, (self._now, self._older)):
            yield from replicas.copies.catch_up(replicas.orphans(self._membership.requests.named))

    def stored(self) -> Iterator[tuple[ReplayedUnit, str]]:
        """Yield every unit that this member keeps for others, in every version that it can be brought to.

        Units that a member of the group trains are not brought to it yet: nobody may need their copies.
        """
        for replicas in filter(None, (self._now, self._older)):
            for unit in replicas.stored(self._membership.members):
                yield unit, "replayed"
            _report(self._emit, replicas.copies.replica.take_damages())

    def close(self) -> None:
        """End all threads. Nothing may be in flight."""
        self.courier.close()
        _close(self._now, self._emit)
        _close(self._older, self._emit)
        self._now = self._older = None


def _report(emit: Listener, damages: Iterable[Damage]) -> None:
    for each in damages:
        logger.warning("a copy on this node is damaged and no longer used: %s", each.reason)
        emit(Damaged(each.unit, each.step, each.reason))


def _close(replicas: _ReplicaSet | None, emit: Listener) -> None:
    if replicas is not None:
        replicas.copies.close()
        _report(emit, replicas.copies.replica.take_damages())
