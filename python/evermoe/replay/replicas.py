"""What replicas get before each vote: the gradients of the next step.

    replan ─ protect_all ─ wait ─ release ─ [ begin_step ─ begin ─ before_vote ─ after_update ] at each step
                                                            heal, where a replica asked for states

As a step begins, replicas that cannot follow it get the state of before it: those of units that are chosen anew, and
those that have asked. It travels while the step computes, in windows of the network where these are known.

The replicas of the previous plan are kept until all of the latest one are complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evermoe.comm.courier import Courier
from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.comm.task import Task
from evermoe.config.copies import CopyConfig
from evermoe.ema import is_averaged
from evermoe.errors import NotReplayable
from evermoe.events import Damaged, GradientsLogged, Listener
from evermoe.keeper import Assignment, Keeper
from evermoe.planning.schedule import DEFAULT_LINK
from evermoe.presets import ReplayedCopies
from evermoe.replay.calibrate import Arithmetic, calibrate
from evermoe.replay.devices import check_device
from evermoe.replay.early_states import MESSAGE_BYTES
from evermoe.replay.exchange import ExchangeResult, ReplayExchange
from evermoe.replay.part import parts_of
from evermoe.replay.repeater import Damage
from evermoe.replay.replayable import can_replay
from evermoe.replay.step_code import foreign_code, foreign_step, refuse_foreign_code
from evermoe.state.stored import NO_COPIES
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of, version_of

logger = logging.getLogger(__name__)


@dataclass
class _ReplicaSet:
    """The replicas of one plan."""

    copies: ReplayExchange
    generation: int
    trainers: Mapping[str, Collection[str]]
    """Of each unit the members that train it."""
    base: int = 0
    """The version that they began with."""

    def orphans(self, present: Collection[str]) -> set[str]:
        """Units that are kept here, and that none of the members which are there trains."""
        return {unit for unit in self.copies.units if not any(each in present for each in self.trainers[unit])}

    def stored(self, present: Collection[str]) -> Iterator[ReplayedUnit]:
        """Everything that is kept here for others; the digests of what a member that is there trains are None."""
        for unit, step, value in self.copies.stored(self.orphans(present)):
            version = self.base if step == step_of(self.base) else version_of(self.generation, step)
            yield ReplayedUnit(unit, version, value, self.copies)


@dataclass(frozen=True)
class ReplayedUnit:
    """A version of one unit that a replica here has, or can be brought to."""

    unit: str
    version: int
    digest: int | None
    """None where its steps are still to be repeated."""
    copies: ReplayExchange

    def read(self, out: Tensor) -> int:
        """Writes the bytes to `out`, uint8 `[nbytes]`; how many: 0 if the replica has left the version behind."""
        return len(self.copies.read(self.unit, step_of(self.version), out))

    def lend(self) -> Tensor | None:
        """The bytes where they are, uint8 `[nbytes]`, until the unit's next step; None if they are not one piece."""
        if self.copies.device.type != "cpu" or len(parts_of(self.copies.state.catalog.by_name[self.unit])) > 1:
            return None
        return self.copies.read(self.unit, step_of(self.version), lends=True)

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`; empty if the replica has left the version behind."""
        return self.copies.read(self.unit, step_of(self.version))


def find_arithmetic(optimizer: torch.optim.Optimizer) -> Arithmetic | None:
    """How the optimizer's steps are repeated; None, with a warning, if they cannot be.

    Raises:
        UnsupportedState: they could be, but for code of the script's that runs in them.
    """
    try:
        if is_averaged(optimizer):
            raise NotReplayable("an average of the weights is kept, which gradients alone do not give")
        foreign = foreign_step(optimizer)
        if foreign is not None:
            raise NotReplayable(f"{foreign} may do in some step what no trial of it shows")
        arithmetic = calibrate(optimizer)
    except NotReplayable as error:
        logger.warning("copies get the state after each step, not gradients: %s", error)
        return None
    refuse_foreign_code(foreign_code(optimizer))
    return arithmetic


class Replicas(Keeper):
    """The replicas that follow this member's units, and those that it keeps for others.

    Args:
        state: this member's units.
        membership: who takes part; replica nodes keep copies alone.
        options: the log, and where replicas are.
        arithmetic: of the optimizer, if its steps can be repeated.
        emit: of the session.
        pacer: knows when the network is idle; gradients, and states that a plan begins with, do not wait for that.
        message_bytes: of states that do, at most.
    """

    def __init__(
        self,
        state: TrainingState,
        membership: MembershipManager,
        options: CopyConfig,
        arithmetic: Arithmetic | None,
        emit: Listener,
        pacer: Pacer,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        self._state, self._membership, self._options, self._emit = state, membership, options, emit
        self._replayed = check_device(options.preset.group(ReplayedCopies))
        self._pacer, self._message_bytes = pacer, message_bytes
        device = membership.device
        self.courier = Courier(membership.transport, pacer, "evermoe-gradients", device=device, link=DEFAULT_LINK)
        self._arithmetic = arithmetic
        self._now: _ReplicaSet | None = None
        self._copies = NO_COPIES
        """Copies of before, with which replicas of the latest plan begin."""
        self._older: _ReplicaSet | None = None
        self._is_whole = False
        """Whether all copies of the latest plan were complete once."""
        self._states: Task[ExchangeResult] | None = None
        """Sends the states with which the replicas of a plan begin; all else comes after it."""
        self._exchange: Task[ExchangeResult] | None = None
        self._digests: Task[None] | None = None
        """Reads the state of some units; all else of the step comes after it."""
        self._early: Task[None] | None = None
        """Sends the states of before this step; the exchange comes after it."""
        self._is_healing = False
        """Whether a member has asked for full states, which come with the next step; the same on all members."""
        self.is_early = False
        """True if no other rank contributes to these gradients, so they can be sent before reduction."""
        self._copied: dict[str, int] = {}
        """By unit that this member sends, after how many steps its replicas are."""
        self._under_way: set[str] = set()
        """Of these, the ones whose gradients are sent in the step that runs."""
        self._behind: set[str] = set()
        """Of these, the ones whose replicas get the state of before each step, as it cannot be repeated."""
        self.asked: set[str] = set()
        """Units of which this member needs the full state anew."""
        self.lacks_states = False
        """Whether a state with which a replica of the latest plan should begin did not come as it was sent."""
        self._has_told = False
        """Whether the first message that could not be used was reported."""

    # ---- who follows what

    @property
    def repeats_steps(self) -> bool:
        """Whether other members may repeat steps of this one from its gradients."""
        return self._arithmetic is not None

    def is_replayable(self, unit: str) -> bool:
        """Whether the unit's steps can be repeated, as far as this member knows."""
        return self._arithmetic is not None and can_replay(self._state, unit, self._arithmetic)

    def replan(self, assignment: Assignment) -> None:
        """Follows a new plan from now on; `protect_all` and `release` must follow."""
        kept = [each for each in assignment.plan.units if each.kind == "replayed"]
        rank = self._membership.everyone.rank
        if self._now is not None:
            self._now.copies.gradients.close()
            if self._is_whole:
                _close(self._older, self._emit)
                self._older = self._now
            else:  # it never was: what was before it still is what there is
                _close(self._now, self._emit)
        self._is_whole, self.asked, self._is_healing = False, set(), False
        experts = set(self._state.catalog.experts())
        alone = {each.unit for each in kept if each.unit in experts and len(assignment.active[each.unit]) == 1}
        self.is_early = all(each.unit in alone for each in kept if each.primary == rank)
        copies = ReplayExchange(
            self._state,
            kept,
            rank,
            self._arithmetic,
            log_bytes=self._replayed.replay_log_bytes,
            keeps_previous=assignment.copies_late,
            device=self._replayed.replica_device,
            message_bytes=self._message_bytes,
            alone=alone,
            bucket_bytes=assignment.gradient_bucket_bytes,
        )
        members = list(self._membership.members) or [self._membership.id]
        trainers = {each.unit: [members[rank] for rank in assignment.active[each.unit]] for each in kept}
        self._now, self._copies = _ReplicaSet(copies, assignment.generation, trainers), assignment.copies
        self._copied = {each.unit: 0 for each in kept if each.primary == rank and each.holders}
        self._behind = {unit for unit in self._copied if not self.is_replayable(unit)}

    def release(self, step: int) -> None:
        """Drops the copies of the previous plan: those of the latest one are complete on all members."""
        self._is_whole = True
        self._copied = dict.fromkeys(self._copied, step)
        _close(self._older, self._emit)
        self._older = None

    # ---- a step

    def begin_step(self, step: int, selected: Collection[str] | None) -> None:
        """A step begins, in which nothing writes the state until its messages are through.

        `begin` sends the gradients of these units in it; of those among them that replicas cannot follow, the states of
        before it go now.
        """
        self._exchange = self._early = None
        if self._now is None:
            return
        copies, has_states = self._now.copies, self._is_healing or self._options.choices.selects_by_budget
        if copies.has_peers:
            may_send = not self._state.late.is_under_way
            copies.gradients.begin_step(self.courier, step, selected, may_send=may_send)
        self._digests = self.courier.submit(copies.take_digests)
        self._is_healing = False
        if has_states and copies.has_peers:
            self._early = self.courier.submit(lambda: copies.early.exchange(self.courier, step, selected))

    def backward(self, *, ends: bool) -> None:
        """The script begins to backpropagate a loss; or `ends`: its gradients are there, and not reduced yet."""
        if self._now is not None:
            gradients = self._now.copies.gradients
            (gradients.end_backward if ends else gradients.begin_backward)()

    def protect_all(self, version: int) -> Collection[str]:
        """Begins to send the states, which are those of `version`, to replicas that do not have them."""
        assert self._now is not None
        self._now.base = version
        self.lacks_states = False
        replicas, copies, late = self._now.copies, self._copies, self._state.late

        def begin() -> ExchangeResult:
            late.wait(late.missing)
            return replicas.begin_with(self.courier, step_of(version), copies)

        if replicas.has_peers:
            self._states = self.courier.submit(begin)
        return ()

    def begin(self, step: int, selected: Collection[str] | None) -> None:
        """Begins to send the gradients of the next step that are not sent yet: of these units, None for all; once."""
        assert self._now is not None
        copies = self._now.copies
        if self._exchange is not None or not copies.has_peers:
            return
        self._pacer.hurry(everything=False)  # what is left of its states, which come first
        self._under_way = {unit for unit in self._copied if selected is None or unit in selected}

        def exchange() -> ExchangeResult:
            exchanged = copies.exchange(self.courier, step, selected)
            _tell(self._emit, exchanged.damages)
            if exchanged.held:
                self._emit(GradientsLogged(step))
            return exchanged

        self._exchange = self.courier.submit(exchange)

    def wait(self) -> bool:
        """Waits until all messages that were begun are through; False if a member was `lost`."""
        is_done, group = False, self._membership.trainer_group
        tasks = self._tasks()
        states: list[Task[Any] | None] = [self._states, self._early]
        for task in states:
            if task is not None and not self.courier.wait_for_task(task, group):
                return False
        group.on_wait(True)
        try:
            is_done = all(each is None or each.wait() for each in tasks)
        finally:
            group.on_wait(False, is_done)
        for began in (self._states, self._exchange):
            if began is not None and began.result is not None:
                self.asked |= began.result.needs_full_state
                if self.asked and not self._has_told:
                    self._has_told = True
                    logger.warning(
                        "the copies here of %s wait for its full state, which comes next: %s",
                        min(self.asked),
                        began.result.problem,
                    )
                self.lacks_states |= began is self._states and bool(began.result.needs_full_state)
        if is_done:
            self._states = None
        return is_done

    def before_vote(self, step: int) -> bool:
        """Waits until the gradients of the step are through."""
        return self.wait()

    @property
    def lost(self) -> str | None:
        """Why the messages did not get through."""
        return next((task.lost for task in self._tasks() if task is not None and task.lost), None)

    def _tasks(self) -> list[Task[Any] | None]:
        """Those of the step, and what came before."""
        gradients = [] if self._now is None else self._now.copies.gradients.tasks
        return [self._states, self._digests, self._early, *gradients, self._exchange]

    def after_update(self, version: int, clip: float | None) -> None:
        """Replicas may take the step, with gradients multiplied by `clip`; None: they leave it out, too."""
        assert self._now is not None
        self._now.copies.committed(clip)
        self._copied |= {unit: step_of(version) - (unit in self._behind) for unit in self._under_way}

    def lag(self, step: int) -> dict[str, int]:
        """Of `replayed` copies, the oldest."""
        return {"replayed": step - min(self._copied.values())} if self._copied else {}

    def take_requests(self) -> set[str]:
        """Units of which this member needs the full state anew; they count as requested from now on."""
        requests, self.asked = self.asked, set()
        return requests

    def heal(self, primary: Callable[[str], int]) -> None:
        """Some members have asked for full states, which come with the next step from those that send; collective."""
        assert self._now is not None
        everyone = self._membership.everyone
        found = gather_json(everyone, sorted(self.take_requests()))
        self._is_healing = any(found)
        for unit in {unit for units in found for unit in units}:
            if primary(unit) == everyone.rank:
                self._now.copies.sender.request_full_state(unit)

    # ---- after a failure

    def settle(self) -> bool:
        """Waits until nothing is under way; whether all that was is through."""
        self._pacer.hurry(everything=False)
        is_whole = all([task is None or task.wait() for task in self._tasks()])
        self._states = self._digests = self._early = self._exchange = None
        if self._now is not None:
            self._now.copies.gradients.tasks.clear()
            self._now.copies.gradients.forget()
        return is_whole

    def catch_up(self) -> Iterator[None]:
        """Brings what no member that the Lighthouse names trains to where `stored` needs it, bit by bit.

        In any thread, while no plan is made.
        """
        for replicas in filter(None, (self._now, self._older)):
            yield from replicas.copies.catch_up(replicas.orphans(self._membership.named))

    def stored(self) -> Iterator[tuple[ReplayedUnit, str]]:
        """Every unit that is kept here for others, in every version that it can be brought to.

        Units that a member of the group trains are not brought there: nobody may need their copies.
        """
        for replicas in filter(None, (self._now, self._older)):
            for unit in replicas.stored(self._membership.members):
                yield unit, "replayed"
            _tell(self._emit, replicas.copies.replica.take_damages())

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""
        self.courier.close()
        _close(self._now, self._emit)
        _close(self._older, self._emit)
        self._now = self._older = None


def _tell(emit: Listener, damages: Iterable[Damage]) -> None:
    for each in damages:
        logger.warning("a copy here is damaged, and is not used any more: %s", each.reason)
        emit(Damaged(each.unit, each.step, each.reason))


def _close(replicas: _ReplicaSet | None, emit: Listener) -> None:
    if replicas is not None:
        replicas.copies.close()
        _tell(emit, replicas.copies.replica.take_damages())
