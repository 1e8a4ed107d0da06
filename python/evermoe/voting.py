"""The vote before each update, in one collective; and how a member that lost a peer in it learns what came of it.

step n → n + 1     [ whole? loss, squares, … ] ─ all reduce ─ all voted: the step is taken ─ update
                                                    └ a peer was lost: does anybody else know the sums?
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

from evermoe.elastic import Membership
from evermoe.errors import PeerLost


class Ballot(NamedTuple):
    """What a member says about a step; or the sums of that over all members."""

    votes: float
    """1 from a member that can take the step and knows that it is safe."""
    loss: float
    squares: float
    """Of the gradients, for their norm."""
    asked: float
    """Units of which a replica needs the state anew."""
    capture_seconds: float
    step_seconds: float


class _Passed(NamedTuple):
    """A vote that has passed."""

    before: int
    """Version of the state when it was taken."""
    after: int
    sums: Ballot


class Voting:
    """The votes of all members, replica nodes included."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._pending: int | None = None
        """The version of a state whose next gradients are whole here, while the vote on them is not known."""
        self._last: _Passed | None = None

    def begin(self) -> None:
        """A step begins: nobody may complete it for the time being."""
        self._pending = None

    def poll(self, version: int, mine: Ballot) -> Ballot:
        """The sums over all members, who all vote for the step that follows on `version`. Collective.

        Raises:
            PeerLost: a member does not, or is gone.
        """
        everyone = self._membership.everyone
        self._pending = version if mine.votes else None
        sums = Ballot(*everyone.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist())
        if sums.votes != everyone.size:
            self._pending = None
            raise PeerLost(f"{sums.votes:.0f} of {everyone.size} members voted for the step")
        return sums

    def passed(self, before: int, after: int, sums: Ballot) -> None:
        """This member takes the step from one version to the next."""
        self._pending, self._last = None, _Passed(before, after, sums)

    def complete(self, version: int) -> tuple[int, Ballot] | None:
        """After a loss: the step from `version` that others have seen pass, if this member could take it. Collective.

        Returns:
            The version after the step, and the sums of its vote.
        """
        mine = json.dumps({"last": self._last})
        everyone = [json.loads(text)["last"] for text in self._membership.everyone.all_gather_bytes(mine.encode())]
        pending, self._pending = self._pending, None
        for before, after, sums in filter(None, everyone):
            if pending == before == version:
                return after, Ballot(*sums)
        return None

    def forget(self) -> None:
        """All go on from the same version: how they got there does not matter any more."""
        self._last = None
