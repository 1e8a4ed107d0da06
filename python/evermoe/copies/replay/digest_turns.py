"""The order in which a trainer takes digests of its state for replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evermoe.copies.replay.source import Source
from evermoe.planning.protection import BATCH_STEPS, batch_steps
from evermoe.state.still import is_still


class DigestTurns:
    """Chooses parameters, each twice in a pass.

    Between the two are the steps that a replica repeats in one batch, so that another member can repeat them, too, from
    a state that both had.

    Args:
        sources: the parameters.
        optimizer: those that it leaves as they are have no turn.
    """

    def __init__(self, sources: Sequence[Source], optimizer: torch.optim.Optimizer) -> None:
        self._sources, self._optimizer = sources, optimizer
        self._next, self._elements = 0, 0.0
        """Index of the next source, and number of elements to read."""
        self._again: list[list[Source]] = [[] for _ in range(BATCH_STEPS)]
        """Sources that are read again, by the number of calls until then, less one."""

    def choose(self, steps: int) -> list[Source]:
        """Return the parameters whose digests are taken now; a pass takes this number of calls."""
        followed = [each for each in self._sources if each.sent and not is_still(each.parameter, self._optimizer)]
        due = self._again.pop(0)
        self._again.append([])
        found = [source for source in followed if source in due]
        self._elements += sum(source.elements for source in followed) / steps
        for _ in followed:
            source = followed[self._next % len(followed)]
            if source.elements > self._elements:
                break
            found.append(source)
            self._again[batch_steps(source.elements) - 1].append(source)
            self._elements -= source.elements
            self._next += 1
        return found
