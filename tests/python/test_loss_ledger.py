"""The ledger of tokens at risk and lost: what a recovery costs, also after another one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe.keeper import CopyOptions
from evermoe.protection import Protection
from evermoe.selection import LossLedger
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import version_of
from support.ranks import run_ranks

FIRST, SECOND = expert_unit("experts", 0), expert_unit("experts", 1)


@pytest.fixture
def ledger():
    return make_ledger()


def make_ledger(has_marks=True):
    layer = MoE(8, 8, 2, top_k=1)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1), has_marks=has_marks)
    found = LossLedger(state, CopyOptions(preset="pec"))

    def take(step, *tokens):
        layer.experts.count.forget()
        layer.experts.count.add(np.array(tokens), is_counted=True)
        found.add(step)

    found.take = take
    return found


def at(step, generation=1):
    return version_of(generation, step)


def recover(ledger, step, since):
    lost = ledger.count_lost({unit: at(found) for unit, found in since.items()})
    ledger.resume(step, lost)
    return lost


def test_copies_of_a_recovery_are_known_to_the_next_one(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {}) == {}
    ledger.copied([FIRST, SECOND], at(2))
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}


def test_a_copy_that_never_came_to_be_leaves_its_tokens_at_risk(ledger):
    ledger.take(1, 5, 50)
    ledger.copied([FIRST, SECOND], at(1))
    ledger.take(2, 7, 70)
    ledger.copied([FIRST], at(2))
    ledger.take(3, 3, 30)
    assert ledger.selection.at_risk.tolist() == [[3, 100]]
    for _ in range(2):  # what is told twice counts once
        ledger.skipped(FIRST, at(2))
        assert ledger.selection.at_risk.tolist() == [[10, 100]]
    assert recover(ledger, 3, {FIRST: 1}) == {FIRST: 10}


def test_a_copy_that_never_came_to_be_before_one_that_did_changes_nothing(ledger):
    for step in (1, 2, 3):
        ledger.take(step, 5, 50)
        ledger.copied([FIRST], at(step))
    ledger.take(4, 1, 10)
    ledger.skipped(FIRST, at(2))
    assert ledger.selection.at_risk.tolist() == [[1, 160]]
    ledger.skipped(FIRST, at(3))
    assert ledger.selection.at_risk.tolist() == [[11, 160]]


def test_state_of_a_recovery_is_known_without_copies(ledger):
    ledger.take(1, 5, 50)
    recover(ledger, 1, {})
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {SECOND: 1}) == {SECOND: 70}


def test_the_same_copy_costs_only_what_came_since_it_was_last_gone_back_to(ledger):
    ledger.copied([FIRST, SECOND], at(0))
    ledger.take(1, 5, 50)
    assert recover(ledger, 1, {FIRST: 0}) == {FIRST: 5}
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {FIRST: 0, SECOND: 0}) == {FIRST: 7, SECOND: 120}
    ledger.copied([FIRST], at(2))
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}
    assert ledger.lost_LE.tolist() == [[15, 120]]
    assert ledger.plt == pytest.approx(135 / 165)


def test_copies_of_steps_that_were_undone_are_forgotten(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    ledger.copied([FIRST], at(2))
    ledger.total_LE[:] = [[5, 50]]  # as with the state of step 1
    recover(ledger, 1, {})
    ledger.take(2, 1, 10)
    ledger.copied([FIRST], at(2))
    ledger.take(3, 2, 20)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 2}


def count_after_a_recovery_that_failed(group):
    """Rank 1 has counted the loss in it, rank 0 has not."""
    ledger, before = make_ledger(), version_of(1, 2)
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    if group.rank == 1:
        assert recover(ledger, 2, {FIRST: 0}) == {FIRST: 12}
        before = version_of(2, 2)
    ledger.lost_LE[:] = [[12, 0]]  # as with the state of rank 1, which is newer
    protection = SimpleNamespace(
        lagging="always",
        state=SimpleNamespace(layers=[""]),
        ledger=ledger,
        _membership=SimpleNamespace(everyone=group),
    )
    lost = Protection.count_losses(protection, {FIRST: version_of(1, 0)}, version_of(1, 2), before)
    return {"lost": lost, "ledger": ledger.to_bytes().decode()}


def test_all_go_on_with_the_ledger_of_who_knows_most(tmp_path):
    first, second = run_ranks(tmp_path, 2, count_after_a_recovery_that_failed)
    assert first == second
    assert first["lost"] == {FIRST: 0}
