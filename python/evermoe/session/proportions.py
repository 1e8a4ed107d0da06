"""Sizes of the members' parts of each batch, by which members of different speeds take as long as each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evermoe.planning.stragglers import MIN_FACTOR

LEAST = 0.25
"""Smallest part of a member, of an even one: fewer samples hardly make it faster."""
STEP = 0.5
"""Factor by which a part shrinks at a time, at most; and grows, by its inverse."""


def check(sampler: object) -> None:
    """Check that a sampler can divide a batch into parts of other sizes.

    Raises:
        ValueError: it cannot.
    """
    if not hasattr(sampler, "proportions"):
        raise ValueError(
            f"on_slow='shift' needs a sampler with `proportions`, such as ElasticSampler or ElasticLoader; got a "
            f"{type(sampler).__name__}, so use 'warn' or 'evict'"
        )


class Proportions:
    """Sets a sampler's `proportions` by what members take for the parts that they have.

    No model of a member's speed is needed: its part shrinks while it is slower than the others, and grows while it is
    faster, up to an even one.

    Args:
        sampler: of the script.

    Raises:
        ValueError: it cannot divide a batch into parts of other sizes.
    """

    def __init__(self, sampler: object) -> None:
        check(sampler)
        self._sampler: Any = sampler
        self.of_even: list[float] = []
        """Part of each member, by rank, of an even one; empty: all are even."""

    def reset(self) -> None:
        """Begin with even parts: members have changed."""
        self.of_even = []
        self._sampler.proportions = None

    def adapt(self, seconds: NDArray[np.float64], are_slow: Sequence[bool]) -> list[int]:
        """Change the parts by the members' times; the same on all that have the same times.

        Args:
            seconds: `[S, R]`, in the latest steps by rank.
            are_slow: whether each member was found to be slow.

        Returns:
            the ranks whose parts have changed.
        """
        median_R = np.median(seconds, axis=0)
        parts = self.of_even or [1.0] * len(median_R)
        found = list(parts)
        for rank, part in enumerate(parts):
            factor = float(np.median(np.delete(median_R, rank)) / max(float(median_R[rank]), 1e-9))
            if are_slow[rank] and factor < 1:
                found[rank] = max(LEAST, part * max(factor, STEP))
            elif part < 1 and factor >= MIN_FACTOR:
                found[rank] = min(1.0, part * min(factor, 1 / STEP))
        changed = [rank for rank, (old, new) in enumerate(zip(parts, found, strict=True)) if old != new]
        if changed:
            self.of_even = found if min(found) < 1 else []
            self._sampler.proportions = self.of_even or None
        return changed
