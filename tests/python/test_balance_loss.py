"""The balancing loss of `evermoe.MoE`: without padding, and with several members that of one process."""

import numpy as np
import pytest
import torch
from torch import nn

from evermoe import Expert, Experts, MoE, Router, load_balancing_loss
from support.ranks import run_each, sum_gradients
from test_moe import hold

HIDDEN, EXPERTS, LENGTH = 8, 6, 10
KEPT = [10, 1, 4, 9, 2]
"""Tokens of each sample that are not padding."""
BOUNDS = {"unequal": [0, 1, 3, 5], "one without samples": [0, 2, 2, 5]}
MATRIX = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
ROUTERS = {"softmax": {}, "sigmoid": {"scores": "sigmoid", "balance_rate": 0.1}, "identity": {"identity_experts": 2}}


class Model(nn.Module):
    """Two layers."""

    def __init__(self, kind: str = "softmax") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = MoE.of(Router(HIDDEN, EXPERTS, 2, **ROUTERS[kind]), Experts(Expert(HIDDEN, 8), EXPERTS))
        self.second = MoE(HIDDEN, 8, EXPERTS, top_k=2)

    def forward(self, x, mask):
        x = x + self.first(x, mask=mask)
        return x + self.second(x, mask=mask)


def batch():
    """`[5, 10, H]` and bool `[5, 10]`."""
    x = torch.randn(len(KEPT), LENGTH, HIDDEN, generator=torch.Generator().manual_seed(7))
    return x, torch.arange(LENGTH) < torch.tensor(KEPT).unsqueeze(1)


def routers(model):
    return [layer.router.weight for layer in (model.first, model.second)]


@pytest.mark.parametrize("kind", ROUTERS)
def test_padding_changes_nothing(kind):
    x, mask = batch()
    x.requires_grad_()
    padded, plain = Model(kind), Model(kind)
    out, expected = padded(x, mask.long()), plain(x[mask], None)
    torch.testing.assert_close(out[mask], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[~mask], x[~mask])
    loss, balance = load_balancing_loss(padded), load_balancing_loss(plain)
    assert loss.item() == pytest.approx(balance.item(), rel=1e-6)
    found = torch.autograd.grad(loss, routers(padded))
    torch.testing.assert_close(found, torch.autograd.grad(balance, routers(plain)), rtol=1e-5, atol=1e-7)
    assert padded.first.load_E.tolist() == plain.first.load_E.tolist()


def test_padding_alone_has_no_loss():
    x, mask = batch()
    model = Model()
    model(x, torch.zeros_like(mask))
    assert load_balancing_loss(model).item() == 0


def test_a_mask_of_another_shape_is_refused():
    x, mask = batch()
    with pytest.raises(ValueError, match=r"expected a mask of shape \[5, 10\] as x has, got \[10, 5\]"):
        MoE(HIDDEN, 8, EXPERTS)(x, mask=mask.t())


def on_rank(group, bounds, weighted_by):
    model, (x, mask) = Model(), batch()
    for layer in (model.first, model.second):
        hold(layer, group, MATRIX)
    rows = slice(bounds[group.rank], bounds[group.rank + 1])
    weight = (rows.stop - rows.start) / len(x) if weighted_by == "samples" else mask[rows].sum() / mask.sum()
    if rows.stop == rows.start:
        model.first.experts.has_samples = model.second.experts.has_samples = False
        rows = slice(0, 1)
    model(x[rows], mask[rows])
    with torch.no_grad():
        if group.rank == 0:  # as a script that logs it does
            load_balancing_loss(model)
    loss = load_balancing_loss(model) * weight
    loss.backward()
    sum_gradients(routers(model), group)
    grads = [weights.grad for weights in routers(model)]
    return {"loss": loss.detach(), "grads": grads, "load": torch.from_numpy(model.second.load_E)}


def test_members_losses_add_up_to_that_of_one_process(tmp_path):
    model = Model()
    model(*batch())
    loss = load_balancing_loss(model)
    expected = torch.autograd.grad(loss, routers(model))
    cases = [(bounds, weighted_by) for bounds in BOUNDS.values() for weighted_by in ("samples", "tokens")]
    for found in run_each(tmp_path, 3, on_rank, cases):
        assert sum(each["loss"] for each in found).item() == pytest.approx(loss.item(), rel=1e-6)
        for each in found:
            torch.testing.assert_close(each["grads"], list(expected), rtol=1e-5, atol=1e-7)
            assert each["load"].tolist() == model.second.load_E.tolist()
