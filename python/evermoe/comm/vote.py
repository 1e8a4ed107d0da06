"""The vote before each update: one collective that sums the ballots of all members, including replica nodes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from evermoe.comm.group import Group


class Ballot(NamedTuple):
    """A member's report on a step, or the sum of these reports over all members."""

    votes: float
    """1 from a member that can take the step, and whose copies of it are safe."""
    loss: float = 0.0
    squares: float = 0.0
    """Sum of the squares of the gradients that the optimizer gets, before the vote's factor."""
    reduced_squares: float = 0.0
    """The same before `on_gradients` changes them, that is, of the plain sums over the members."""
    nonfinite: float = 0.0
    """1 from a member whose loss, or gradient before the reduction, is infinite or NaN."""
    nonfinite_ranks: float = 0.0
    """The rank of such a member."""
    nonfinite_losses: float = 0.0
    """1 from a member whose loss is infinite or NaN. If the loss covers the tokens of all members, this spreads to the
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
    """1 from a member that requests the end of the job after the step."""
    role_switches: float = 0.0
    """1 from a leaving member that returns in its other role."""
    newcomer_seen: float = 0.0
    """1 from a member that has seen a newcomer: all members ask the Lighthouse before the next step."""
    trainers: float = 0.0
    """1 from a member that trains."""
    scale: float = 0.0
    """Factor by which a training member has multiplied its loss, in addition to its weight."""
    counting: float = 0.0
    """1 from a member whose loss is a sum."""
    counted: float = 0.0
    """Number of terms of that sum, such as tokens."""
    missing: float = 0.0
    """Part of the global batch that the member's data does not have."""
    remaining: float = 0.0
    """Readers of the member that have more samples in this epoch."""
    samples: float = 0.0
    """Samples of the global batch that the member has computed."""
    divided: float = 0.0
    """1 from a training member that has already divided the sums of the gradients, for `on_gradients`."""
    steps_own: float = 0.0
    """1 from a member whose script has its own code in the optimizer's step."""
    checkpoint_done: float = 0.0
    """1 from a member that knows the outcome of the checkpoint in progress."""
    checkpoint_overdue: float = 0.0
    """1 from a member by whose clock a checkpoint is scheduled."""
    save_done: float = 0.0
    """1 from a member that knows the outcome of the save in progress."""
    reported: float = 0.0
    """2^i from the member that has called `on_lost` for the i-th loss that all members know of."""

    @property
    def mean_loss(self) -> float:
        """The global batch's mean loss; NaN if sums have no terms, or the batch has no samples."""
        if not self.counting:
            return math.nan if self.is_empty else self.loss / (1 - self.missing)
        return self.loss / self.counted if self.counted else math.nan

    @property
    def is_empty(self) -> bool:
        """Whether all samples of the batch are missing."""
        return self.missing > 1 - 1e-9

    @property
    def loss_scale(self) -> float:
        """Factor by which members have multiplied their losses."""
        return self.scale / self.trainers if self.trainers else 1.0

    @property
    def divisor(self) -> float:
        """Divisor that turns the sums of the gradients into the gradients of the mean loss."""
        return self.loss_scale * (self.counted if self.counting else 1 - self.missing)

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradients of all members are finite."""
        squares = self.squares + self.reduced_squares
        return not self.nonfinite and math.isfinite(self.mean_loss) and math.isfinite(squares)

    @property
    def is_mixed(self) -> bool:
        """Whether some members gave counts and others did not, so that the mean is unknown."""
        return 0 < self.counting < self.trainers

    @property
    def norm(self) -> float:
        """Norm of the mean loss's gradient over all members, before any change or clipping."""
        divisor = self.divisor
        return self.reduced_squares**0.5 / divisor if divisor else math.nan

    @property
    def nonfinite_rank(self) -> int | None:
        """The only rank whose loss is not finite; else the only one whose gradient is not; None if several are."""
        if self.nonfinite_losses == 1:
            return int(self.nonfinite_loss_ranks)
        return int(self.nonfinite_ranks) if self.nonfinite == 1 else None

    def to_bits(self) -> list[int]:
        """Return the bits of the float64 values, so that members that get the sums later use the same values."""
        return list(struct.unpack(f"{len(self)}q", struct.pack(f"{len(self)}d", *self)))

    @classmethod
    def from_bits(cls, bits: list[int]) -> Ballot:
        """Return the inverse of `to_bits`."""
        return cls(*struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits)))


def cast(everyone: Group, mine: Ballot, attached: Sequence[float] = ()) -> tuple[Ballot, list[float]]:
    """Return the sums of all members' ballots, and of the numbers `attached` to them. Collective.

    Raises:
        PeerLost: a member is lost.
    """
    sums = everyone.all_reduce(torch.tensor([*mine, *attached], dtype=torch.float64)).tolist()
    return Ballot(*sums[: len(mine)]), sums[len(mine) :]
