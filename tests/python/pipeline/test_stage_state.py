"""The units of a stage: cut among its ranks, copied, written back."""

from __future__ import annotations

import torch
from torch import nn

import evermoe
from evermoe.train.kept_loop import KeptLoop
from evermoe.train.loss_scale import LossScale
from evermoe.train.stages import StageState


def test_what_was_copied_is_written_back_experts_that_were_cut_included():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), evermoe.MoE(16, 64, num_experts=4), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(module.parameters())
    state = StageState(module, optimizer, 0, KeptLoop(optimizer, None, LossScale(None)), 2)

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
