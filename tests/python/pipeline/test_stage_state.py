"""The units of a stage: cut among its ranks, copied, written back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import evermoe
from evermoe.copies.loss_ledger import LossLedger
from evermoe.errors import UnsupportedState
from evermoe.pipeline.stages import StageState
from evermoe.presets import Pec


def make(ranks, place=None, experts=4, **options):
    torch.manual_seed(0)
    moe = evermoe.MoE(16, 64, num_experts=experts) if experts else nn.Identity()
    module = nn.Sequential(nn.Linear(16, 16), moe, nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(module.parameters())
    return module, optimizer, StageState(module, optimizer, 0, ranks, place, **options)


def test_what_was_copied_is_written_back_experts_that_were_cut_included():
    module, optimizer, state = make(2)

    def step():
        module(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert any("experts" in name and "[" in name for name in state.held())
    before, kept = state.digests(state.held()), state.copy()
    step()
    assert state.digests(state.held()) != before
    state.write(kept)
    assert state.digests(state.held()) == before
    assert not kept, "the bytes are let go one after the other"


def test_ranks_that_divide_experts_hold_each_once_and_all_else():
    states = [make(3, place)[2] for place in range(3)]
    units = {unit.name for unit in states[0].own.units}
    held = [{*state.held()} for state in states]
    alone = [each & {*state.own.experts()} for each, state in zip(held, states, strict=True)]
    assert set.union(*held) == units
    assert [len(each) for each in alone] == [1, 1, 2]
    assert all(each - own == units - set.union(*alone) for each, own in zip(held, alone, strict=True))
    assert not any("experts" in name and "[" in name for name in units), "what one rank holds is not cut"
    assert len({state.own.layout for state in states}) == 1


def test_what_is_here_counts_as_its_version_only_if_it_is_of_it():
    _, _, state = make(2)
    units = state.held()
    state.is_of_version = False
    assert (state.held(), state.trained()) == ([], units)
    assert state.copy().keys() == set(units)


@pytest.mark.parametrize("experts", [4, 0])
def test_tokens_of_experts_go_back_and_forth_with_the_state(experts):
    _, _, state = make(2, 0, experts, keeps_tokens=True)
    ledger = LossLedger(state, Pec())
    mine = state.own.experts()

    def step(number):
        for layer in state.layers.values():
            layer.count.add(np.array([number, 0, 2, 1]), is_counted=True)
        ledger.add_step(number)
        state.expert_load.forget_step()

    step(1)
    ledger.record_copies(mine[:1], 1)
    step(2)
    kept = state.copy()
    assert any(name.startswith("stage0_loop") for name in kept)
    step(3)
    state.write(kept)
    ledger.record_recovery(2, {})
    assert ledger.total_LE.tolist() == [[3, 0, 4, 2]] * bool(experts)
    assert ledger.selection is None or ledger.selection.at_risk.tolist() == [[2, 0, 4, 2]]


def test_fewer_experts_than_ranks_are_refused():
    with pytest.raises(UnsupportedState, match="an expert for each of a stage's 5 ranks at least, got 4 in layer"):
        make(5, 0)
