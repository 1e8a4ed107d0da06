"""Tokens at risk of a preset that copies a few experts at a time by load: `pec`, at each of its levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evermoe.planning.ledger import TokenLedger
from evermoe.planning.selection import select_per_rank


@dataclass(frozen=True)
class Turns:
    """Result of one level, once every expert was selected."""

    at_risk_LE: NDArray[np.float64]
    """[L, E] average tokens of each expert since its last copy, just after a selection."""
    most_between: int
    """Largest number of selections from one copy of an expert to its next."""


def run_turns(tokens_LE: NDArray[np.int64], rank_LE: NDArray[np.int64], experts_per_layer: int) -> Turns:
    """Run a session's selection until the tokens at risk repeat.

    Args:
        tokens_LE: tokens of each expert between two selections.
        rank_LE: rank that copies each expert.
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
        if number >= 3 * turns:  # by then every expert was selected
            sum_LE += ledger.at_risk
            oldest = max(oldest, int(ledger.waiting.max()) + 1)
    return Turns(sum_LE / turns, oldest)
