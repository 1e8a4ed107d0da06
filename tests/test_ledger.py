"""The ledger of tokens at risk and lost: what a recovery costs, also after another one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe.ledger import Ledger
from evermoe.units import TrainingState, expert_unit

FIRST, SECOND = expert_unit("", 0), expert_unit("", 1)


@pytest.fixture
def ledger():
    layer = MoE(8, 8, 2, top_k=1)
    found = Ledger(TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1)))

    def take(step, *tokens):
        layer.load_E = np.array(tokens)
        found.add(step)

    found.take = take
    return found


def recover(ledger, step, since):
    lost = ledger.count_lost(since)
    ledger.go_on(step, since, lost)
    return lost


def test_copies_of_a_recovery_are_known_to_the_next_one(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {}) == {}
    ledger.copied([FIRST, SECOND], 2)
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}


def test_state_of_a_recovery_is_known_without_copies(ledger):
    ledger.take(1, 5, 50)
    recover(ledger, 1, {})
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {SECOND: 1}) == {SECOND: 70}


def test_the_same_copy_costs_only_what_came_since_it_was_last_gone_back_to(ledger):
    ledger.copied([FIRST, SECOND], 0)
    ledger.take(1, 5, 50)
    assert recover(ledger, 1, {FIRST: 0}) == {FIRST: 5}
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {FIRST: 0, SECOND: 0}) == {FIRST: 7, SECOND: 120}
    ledger.copied([FIRST], 2)
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}
    assert ledger.lost_LE.tolist() == [[15, 120]]
    assert ledger.plt == pytest.approx(135 / 165)


def test_copies_of_steps_that_were_undone_are_forgotten(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    ledger.copied([FIRST], 2)
    ledger.total_LE[:] = [[5, 50]]  # as with the state of step 1
    recover(ledger, 1, {})
    ledger.take(2, 1, 10)
    ledger.copied([FIRST], 2)
    ledger.take(3, 2, 20)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 2}
