"""Requests for full states, in place of copies on this member that cannot follow their trainers."""

from __future__ import annotations

import logging

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.copies.replay.exchange import ExchangeResult

logger = logging.getLogger(__name__)


class StateRequests:
    """Collects a member's requests; the trainers of the units send the states with the next step."""

    def __init__(self) -> None:
        self.units: set[str] = set()
        """Units of which this member needs the full state again."""
        self.lacks_first = False
        """Whether a state with which a replica of the latest plan should begin did not arrive intact."""
        self.are_answered = False
        """Whether a member has requested full states, which come with the next step; the same on all members."""
        self._has_warned = False
        """Whether the first message that could not be used was reported."""

    def restart(self) -> None:
        """Discard the requests, since all replicas begin again."""
        self.units, self.are_answered = set(), False

    def add(self, exchanged: ExchangeResult, *, begins_plan: bool) -> None:
        """Request what an exchange did not bring.

        Args:
            exchanged: its result.
            begins_plan: whether it was that of the states with which the replicas of a plan begin.
        """
        self.units |= exchanged.needs_full_state
        if self.units and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "this node's copy of %s waits for its full state, which comes with the next step: %s",
                min(self.units),
                exchanged.problem,
            )
        self.lacks_first |= begins_plan and bool(exchanged.needs_full_state)

    def take(self) -> set[str]:
        """Return the units of which this member needs the full state; they count as requested from now on."""
        taken, self.units = self.units, set()
        return taken

    def gather(self, everyone: Group) -> set[str]:
        """Return the units that members request of each other; collective."""
        found = gather_json(everyone, sorted(self.take()))
        self.are_answered = any(found)
        return {unit for units in found for unit in units}
