"""Duration and balance of a session's steps, and the lag of its copies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evermoe.comm.membership import MembershipManager
from evermoe.config.membership import OnSlow
from evermoe.copies.protection import Protection
from evermoe.events import Measured
from evermoe.events.base_event import Listener
from evermoe.moe.experts import Experts
from evermoe.planning.dispatch import imbalance
from evermoe.session.saving import Saving
from evermoe.session.slow_links import SlowLinks
from evermoe.session.slow_members import SlowMembers
from evermoe.state.training_state import TrainingState

IMBALANCE_EVERY = 10
"""Steps between two measurements of the imbalance, which take milliseconds with hundreds of members and experts."""


class StepMeasures:
    """Measures each step, and emits it as `events.Measured`.

    Args:
        state: this member's units, and the load of the experts.
        membership: the members.
        protection: keeps the copies.
        saving: writes the checkpoints and saves.
        emit: of the session.
        on_slow: action where a member is slow.
        sampler: of the script.
        counts: whether this member knows the tokens of experts; False on a replica node.
    """

    def __init__(
        self,
        state: TrainingState,
        membership: MembershipManager,
        protection: Protection,
        saving: Saving,
        emit: Listener,
        on_slow: OnSlow,
        sampler: object,
        *,
        counts: bool,
    ) -> None:
        self._counts = counts
        self._state, self._protection, self._saving, self._emit = state, protection, saving, emit
        self.slow_members = SlowMembers(membership, state, emit, on_slow, sampler, trains=counts)
        """Compares this member's own time with that of the others."""
        self._slow_links = SlowLinks(membership, emit)
        self._since = time.monotonic()
        self._imbalances: tuple[float, float] | None = None

    def restart(self) -> None:
        """Begin the next step after a recovery, in which experts may have moved."""
        self._since, self._imbalances = time.monotonic(), None
        self.slow_members.restart()
        self._slow_links.restart()

    def numbers(self) -> list[float]:
        """Return what this member compares with others in the vote: times of its own work, and of messages to it."""
        return [*self._slow_links.numbers(), *self.slow_members.numbers()]

    def take_step(self, step: int, attached: Sequence[float]) -> Sequence[float]:
        """Add a step whose sums of `numbers` the vote had `attached` last; return the numbers before them."""
        return self._slow_links.take_step(step, self.slow_members.take_step(step, attached))

    def emit(self, step: int, data_seconds: float) -> float:
        """Emit the measures of a step that was taken, `data_seconds` of which this member waited for its batch.

        Returns:
            the seconds of the step.
        """
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if self._imbalances is None or step % IMBALANCE_EVERY == 0:
            self._imbalances = imbalances(self._state.expert_load.latest_LE, self._state.layers.values())
        imbalance, of_experts = self._imbalances or (None, None)
        protection, lag = self._protection, self._saving.lag(step + 1)
        for keeper in protection.keepers:
            lag |= keeper.lag(step + 1)
        couriers = {"replayed": protection.replicas.courier, "snapshot": protection.snapshots.courier}
        sent = {kind: courier.sent_bytes for kind, courier in couriers.items()}
        gpu_bytes = protection.snapshots.rounds.sources.nbytes
        risk = (
            protection.selection.selector.risk()
            if self._counts and protection.options.choices.may_lose_tokens
            else None
        )
        at_risk, waiting = risk or (None, None)
        tokens = self._count_tokens()
        slow = self.slow_members.own_part or self._slow_links.own_part
        own = data_seconds, self.slow_members.latest_seconds, slow
        self._emit(Measured(step, seconds, tokens, imbalance, of_experts, lag, sent, gpu_bytes, at_risk, waiting, *own))
        return seconds

    def _count_tokens(self) -> int:
        """Return the tokens of the global batch: the choices in a layer, divided by the choices of each token."""
        for load_E, layer in zip(self._state.expert_load.latest_LE, self._state.layers.values(), strict=True):
            if layer.top_k:
                return round(load_E.sum() / layer.top_k)
        return 0


def imbalances(load_LE: NDArray[np.int64], layers: Iterable[Experts]) -> tuple[float, float] | None:
    """Return the tokens of the busiest member, and of the busiest expert, divided by the mean; each in its worst layer.

    Example: expert 0 got 3 tokens and expert 1 one. If each is on its own member, the result is (1.5, 1.5). If both
    members have both experts, it is (1.0, 1.5).

    Args:
        load_LE: `[L, E]` tokens of each expert; columns beyond a layer's number of experts are ignored.
        layers: L layers.

    Returns:
        None if no layer got a token.
    """
    found = []
    for row_E, layer in zip(load_LE, layers, strict=True):
        load_E = row_E[: layer.num_experts]
        if load_E.any():
            of_members = imbalance(layer.matrix_RE, load_E, layer.token_split)
            found.append((of_members, float(load_E.max() / load_E.mean())))
    return (max(each for each, _ in found), max(each for _, each in found)) if found else None
