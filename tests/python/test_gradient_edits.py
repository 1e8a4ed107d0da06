"""Gradients that a script changes between its backward and the sum over the members are noticed."""

import warnings

import pytest
import torch
from torch import nn

from evermoe.session.gradient_edits import WATCHED_STEPS, GradientEdits


def take(edits, model, change, members=2, backwards=2):
    """A step; the warnings that it has led to."""
    model.zero_grad()
    edits.begin_step()
    for _ in range(backwards):
        model(torch.ones(2, 4)).square().sum().backward()
        edits.note()
    change(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        edits.check(members)
    return [str(each.message) for each in found]


def replaced(model):
    model.weight.grad = torch.zeros_like(model.weight)


CHANGES = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "zeros": lambda model: model.zero_grad(),
    "another": replaced,
    "data": lambda model: model.weight.grad.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_named_once_and_with_several_members_alone(change):
    model = nn.Linear(4, 4)
    edits = GradientEdits(model)
    assert take(edits, model, change, members=1) == []
    (message,) = take(edits, model, change)
    assert "each worker has the gradient of its own samples" in message and "max_grad_norm" in message
    assert take(edits, model, change) == []
    assert edits.may_send_early == (change is not CHANGES["data"]), (
        "a change that autograd counts is noticed later, too"
    )


def test_what_backward_does_is_no_change():
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(-0.1, 0.1)))
    edits = GradientEdits(model)
    assert not edits.may_send_early
    assert [take(edits, model, lambda model: None) for _ in range(WATCHED_STEPS)] == [[]] * WATCHED_STEPS
    assert edits.may_send_early
    assert take(edits, model, CHANGES["norm"]) == [], "a script does the same in all steps"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_overflow_are_no_change(value):
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.full_like(p, value)))
    edits = GradientEdits(model)
    assert [take(edits, model, lambda model: None) for _ in range(WATCHED_STEPS)] == [[]] * WATCHED_STEPS
    assert edits.may_send_early
