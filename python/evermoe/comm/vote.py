"""The vote before each update: one collective that adds up the ballots of all members, replica nodes included."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from evermoe.comm.group import Group


class Ballot(NamedTuple):
    """What a member says about a step; or the sums of that over all members."""

    votes: float
    """1 from a member that can take the step and knows that it is safe."""
    loss: float = 0.0
    squares: float = 0.0
    """Sum of the gradients' squares, for their norm: as the optimizer gets them but for the factor of the vote."""
    reduced_squares: float = 0.0
    """The same before `on_gradients` has changed them: of the plain sums over the members."""
    nonfinite: float = 0.0
    """1 from a member whose loss, or gradient before it is reduced, is infinite or not a number."""
    nonfinite_ranks: float = 0.0
    """The rank of such a member."""
    nonfinite_losses: float = 0.0
    """1 from a member whose loss is infinite or not a number. A loss over the tokens of all members spreads that to the
    gradients of others."""
    nonfinite_loss_ranks: float = 0.0
    """The rank of such a member."""
    state_requests: float = 0.0
    """Units whose state a replica requests again."""
    capture_seconds: float = 0.0
    step_seconds: float = 0.0
    leaving: float = 0.0
    """1 from a member that leaves the job after the step."""
    stopping: float = 0.0
    """1 from a member that asks all to end the job after the step."""
    role_switches: float = 0.0
    """1 from a leaving member that returns in its other role."""
    newcomer_seen: float = 0.0
    """1 from a member that has seen a newcomer: all members ask the Lighthouse before the next step."""
    trainers: float = 0.0
    """1 from a member that trains."""
    scale: float = 0.0
    """What a member that trains has multiplied its loss by, beside its weight."""
    counting: float = 0.0
    """1 from a member whose loss is a sum."""
    counted: float = 0.0
    """Over how many: tokens, for example."""
    divided: float = 0.0
    """1 from a member that trains and has divided the sums of the gradients already, for `on_gradients`."""
    steps_own: float = 0.0
    """1 from a member whose script has code of its own in a step of the optimizer, or changes gradients before it."""
    checkpoint_done: float = 0.0
    """1 from a member that knows the outcome of the checkpoint in progress."""
    reported: float = 0.0
    """Bit i, a whole number, from the member that has called `on_lost` for the i-th loss that all members know of."""

    @property
    def mean_loss(self) -> float:
        """The global batch's mean loss; NaN of sums over nothing."""
        if not self.counting:
            return self.loss
        return self.loss / self.counted if self.counted else math.nan

    @property
    def loss_scale(self) -> float:
        """What all members have multiplied their losses by."""
        return self.scale / self.trainers if self.trainers else 1.0

    @property
    def divisor(self) -> float:
        """What the sums of the gradients are divided by, so that they are those of the mean loss."""
        return self.loss_scale * (self.counted if self.counting else 1.0)

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradients of all members are finite."""
        squares = self.squares + self.reduced_squares
        return not self.nonfinite and math.isfinite(self.mean_loss) and math.isfinite(squares)

    @property
    def is_mixed(self) -> bool:
        """Whether some members gave counts, and others did not: then nothing is known of the mean."""
        return 0 < self.counting < self.trainers

    @property
    def norm(self) -> float:
        """Norm of the mean loss's gradient over all members, before anything has changed or clipped it."""
        divisor = self.divisor
        return self.reduced_squares**0.5 / divisor if divisor else math.nan

    @property
    def nonfinite_rank(self) -> int | None:
        """The member whose loss is not finite, if it is one alone; else the one whose gradient is not."""
        if self.nonfinite_losses == 1:
            return int(self.nonfinite_loss_ranks)
        return int(self.nonfinite_ranks) if self.nonfinite == 1 else None

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
