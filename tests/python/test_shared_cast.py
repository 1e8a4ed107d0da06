"""Weights under autocast are cast once for all graphs that exist, and never used in an old state."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from evermoe import MoE
from evermoe.moe import shared_cast
from evermoe.moe.shared_cast import share_cast

H, E = 16, 4


class Casts(TorchDispatchMode):
    """Counts casts of stacks of experts."""

    def __init__(self, weights):
        super().__init__()
        self.shape, self.count = weights.shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **kwargs or {})


def make():
    torch.manual_seed(0)
    return MoE(H, 32, E, gated=True)


def run(layer, x, through=None):
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x) if through is None else through(layer, x)
    return out.float().square().sum()


def plain(monkeypatch):
    """Forwards that share nothing."""
    monkeypatch.setattr(shared_cast, "_casts", {})
    monkeypatch.setattr(shared_cast, "TensorWeakRef", lambda cast: lambda: None)


@pytest.mark.parametrize("shares", [True, False])
def test_forwards_of_one_backward_share_a_cast_and_have_the_gradients_of_their_own(monkeypatch, shares):
    if not shares:
        plain(monkeypatch)
    layer, inputs = make(), torch.randn(3, 9, H)
    with Casts(layer.experts.weights) as casts:
        losses = [run(layer, x) for x in inputs]
        assert casts.count == (1 if shares else 3)
        for loss in losses:
            loss.backward()
        assert casts.count == (1 if shares else 3)
    expected = make()
    for x in inputs:  # one graph at a time
        run(expected, x).backward()
    assert torch.equal(layer.experts.weights.grad, expected.experts.weights.grad)


def change(name, weights):
    with torch.no_grad():
        if name == "an operation in place":
            weights.mul_(2)
        elif name == "an optimizer":
            weights.grad = torch.ones_like(weights)
            torch.optim.SGD([weights], lr=1.0, foreach=True).step()
        elif name == "another data":
            weights.data = weights.data * 2
        elif name == "a view":
            weights.detach().view(-1)[:3].copy_(torch.ones(3))


@pytest.mark.parametrize("name", ["an operation in place", "an optimizer", "another data", "a view", "nothing"])
def test_changed_weights_are_cast_again(name):
    weights = torch.nn.Parameter(torch.rand(3, 64))
    first = share_cast(weights, torch.bfloat16)
    change(name, weights)
    second = share_cast(weights, torch.bfloat16)
    assert torch.equal(second, weights.to(torch.bfloat16))
    assert (second.data_ptr() == first.data_ptr()) == (name == "nothing")
    third = share_cast(weights, torch.float16)
    assert torch.equal(third, weights.to(torch.float16))


def test_a_change_that_no_version_shows_is_seen_once_the_graphs_are_gone():
    weights = torch.nn.Parameter(torch.rand(3, 64))
    share_cast(weights, torch.bfloat16).sum().backward()
    weights.data.add_(1)
    assert torch.equal(share_cast(weights, torch.bfloat16), weights.to(torch.bfloat16))


def test_a_cast_ends_with_the_backward_of_its_last_graph():
    layer = make()
    one, two = (run(layer, x) for x in torch.randn(2, 9, H))
    cast = shared_cast._casts[layer.experts.weights].cast
    for loss in (one, two):
        assert cast() is not None
        loss.backward()
    assert cast() is None, "though the losses still exist"
    alive = weakref.ref(layer.experts.weights)
    del layer, one, two, loss
    gc.collect()
    assert alive() is None


def test_evaluation_and_recomputation_keep_no_cast():
    layer, x = make(), torch.randn(9, H)
    with torch.no_grad():
        run(layer, x)
    assert layer.experts.weights not in shared_cast._casts
    loss = run(layer, x, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert shared_cast._casts[layer.experts.weights].cast() is None
    loss.backward()
    expected = make()
    run(expected, x).backward()
    assert torch.equal(layer.experts.weights.grad, expected.experts.weights.grad)
