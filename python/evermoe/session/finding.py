"""A difference that a vote has found, and the reaction of the members."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from evermoe.comm.membership import MembershipManager
from evermoe.config.membership import OnCorruption
from evermoe.errors import CorruptState, PeerLost
from evermoe.events import CorruptionFound
from evermoe.events.base_event import Listener

logger = logging.getLogger(__name__)

MAX_TIMES = 3
"""Refused steps after which a member that each of them names must leave."""

ACTIONS = {
    "repair": "the update is refused; all members compare their state, take that of the majority and repeat the step",
    "evict": "the update is refused, and the member that differs leaves the job",
    "stop": "the update is refused, and the job stops",
}


class Finding(NamedTuple):
    """A difference between members; the same on all of them."""

    names: Sequence[str]
    """Names of what differs, such as `the state of head`."""
    units: list[str]
    ranks: list[int]
    """Members that a majority names; empty if there is none."""
    can_repair: bool = True
    """Whether a recovery brings the state of the majority."""


class Refusals:
    """Refuses steps with a finding.

    Args:
        membership: the members.
        policy: reaction.
        emit: listener of the session.
    """

    def __init__(self, membership: MembershipManager, policy: OnCorruption, emit: Listener) -> None:
        self._membership, self._policy, self._emit = membership, policy, emit
        self._last: tuple[int, list[int]] | None = None
        """The latest step that was refused, and the members that were named."""
        self._times: Counter[str] = Counter()
        """Number of refused steps in which each member was named, by id."""

    def refuse(self, step: int, finding: Finding) -> NoReturn:
        """Refuse a step.

        Raises:
            PeerLost: all recover and repeat the step, without this member if it is evicted.
            CorruptState: this member leaves, or the job stops.
        """
        nodes, ids, ranks = self._membership.nodes, [*self._membership.members], finding.ranks
        is_repeated, self._last = self._last == (step, ranks), (step, ranks)
        self._times.update(ids[rank] for rank in ranks)
        is_usual = any(self._times[ids[rank]] >= MAX_TIMES for rank in ranks)
        action = "repair"
        if self._policy == "stop" or (is_repeated and not ranks):
            action = "stop"
        elif ranks and (self._policy == "evict" or is_repeated or is_usual or not finding.can_repair):
            action = "evict"
        self._emit(CorruptionFound(step, finding.units, ranks, [nodes[rank] for rank in ranks], action))
        some = ", ".join(finding.names[:4]) + (f" and {len(finding.names) - 4} more" if len(finding.names) > 4 else "")
        named = [f"{nodes[rank]} (rank {rank})" for rank in ranks]
        who = " and ".join(named) + " against the others" if named else "no majority names one of them"
        message = f"members differ at step {step} in {some}: {who}"
        rank = self._membership.everyone.rank
        if rank in (0, *ranks):
            logger.warning("%s: %s", message, ACTIONS[action])
        if action == "stop" or (action == "evict" and rank in ranks):
            raise CorruptState(message, step, finding.units, ranks)
        raise PeerLost(message)
