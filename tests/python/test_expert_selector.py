"""The experts that partial presets copy next: each level by its own number, budget and ledger."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe.copies.loss_ledger import LossLedger
from evermoe.copies.selection import ExpertSelector
from evermoe.presets import Moetion, Pec
from evermoe.state.training_state import TrainingState
from evermoe.state.version import version_of

NOW = version_of(1, 1)
EXPERTS = 4
TOKENS = [[10, 90, 20, 80], [70, 15, 25, 60]]
"""By layer, of each expert in the one step that was taken."""


class Setting:
    """Two layers of four experts after a step; each expert has its own rank: no rank's share limits choices."""

    def __init__(self, options):
        model = torch.nn.Sequential(*(MoE(8, 8, EXPERTS, top_k=1) for _ in TOKENS))
        state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), has_marks=True)
        self.paths = list(state.layers)
        self.ledger = LossLedger(state, options if isinstance(options, Pec) else Pec())
        self.selector = ExpertSelector(state, options, self.ledger)
        for layer, tokens in zip(state.layers.values(), TOKENS, strict=True):
            layer.count.reset()
            layer.count.add(np.array(tokens), is_counted=True)
        self.ledger.add_step(1)
        state.expert_load.add_step()
        names = [f"{path}.{e}" for path in self.paths for e in range(EXPERTS)]
        self.selector.replan({name: [rank] for rank, name in enumerate(names)}, len(names), names)
        (self.expert_bytes,) = {unit.nbytes for unit in state.catalog.units if unit.layer is not None}

    def units(self, *places):
        """Names of units by layer and expert, as in `0.1`."""
        return {f"{self.paths[int(each[0])]}.{each[2]}" for each in places}


def test_load_aware_selection_saves_the_experts_with_the_most_tokens_of_each_layer():
    setting = Setting(Pec(experts_per_save=1, experts_per_snapshot=2))
    assert setting.selector.select_to_save() == setting.units("0.1", "1.0")
    setting.ledger.record_copies(setting.units("0.1", "1.0"), NOW)
    assert setting.selector.select_to_save() == setting.units("0.3", "1.3")


def test_sequential_selection_takes_the_next_experts_whatever_their_tokens():
    """PEC, section 3.1: in layer m at checkpoint t the K experts from (m K + t K) mod E on."""
    setting = Setting(Pec(experts_per_save=1, expert_selection="sequential"))
    chosen = [setting.units("0.0", "1.1"), setting.units("0.1", "1.2"), setting.units("0.2", "1.3")]
    for units in chosen:
        assert setting.selector.select_to_save() == units
        setting.ledger.record_copies(units, NOW)


def test_each_level_selects_by_its_own_number_and_its_own_copies():
    """PEC's two levels: what was saved is still to be snapshot, and what was snapshot is still to be saved."""
    setting = Setting(Pec(experts_per_save=1, experts_per_snapshot=2))
    saved, snapshot = setting.units("0.1", "1.0"), setting.units("0.1", "0.3", "1.0", "1.3")
    assert setting.selector.select_to_save() == saved
    assert setting.selector.select_to_snapshot() == snapshot
    setting.ledger.record_local_copies(snapshot, NOW)
    assert setting.selector.select_to_snapshot() == setting.units("0.0", "0.2", "1.1", "1.2")
    assert setting.selector.select_to_save() == saved
    setting.ledger.record_copies(saved, NOW)
    assert setting.selector.select_to_snapshot() == setting.units("0.0", "0.2", "1.1", "1.2")
    assert setting.selector.select_to_save() == setting.units("0.3", "1.3")


@pytest.mark.parametrize(("peers", "local"), [(1, 3), (3, 1)])
def test_each_budget_of_moetion_limits_its_own_copies(peers, local):
    """MoEtion, Algorithm 1: the experts with the largest portions of their layer's tokens, as many as fit."""
    first = ["0.1", "1.0", "0.3", "1.3"]  # 90 / 200, 70 / 170, 80 / 200, 60 / 170
    size = Setting(Moetion()).expert_bytes
    setting = Setting(Moetion(remote_bytes_per_step=peers * size, local_bytes_per_step=local * size))
    assert setting.selector.select_for_peers() == setting.units(*first[:peers])
    assert setting.selector.select_for_local_memory() == setting.units(*first[:local])
    setting.ledger.record_local_copies(setting.units(*first[:local]), NOW)
    assert setting.selector.select_for_peers() == setting.units(*first[:peers])
    assert not setting.selector.select_for_local_memory() & setting.units(*first[:local])
    setting.ledger.record_copies(setting.units(*first[:peers]), NOW)
    assert setting.selector.select_for_peers() != setting.units(*first[:peers])


def test_measured_budgets_count_where_no_option_gives_one():
    size = Setting(Moetion()).expert_bytes
    setting = Setting(Moetion())
    assert setting.selector.select_for_local_memory(2 * size) == setting.units("0.1", "1.0")
    assert setting.selector.select_for_local_memory() == setting.units("0.1"), "an eighth of the experts"
