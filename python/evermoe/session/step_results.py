"""Results of the latest step, and what the job has consumed so far."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from evermoe.comm.vote import Ballot


class StepResults(NamedTuple):
    """Results of the state's latest step, and counts of all steps in the state. They are kept with the loop's state."""

    loss: float = math.nan
    """Mean loss of the global batch."""
    grad_norm: float = math.nan
    """Norm of that step's gradient, before anything has changed or clipped it."""
    samples: int = 0
    """Samples consumed."""
    tokens: int = 0
    """Terms of the losses that were sums."""

    def after(self, sums: Ballot) -> StepResults:
        """Return the results after one more step, by the sums of its ballots."""
        counted = sums.counted if math.isfinite(sums.counted) else 0.0  # not, in a step whose update is left out
        samples, tokens = self.samples + round(sums.samples), self.tokens + round(counted)
        return StepResults(sums.mean_loss, sums.norm, samples, tokens)

    @classmethod
    def taken_from(cls, progress: MutableMapping[str, Any]) -> StepResults:
        """Remove the results from the loop's state, and return them."""
        return cls(**{name: progress.pop(name) for name in cls._fields if name in progress})
