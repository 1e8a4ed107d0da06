"""Activation checkpointing of either kind computes the gradients of none, and counts the load once."""

import functools
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evermoe import Expert, Experts, MoE, Router, load_balancing_loss
from evermoe.comm.collectives import ExpertReducer
from evermoe.errors import UnsupportedState
from evermoe.moe.layer import moe_layers
from support.ranks import run_each, sum_gradients
from test_moe import hold

H, E = 8, 4


class Repeats(nn.Module):
    """Blocks of a layer that occurs twice, and of another, which each way of checkpointing runs in its own way."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first = MoE(H, 8, E, router_noise=0.3)
        self.second = MoE.of(Router(H, E, 1, scores="sigmoid"), Experts(Expert(H, 8, gated=True), E), nn.Linear(H, H))

    def block(self, x):
        x = x + self.first(x)
        x = x + self.second(x)
        return x + self.first(x)

    def forward(self, x):
        return WAYS[self.way](self, x)


def nested(model, outer, inner):
    within = lambda x: checkpoint(model.block, x, use_reentrant=inner)  # noqa: E731
    return lambda x: checkpoint(lambda y: within(within(y)), x, use_reentrant=outer)


WAYS = {
    "none": lambda model, x: model.block(model.block(x)),
    "not reentrant": lambda model, x: checkpoint(model.block, model.block(x), use_reentrant=False),
    "both blocks": lambda model, x: model_of(model, x, [True, True]),
    "first block": lambda model, x: model_of(model, x, [True, None]),
    "last block": lambda model, x: model_of(model, x, [None, True]),
    "two kinds": lambda model, x: model_of(model, x, [False, True]),
    "one for both": lambda model, x: checkpoint(lambda y: model.block(model.block(y)), x, use_reentrant=True),
    "nested": lambda model, x: nested(model, True, True)(x),
    "the other kind within": lambda model, x: nested(model, True, False)(x),
    "within the other kind": lambda model, x: nested(model, False, True)(x),
}


def model_of(model, x, kinds):
    for kind in kinds:
        x = model.block(x) if kind is None else checkpoint(model.block, x, use_reentrant=kind)
    return x


def inputs():
    return torch.randn(2, 11, H, generator=torch.Generator().manual_seed(1))


def loss_of(model, x, out):
    return (out * x.roll(1, 0)).sum() + 3 * load_balancing_loss(model)


def gradients(model, factor=1.0, loss_of=loss_of, repeat=1):
    x = inputs().to(model.first.router.weight.device).requires_grad_()
    torch.manual_seed(2)  # of the router's noise
    loss = loss_of(model, x, model(x)) * factor
    for _ in range(repeat):
        loss.backward(retain_graph=repeat > 1)
    found = {"x": x.grad} | {name: each.grad for name, each in model.named_parameters()}
    return {"loss": loss.detach()} | {name: each / factor / repeat for name, each in found.items()}


def loads(model):
    return [layer.load_E.tolist() for layer in moe_layers(model).values()]


@pytest.mark.parametrize("way", WAYS)
def test_same_gradients_and_load(way):
    plain, model = Repeats("none"), Repeats(way)
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert loads(model) == loads(plain)
    without = gradients(Repeats("none"), loss_of=lambda model, x, out: (out * x.roll(1, 0)).sum())
    assert (gradients(Repeats(way))["first.router.weight"] - without["first.router.weight"]).abs().max() > 1e-2


@pytest.mark.parametrize("way", WAYS)
def test_without_the_state_of_generators_recomputations_use_the_routing_of_the_forward(way, monkeypatch):
    monkeypatch.setattr(f"{__name__}.checkpoint", functools.partial(checkpoint, preserve_rng_state=False))
    plain, model = Repeats("none"), Repeats(way)
    for each in (plain, model):
        each.second.router.jitter = 0.2
    for repeat in (1, 2):
        torch.testing.assert_close(gradients(model, repeat=repeat), gradients(plain, repeat=repeat))


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_of_the_loss_is_that_of_the_gradient(way):
    torch.testing.assert_close(gradients(Repeats(way), 2.0**16)["x"], gradients(Repeats(way))["x"])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["not reentrant", "both blocks", "nested"])
def test_same_gradients_and_load_on_a_gpu(way):
    """Backwards run on threads of autograd in this case."""
    plain, model = Repeats("none"), Repeats(way)
    for each in (plain, model):
        each.first.router.noise = 0.0  # which a GPU draws otherwise
    expected = gradients(plain)
    found = {name: each.cpu() for name, each in gradients(model.cuda()).items()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, check_dtype=False)  # stand-ins have others
    assert loads(model) == loads(plain)


def test_another_backward_through_the_same_graph():
    for repeat in (1, 2):
        found = gradients(Repeats("both blocks"), repeat=repeat)
        torch.testing.assert_close(found, gradients(Repeats("none"), repeat=repeat))


def test_a_loss_that_is_only_looked_at():
    loss_of = lambda model, x, out: (out * x.roll(1, 0)).sum()  # noqa: E731
    model = Repeats("both blocks")
    torch.testing.assert_close(gradients(model, loss_of=loss_of), gradients(Repeats("none"), loss_of=loss_of))
    with torch.no_grad():
        model(inputs())
    assert load_balancing_loss(model).item() > 0


def test_a_loss_that_the_checkpointed_function_returns():
    plain, model = Repeats("none"), Repeats("none")

    def run(x):
        out = model.block(x)
        return out, load_balancing_loss(model)

    def returned(_, x, __):
        out, balance = checkpoint(run, x, use_reentrant=True)
        return (out * x.roll(1, 0)).sum() + 3 * balance

    expected = lambda model, x, _: loss_of(model, x, model.block(x))  # noqa: E731
    torch.testing.assert_close(gradients(model, loss_of=returned), gradients(plain, loss_of=expected))


def test_a_loss_that_another_checkpointed_function_reads():
    def head(model, x, out):
        return checkpoint(lambda out: loss_of(model, x, out), out, use_reentrant=True)

    torch.testing.assert_close(gradients(Repeats("both blocks"), loss_of=head), gradients(Repeats("none")))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_backward_of_its_own_is_refused(is_first):
    model = Repeats("last block")
    out = model(inputs().requires_grad_())
    balance = load_balancing_loss(model)
    if not is_first:
        out.sum().backward()
    with pytest.raises(UnsupportedState, match="in the same backward as that of the checkpointed output, and before"):
        balance.backward()


class Copies:
    """Libraries have copies of torch's class."""

    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(context, run, x):
            context.run = run
            context.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(context, gradient):
            x = context.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = context.run(x)
            torch.autograd.backward(out, gradient)
            return None, x.grad


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has its qualified name since Python 3.11")
def test_copies_of_checkpointing(monkeypatch):
    copy = Copies.CheckpointFunction
    for function in (copy.forward, copy.backward):
        name = function.__qualname__.removeprefix("Copies.")
        function.__code__ = function.__code__.replace(co_qualname=name)
    copied = lambda model, x, _: loss_of(model, x, copy.apply(model.block, x))  # noqa: E731
    plain = lambda model, x, _: loss_of(model, x, model.block(x))  # noqa: E731
    torch.manual_seed(0)
    found, expected = (Repeats("none").eval() for _ in range(2))  # no noise: this copy draws another one
    torch.testing.assert_close(gradients(found, loss_of=copied), gradients(expected, loss_of=plain))


def test_around_a_compiled_layer_it_is_refused():
    layer = torch.compile(MoE(H, 8, E), backend="aot_eager")
    out = checkpoint(layer, inputs()[0].requires_grad_(), use_reentrant=True)
    with pytest.raises(UnsupportedState, match=r"around a compiled layer .* use_reentrant=False"):
        out.sum().backward()


def on_rank(group, use_reentrant, options):
    torch.manual_seed(0)
    matrix = np.array([[1, 1, 1, 0], [1, 0, 0, 1]])
    layer = MoE(H, 8, E, **options)
    hold(layer, group, matrix)
    x = inputs()[group.rank][: 7 + group.rank].requires_grad_()
    out = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    (out.square().sum() + 3 * layer.balance_loss).backward()
    sum_gradients([layer.router.weight], group)
    ExpertReducer([matrix], [layer.experts.weights.shape[1]], group.rank).reduce([layer.experts.weights.grad], group)
    found = {"x": x.grad, "router": layer.router.weight.grad, "experts": layer.experts.weights.grad}
    return found | {"load": torch.from_numpy(layer.load_E), "out": out.detach()}


def test_over_two_ranks(tmp_path):
    several = [{}, {"max_tokens": 8}, {"fp8_dispatch": True}]
    results = run_each(tmp_path, 2, on_rank, [(kind, options) for options in several for kind in (None, False, True)])
    for expected, *found in zip(*[results] * 3, strict=True):
        assert sum(expected[0]["load"].tolist()) == 2 * (7 + 8)
        for ranks in found:
            torch.testing.assert_close(ranks, expected)
