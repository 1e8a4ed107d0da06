"""Optimizers and schedules of the workers' scripts, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import evermoe
from support.masters import MasterAdam


def make_optimizer(name: str, model: nn.Module) -> Any:
    if name == "muon":  # and another one for the rest
        matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        return [evermoe.optim.Muon(matrices, lr=1e-2), evermoe.optim.AdamW(others, lr=1e-2)]
    if name == "sgd-fused":  # counts up no versions of the tensors that it writes
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=True)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if name == "evermoe":
        return evermoe.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "masters":
        return MasterAdam(model.parameters(), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make_scheduler(name: str | None, optimizer: torch.optim.Optimizer) -> Any:
    """None, or a scheduler that changes the learning rate at every step."""
    lr = torch.optim.lr_scheduler
    if name == "cosine":
        return lr.CosineAnnealingLR(optimizer, 40)
    if name == "warmup":  # nested state
        parts = [lr.LinearLR(optimizer, 0.1, 1.0, 4), lr.CosineAnnealingLR(optimizer, 40)]
        return lr.SequentialLR(optimizer, parts, [4])
    return None
