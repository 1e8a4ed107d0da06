"""The vote before each update: one collective that adds up the ballots of all members, replica nodes included."""

from __future__ import annotations

from typing import NamedTuple

import torch

from evermoe.comm.group import Group


class Ballot(NamedTuple):
    """What a member says about a step; or the sums of that over all members."""

    votes: float
    """1 from a member that can take the step and knows that it is safe."""
    loss: float = 0.0
    squares: float = 0.0
    """Sum of the gradients' squares, for their norm."""
    asked: float = 0.0
    """Units of which a replica needs the state anew."""
    capture_seconds: float = 0.0
    step_seconds: float = 0.0

    def to_bits(self) -> list[int]:
        """The bits of the float64 values, so that members who learn the sums later compute with the very same."""
        return torch.tensor(self, dtype=torch.float64).view(torch.int64).tolist()

    @classmethod
    def from_bits(cls, bits: list[int]) -> Ballot:
        """The inverse of `to_bits`."""
        return cls(*torch.tensor(bits, dtype=torch.int64).view(torch.float64).tolist())


def cast(everyone: Group, mine: Ballot) -> Ballot:
    """The sums of all members' ballots. Collective.

    Raises:
        PeerLost: a member is gone.
    """
    return Ballot(*everyone.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist())
