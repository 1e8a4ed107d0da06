"""Names members that are slower than the others, which wait for them in each step.

Each vote carries the seconds of each member's own work (`comm/own_time.py`), so that all members compare the same
numbers and come to the same result, without a message of their own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evermoe.comm.membership import MembershipManager
from evermoe.comm.own_time import PARTS
from evermoe.config.membership import OnSlow
from evermoe.events import SlowMember
from evermoe.events.base_event import Listener
from evermoe.planning.stragglers import (
    HISTORY,
    MIN_FACTOR,
    MIN_SECONDS,
    STEPS,
    Straggler,
    find_stragglers,
    is_still_slow,
)
from evermoe.session.proportions import Proportions
from evermoe.state.training_state import TrainingState

logger = logging.getLogger(__name__)

MIN_MEMBERS = 3
"""Members from which on a slow one may have to leave."""
CHECKS = 2
"""Steps between two searches for slow members."""


class Measure(NamedTuple):
    """Parts of the members' own time that are compared."""

    parts: int
    """The number of these first parts of `PARTS`."""
    min_factor: float
    """Factor by which a slow member takes longer than the others, at least."""

    def of(self, seconds_SRP: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds `[S, R]` in these parts."""
        return seconds_SRP[:, :, : self.parts].sum(2)


MEASURES = (Measure(len(PARTS) - 1, MIN_FACTOR), Measure(len(PARTS), 1.5))
"""Waits for a processor vary by far more than all else, so that with them a member must be slower to be named."""


class SlowMembers:
    """Compares the members' own times, and names those that are slow: in the log, and as the event `SlowMember`.

    Args:
        membership: the members.
        state: knows the load of the experts.
        emit: of the session.
        policy: action where a member is slow.
        sampler: of the script, whose `proportions` are set with the policy `shift`.
        trains: whether this member trains, and knows that load.

    Raises:
        ValueError: the sampler cannot divide a batch into parts of other sizes.
    """

    def __init__(
        self,
        membership: MembershipManager,
        state: TrainingState,
        emit: Listener,
        policy: OnSlow,
        sampler: object,
        *,
        trains: bool,
    ) -> None:
        self._policy, self._parts = policy, Proportions(sampler) if policy == "shift" else None
        self.must_leave = False
        """Whether this member is to leave its job, as it is slow."""
        self._membership, self._state, self._emit, self._trains = membership, state, emit, trains
        self._own_time = membership.failure_detector.activity.own_time
        self._rows: deque[Sequence[Sequence[float]]] = deque(maxlen=HISTORY)
        """Seconds of the latest steps, `[R, P]` by rank and part of `PARTS`."""
        self._has_excess: deque[bool] = deque(maxlen=STEPS)
        """Whether some member was slow in each of the latest steps, by itself: most searches end here."""
        self.slow: dict[str, tuple[Measure, str]] = {}
        """Members that are slow, by id: the measure by which they are, and the part with most of the difference."""

    def restart(self) -> None:
        """Judge only the steps that follow: a recovery has ended."""
        self._own_time.restart()
        self._judge_anew()
        self.end()
        if self._parts is not None:  # newcomers do not know who was slow, and all must divide a batch the same way
            self.slow = {}
        self.slow = {member: found for member, found in self.slow.items() if member in self._membership.members}

    def end(self) -> None:
        """Leave the script's sampler as it was."""
        if self._parts is not None:
            self._parts.reset()

    def _judge_anew(self) -> None:
        self._rows.clear()
        self._has_excess.clear()

    @property
    def own_part(self) -> str:
        """The part by which this member is slow; empty if it is not."""
        return self.slow.get(self._membership.id, (None, ""))[1]

    def numbers(self) -> list[float]:
        """Return the seconds of the step by rank and part of `PARTS`: this member's own, and zeros for all others."""
        everyone = self._membership.everyone
        found = [0.0] * (everyone.size * len(PARTS))
        if self._trains:
            found[everyone.rank * len(PARTS) : (everyone.rank + 1) * len(PARTS)] = self._own_time.seconds()
        return found

    @property
    def latest_seconds(self) -> float:
        """All of this member's own seconds, as of the latest vote."""
        return sum(self._own_time.latest)

    def take_step(self, step: int, attached: Sequence[float]) -> Sequence[float]:
        """Add a step whose sums are the last numbers that the vote had `attached`; return the numbers before them."""
        own = len(attached) - self._membership.everyone.size * len(PARTS)
        self.add_step(step, attached[own:])
        return attached[:own]

    def add_step(self, step: int, sums: Sequence[float]) -> None:
        """Add the seconds of a step, the sums of all members' `numbers`, and begin to measure the next one."""
        self._own_time.restart()
        width = len(PARTS)
        parts_RP = [sums[rank * width : (rank + 1) * width] for rank in range(self._membership.num_trainers)]
        if len(parts_RP) < 2:
            return
        self._rows.append(parts_RP)
        self._has_excess.append(any(_has_excess(parts_RP, measure) for measure in MEASURES))
        if len(self._rows) < STEPS or step % CHECKS:
            return
        may_be_slow = 2 * sum(self._has_excess) >= STEPS
        if may_be_slow or self.slow or (self._parts is not None and self._parts.of_even):
            seconds_SRP = np.asarray(self._rows, np.float64)
            self._look(step, seconds_SRP, may_be_slow=may_be_slow)
            self._shift(step, seconds_SRP[-STEPS:].sum(2))

    def _look(self, step: int, seconds_SRP: NDArray[np.float64], *, may_be_slow: bool) -> None:
        ids = list(self._membership.members)
        for member, (measure, _) in list(self.slow.items()):
            rank = ids.index(member)
            if not is_still_slow(measure.of(seconds_SRP), rank, measure.min_factor):
                del self.slow[member]
                if self._is_to_log(rank):
                    logger.warning("%s is as fast as the others again", member)
        work_R = self._work_R() if may_be_slow else None
        for measure in MEASURES if may_be_slow else ():
            for found in find_stragglers(measure.of(seconds_SRP), work_R, measure.min_factor):
                if ids[found.rank] not in self.slow:
                    part = _main_part(seconds_SRP[-STEPS:], found.rank)
                    self.slow[ids[found.rank]] = measure, part
                    self._name(step, ids[found.rank], part, found)

    def _shift(self, step: int, seconds_SR: NDArray[np.float64]) -> None:
        """Change the members' parts of each batch, if that is the policy, so that they take as long as each other."""
        ids = list(self._membership.members)
        if self._parts is None:
            return
        are_slow = [ids[rank] in self.slow for rank in range(seconds_SR.shape[1])]
        for rank in self._parts.adapt(seconds_SR, are_slow):
            self._judge_anew()
            part = self._parts.of_even[rank] if self._parts.of_even else 1.0
            if self._is_to_log(rank):
                logger.warning(
                    "%s gets %.0f %% of an even part of each batch from now on (on_slow)", ids[rank], 100 * part
                )

    def _name(self, step: int, member: str, part: str, found: Straggler) -> None:
        node, members = self._membership.nodes[found.rank], self._membership.num_trainers
        leaves = self._policy == "evict" and members >= MIN_MEMBERS and found.factor > members / (members - 1)
        self.must_leave = self.must_leave or (leaves and member == self._membership.id)
        self._emit(SlowMember(step, member, node, found.rank, part, found.seconds, found.usual, found.factor))
        if self._is_to_log(found.rank):
            logger.warning(
                "%s on %s (rank %d) is slow: its own work takes %.3g s a step and that of the others %.3g s, so that "
                "they wait for it (%.2f times, median of %d steps). Most of the difference is in: %s%s",
                member,
                node,
                found.rank,
                found.seconds,
                found.usual,
                found.factor,
                STEPS,
                part,
                ". It leaves the job (on_slow)" if leaves else "",
            )

    def _is_to_log(self, rank: int) -> bool:
        """Whether this member logs what concerns `rank`: that member does, and the first of the others."""
        own = self._membership.everyone.rank
        return own in (rank, 1 if rank == 0 else 0)

    def _work_R(self) -> NDArray[np.float64] | None:
        """Return the rows of tokens that each rank's experts have computed in the latest step; None if unknown."""
        if not self._trains:
            return None
        work_R = np.zeros(self._membership.num_trainers)
        for load_E, layer in zip(self._state.expert_load.counts(), self._state.layers.values(), strict=True):
            matrix_RE = np.asarray(layer.matrix_RE, np.float64)
            work_R += matrix_RE @ (load_E[: layer.num_experts] / np.maximum(matrix_RE.sum(0), 1))
        return work_R if work_R.min(initial=1) > 0 and self._state.layers else None


def _has_excess(parts_RP: Sequence[Sequence[float]], measure: Measure) -> bool:
    totals = sorted(sum(parts[: measure.parts]) for parts in parts_RP)
    usual = totals[(len(totals) - 1) // 2]
    return totals[-1] >= max(measure.min_factor * usual, usual + MIN_SECONDS)


def _main_part(seconds_SRP: NDArray[np.float64], rank: int) -> str:
    """Return the part in which a member differs most from the others."""
    others_SRP = np.delete(seconds_SRP, rank, axis=1)
    excess_P = np.median(seconds_SRP[:, rank] - np.median(others_SRP, axis=1), axis=0)
    return PARTS[int(excess_P.argmax())]
