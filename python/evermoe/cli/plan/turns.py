"""What a preset has at risk that copies a few experts at a time, by load: `pec`, at each of its levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evermoe.planning import TokenLedger, select_per_rank


@dataclass(frozen=True)
class Turns:
    """What one level comes to, once each expert had its turn."""

    at_risk_LE: NDArray[np.float64]
    """[L, E] tokens of each expert since its last copy, just after some were copied, on average."""
    most_between: int
    """Copies from one of an expert to its next, at most."""


def run_turns(tokens_LE: NDArray[np.int64], rank_LE: NDArray[np.int64], experts_per_layer: int) -> Turns:
    """Runs the selection of a session until what is at risk repeats.

    Args:
        tokens_LE: of each expert from one copy of some to the next.
        rank_LE: that copies each expert.
        experts_per_layer: K.
    """
    layers, experts = tokens_LE.shape
    ledger, turns = TokenLedger(layers, experts), -(-experts // experts_per_layer)
    sum_LE, oldest = np.zeros(tokens_LE.shape), 0
    for number in range(4 * turns):
        ledger.add(tokens_LE)
        chosen = select_per_rank(
            ledger.at_risk, ledger.checkpoint, ledger.waiting, rank_LE, experts_per_layer=experts_per_layer
        )
        ledger.copied(chosen)
        if number >= 3 * turns:  # by then each had its turn
            sum_LE += ledger.at_risk
            oldest = max(oldest, int(ledger.waiting.max()) + 1)
    return Turns(sum_LE / turns, oldest)
