"""The cost of choosing experts before a step's tokens are known: hardly more tokens at risk."""

from __future__ import annotations

import numpy as np
import pytest

from benches.papers.routing import drifting_tokens
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.load import LoadAverage
from evermoe.planning.selection import select_experts
from evermoe.state.expert_load import LOAD_HALF_LIFE


def at_risk(tokens_SLE, each, knows_step):
    """Tokens at risk after each step, in steps' tokens; mean over steps."""
    layers, experts = tokens_SLE.shape[1:]
    ledger, average = TokenLedger(layers, experts), LoadAverage(layers, experts, half_life=LOAD_HALF_LIFE)
    found = []
    for tokens_LE in tokens_SLE:
        expected_LE = tokens_LE if knows_step else np.maximum(np.rint(average.loads), 1).astype(np.int64)
        chosen = select_experts("budget", ledger.at_risk + expected_LE, budget_bytes=each * layers, expert_bytes=1)
        ledger.add(tokens_LE)
        average.add(tokens_LE)
        ledger.copied(chosen)
        found.append(ledger.at_risk.sum() / tokens_LE.sum())
    return np.mean(found)


@pytest.mark.parametrize("each", [2, 4, 8])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_a_choice_before_the_step_leaves_hardly_more_tokens_at_risk(sigma, each):
    tokens_SLE = drifting_tokens(100, 24, 16, sigma=sigma)
    before, after = (at_risk(tokens_SLE, each, knows_step) for knows_step in (False, True))
    assert 0.99 < before / after < 1.12
