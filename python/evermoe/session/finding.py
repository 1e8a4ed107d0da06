"""A difference that a vote has found, and the reaction of the members."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from evermoe.comm.membership import MembershipManager
from evermoe.comm.quarantine import Quarantine
from evermoe.config.membership import OnCorruption
from evermoe.errors import CorruptState, PeerLost
from evermoe.events import CorruptionFound
from evermoe.events.base_event import Listener

logger = logging.getLogger(__name__)

MAX_TIMES = 3
"""Refused steps after which a member that each of them names must leave."""

DOUBTS = (
    "calls of other members are not repeated any more: they have named several members, or none of them several times. "
    "Either what is called depends on the member, or several are faulty"
)
ACTIONS = {
    "repair": "the update is refused; all members compare their state, take that of the majority and repeat the step",
    "evict": "the update is refused, and the member that differs leaves the job",
    "stop": "the update is refused, and the job stops",
}

TAKES_STATE = "the copy takes the state of the member that trains it"
Kind = Literal["state", "call", "copy"]


class Finding(NamedTuple):
    """A difference between members; the same on all of them."""

    names: Sequence[str]
    """Names of what differs, such as `the state of head`."""
    units: list[str]
    ranks: list[int]
    """Members that a majority names; empty if there is none."""
    kind: Kind = "state"
    """The subject: `state` that members hold, results of a repeated `call`, or a `copy` that repeats steps."""
    can_repair: bool = True
    """Whether a recovery brings the state of the majority."""


class Refusals:
    """Refuses steps with a finding.

    Args:
        membership: the members.
        policy: reaction.
        emit: listener of the session.
        advice: returns a sentence about what to resume from, for the error that stops the job.
    """

    def __init__(
        self, membership: MembershipManager, policy: OnCorruption, emit: Listener, advice: Callable[[], str]
    ) -> None:
        self._membership, self._policy, self._emit, self._advice = membership, policy, emit, advice
        self._last: tuple[int, list[str]] | None = None
        """The latest step that was refused as members hold other bits, and the ids of those that were named."""
        self._times: dict[Kind, Counter[str]] = {"state": Counter(), "call": Counter()}
        """Number of refused steps in which each member was named, by id, and none (""), by what differed."""

    @property
    def doubts_calls(self) -> bool:
        """Whether repeated calls have named several members, or often none: what is called may depend on the member."""
        return len(self._times["call"]) > 1 or self._times["call"][""] >= MAX_TIMES

    def refuse(self, step: int, finding: Finding) -> None:
        """Refuse a step; return if a copy differs that can take its trainer's state, which needs no recovery.

        Raises:
            PeerLost: all recover and repeat the step, without this member if it is evicted.
            CorruptState: this member leaves, or the job stops.
        """
        nodes, ranks = self._membership.nodes, finding.ranks
        action = self._action(step, finding)
        is_mended = finding.kind == "copy" and action == "repair"
        self._emit(CorruptionFound(step, finding.units, ranks, [nodes[rank] for rank in ranks], action))
        some = ", ".join(finding.names[:4]) + (f" and {len(finding.names) - 4} more" if len(finding.names) > 4 else "")
        named = [f"{nodes[rank]} (rank {rank})" for rank in ranks]
        who = " and ".join(named) + " against the others" if named else "no majority names one of them"
        message = f"members differ at step {step} in {some}: {who}"
        rank = self._membership.everyone.rank
        if rank in (0, *ranks):
            logger.warning("%s: %s", message, TAKES_STATE if is_mended else ACTIONS[action])
        if finding.kind == "call" and self.doubts_calls and rank == 0:
            logger.warning(DOUBTS)
        if is_mended:
            return
        if action == "evict":
            self._quarantine(ranks, message)
        if action == "stop" or (action == "evict" and rank in ranks):
            advice = self._advice() if action == "stop" else ""
            raise CorruptState(f"{message}{advice}", step, finding.units, ranks)
        raise PeerLost(message)

    def _quarantine(self, ranks: Sequence[int], why: str) -> None:
        """Admit no newcomers on the hardware of members that leave."""
        members = [*self._membership.members.items()]
        staying = {said["node"] for rank, (_, said) in enumerate(members) if rank not in ranks}
        for rank in ranks:
            member, said = members[rank]
            if said["hardware"] == said["node"] and said["node"] in staying:
                continue  # without a GPU a node has one name for all, and others on it are right
            self._membership.messages.quarantines.add(Quarantine(member, said["node"], said["hardware"], why))

    def _action(self, step: int, finding: Finding) -> str:
        """Return the reaction to a finding."""
        ids = [[*self._membership.members][rank] for rank in finding.ranks]
        if self._policy == "stop":
            return "stop"
        if finding.kind == "copy":
            return "evict" if ids and self._policy == "evict" else "repair"
        times = self._times[finding.kind]
        times.update(ids or [""])
        is_usual = any(times[each] >= MAX_TIMES for each in ids)
        if finding.kind == "call":
            is_usual &= not self.doubts_calls
            return "evict" if ids and (self._policy == "evict" or is_usual) else "repair"
        is_repeated, self._last = self._last == (step, ids), (step, ids)
        if not ids:
            return "stop" if is_repeated else "repair"
        is_hopeless = is_repeated or is_usual or not finding.can_repair
        return "evict" if self._policy == "evict" or is_hopeless else "repair"
