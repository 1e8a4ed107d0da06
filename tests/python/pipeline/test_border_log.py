"""The log of a rank's borders: which steps it keeps, and whose gradients the parameters have."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from evermoe import _native
from evermoe.moe.token_counts import TokenCount
from evermoe.pipeline.border_log import Backward, BorderLog, Forward

version_of = _native.version_of


def compute(log, step, generation=1, value=1.0):
    """A step of one microbatch, up to the vote."""
    found = log.begin_step(version_of(generation, step))
    chunk = found.chunk(0, 0, 0)
    output = torch.full((4,), value)
    chunk.forward, chunk.backward = Forward(None, (output,), [], 0), Backward((torch.full((2,), value),), 0)
    for parameter in log._parameters():
        parameter.grad = torch.full_like(parameter, value)
    return found


def new_log(*counts):
    parameters = [nn.Parameter(torch.zeros(3))]
    return BorderLog(lambda: parameters, counts)


def test_steps_are_kept_until_copies_of_a_newer_version_are_complete():
    log = new_log()
    for step in range(5):
        compute(log, step)
        log.release_before(version_of(1, step))
        log.mark_taken(version_of(1, step + 1))
        assert [each.number for each in log.steps] == [step]
        assert log.nbytes == 6 * 4
    compute(log, 5)
    assert [each.number for each in log.steps] == [4, 5]
    assert log.nbytes == 2 * 6 * 4


def test_an_interrupted_step_has_its_gradients_when_it_begins_again():
    log = new_log()
    (parameter,) = log._parameters()
    compute(log, 0)
    log.mark_taken(version_of(1, 1))
    step = compute(log, 1, value=2.0)
    log.interrupt()
    parameter.grad = None
    assert log.begin_step(version_of(1, 0)).is_taken  # sent once more, with no gradients
    assert parameter.grad is None
    log.mark_taken(version_of(2, 1))
    assert log.begin_step(version_of(2, 1)) is step  # whose version has another generation now
    assert parameter.grad.tolist() == [2.0] * 3


def test_tokens_are_counted_on_from_forwards_that_are_whole():
    count = TokenCount(2)
    log = new_log(count)

    def forward(step, tokens, is_cut_short=False):
        step.count_on()
        count.add(np.array(tokens), is_counted=True)
        if not is_cut_short:
            step.note_forward()

    count.add(np.array([9, 9]), is_counted=True)  # of no microbatch, such as one that a schedule infers shapes by
    step = compute(log, 0)
    forward(step, [1, 2])
    forward(step, [3, 0])
    forward(step, [5, 5], is_cut_short=True)
    log.interrupt()
    count.add(np.array([7, 7]), is_counted=True)
    assert log.begin_step(version_of(1, 0)) is step
    assert TokenCount.totals([count])[0].tolist() == [4, 2]
    forward(step, [0, 1])
    assert TokenCount.totals([count])[0].tolist() == [4, 3]
    log.mark_taken(version_of(1, 1))
    compute(log, 1)
    assert TokenCount.totals([count])[0].tolist() == [0, 0]


def test_a_torn_step_is_forgotten():
    log = new_log()
    compute(log, 0).is_torn = True
    log.interrupt()
    assert log.steps == []


def test_a_step_that_begins_anew_without_a_recovery_is_computed_anew():
    log = new_log()
    step = compute(log, 0)
    assert log.begin_step(version_of(1, 0)) is not step


def test_another_history_is_forgotten():
    log = new_log()
    compute(log, 3)
    log.keep_from(version_of(2, 3))
    assert log.steps == []
