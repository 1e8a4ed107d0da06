"""Whose settings members of a real group take in a recovery, where their scripts and states differ."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from evermoe.session.loop_restore import LoopRestore
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts
from support.ranks import run_threads

STEPS, JOBS, OTHERS = 6, 0.9, 4
"""Steps of the job and its gamma; steps that members of another version have taken."""


def loop(gamma, steps=0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    parts = LoopParts(None, optimizer, ExponentialLR(optimizer, gamma))
    for _ in range(steps):
        loop_state.advance(parts.scheduler, 1.0)
    return parts


def new(group, gammas, takes_own):
    restored = loop(gammas[group.rank])
    return restored, LoopRestore(restored, lambda step: nullcontext(), group, "job", takes_own=takes_own)


def agreements(group):
    """The learning rate of this member after each kind of recovery."""
    progress = json.loads(loop_state.encoded(loop_state.collect(loop(JOBS, STEPS))))
    gammas, found = (0.5, 0.6, 0.7), []

    def recover(parts, restore, **standing):
        restore.restore(dict(progress), STEPS, **standing)
        found.append(parts.optimizer.param_groups[0]["lr"])

    for takes_own in (False, True):  # all start again
        parts, restore = new(group, gammas, takes_own)
        recover(parts, restore, is_new=True, continues=False)
    for _ in range(OTHERS):  # they continue, and then return to that version
        loop_state.advance(parts.scheduler, 1.0)
    recover(parts, restore, is_new=False, continues=False)
    if group.rank == 2:  # this one is lost, and its next process joins the running job
        parts, restore = new(group, gammas, True)
    recover(parts, restore, is_new=group.rank == 2, continues=group.rank != 2)
    if group.rank == 1:  # its script sets another learning rate between two steps
        parts.optimizer.param_groups[0]["lr"] = 0.25
    recover(parts, restore, is_new=False, continues=group.rank == 1)
    parts, restore = new(group, gammas, True)  # all but the last continue with the job's own state
    if group.rank != 2:
        loop_state.restore(dict(progress), parts)
    recover(parts, restore, is_new=group.rank == 2, continues=group.rank != 2)
    return found


def test_all_members_take_the_same_settings(tmp_path):
    found = run_threads(tmp_path, 3, agreements)
    assert found[0] == found[1] == found[2]
    own = 0.5**STEPS
    assert found[0] == pytest.approx([JOBS**STEPS, own, own, own, 0.25, JOBS**STEPS])
