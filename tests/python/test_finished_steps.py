"""With `Group.finishes_steps`, forward and backward run to their ends after a loss, whichever exchange it comes in."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from evermoe import Expert, Experts, MoE, load_balancing_loss
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from support.beats import BEATS, beat
from support.ranks import PATIENCE, run_ranks
from test_moe import hold

H, E, T = 8, 4, 6
PLACEMENT = [[1, 1, 1, 0], [0, 1, 0, 1]]


class OwnRouter(nn.Module):
    """Experts with a router that chooses without `torch.topk`, so that no choice of its is replaced."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = Experts(Expert(H, 7, gated=True), E)  # no grouped product takes it: shapes depend on each length

    def forward(self, x):
        scores = self.router(x).sigmoid()
        ids = scores.argsort(-1, descending=True)[:, :1]
        return self.experts(x, ids, scores.gather(-1, ids))


class Model(nn.Module):
    """Two blocks, of which checkpointing repeats the first: the zeros of one layer change the other one's scores."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = MoE(H, 16, E, **options), OwnRouter(), MoE(H, 16, E, **options)

    def repeated(self, x):
        x = beat(x + self.first(beat(x)))
        return x + self.second(beat(x))

    def forward(self, x, repeat=lambda model, x: model.repeated(x)):
        x = repeat(self, x)
        x = beat(x + self.third(x))
        return x.square().mean() + load_balancing_loss(self)


def fold(use_reentrant):
    return lambda model, x: checkpoint(model.repeated, x, use_reentrant=use_reentrant)


def graph(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def once(model, part):
    """Compile a part of the model at its first use."""
    if not hasattr(model, "compiled"):
        model.compiled = graph(part)
    return model.compiled


PLAIN = {
    "eager": ({}, lambda model, x: model(x)),
    "padded": ({"max_tokens": T}, lambda model, x: model(x)),
    "fp8": ({"fp8_dispatch": True}, lambda model, x: model(x)),
    "reentrant": ({}, lambda model, x: model(x, fold(True))),
    "not reentrant": ({}, lambda model, x: model(x, fold(False))),
    "padded, repeated": ({"max_tokens": T}, lambda model, x: model(x, fold(False))),
    "fp8, repeated": ({"fp8_dispatch": True}, lambda model, x: model(x, fold(False))),
}
GRAPHS = {
    "compiled": ({}, lambda model, x: once(model, Model.forward)(model, x)),
    "graph that repeats a part": ({}, lambda model, x: once(model, Model.forward)(model, x, fold(False))),
    "graph that is repeated": (
        {},
        lambda model, x: model(x, lambda model, x: checkpoint(once(model, model.repeated), x, use_reentrant=False)),
    ),
}
WAYS = PLAIN | GRAPHS


def step(group, folder, model, run, nth, exchanges=0):
    """Compute a step in which rank 0 is lost as its `nth` exchange begins; return the number of exchanges."""
    own = model.first.experts.group
    own.rebuild(dist.FileStore(f"{folder}/{nth}", group.size), group.rank, group.size, torch.device("cpu"), LIMIT)
    group.all_reduce(torch.zeros(1))  # all are connected
    begun = 0

    def count(name, on_stream):
        nonlocal begun
        begun += 1
        if begun == nth and group.rank == 0:
            own.drop("a test")

    own.on_begin = count
    BEATS.group, BEATS.count = group, 0
    model.zero_grad()
    for each in (model.first, model.second, model.third):
        each.experts.count.reset()
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(group.rank)).requires_grad_()
    loss = run(model, beat(x))
    loss.backward()
    assert bool(own.broken) == bool(nth)
    gradients = [x.grad, *(each.grad for each in model.parameters())]
    assert all(bool(each.isfinite().all()) for each in gradients)
    if 0 < nth < exchanges and not model.first.experts.matrix_RE.all():
        assert not model.first.experts.weights.grad.any(), "no exchange brings its gradient any more"
    group.all_reduce(torch.zeros(1))
    return begun


LIMIT = timedelta(seconds=PATIENCE / 2)


def at_each_exchange(group, folder, ways, matrix):
    found = {}
    for way in ways:
        options, run = WAYS[way]
        model, own = Model(**options), Group()
        own.finishes_steps = True
        for each in (model.first, model.second, model.third):
            hold(each, group, np.array(matrix))
            each.experts.group = own
        (place := folder / way.replace(" ", "")).mkdir(exist_ok=True)
        exchanges = step(group, place, model, run, 0)
        beats = BEATS.count
        for nth in range(1, exchanges + 1):
            try:
                step(group, place, model, run, nth, exchanges)
            except Exception as error:
                error.add_note(f"{way}: rank 0 is lost in exchange {nth} of {exchanges}")
                raise
            assert BEATS.count == beats, f"{way}, {nth}"
        found[way] = exchanges
        own.drop("the end")
    return found


@pytest.mark.parametrize("way", PLAIN)
def test_both_ranks_make_all_other_collectives(tmp_path, way):
    """An exception in one rank, or a collective that the other one does not make, fails the test."""
    found = run_ranks(tmp_path, 2, at_each_exchange, tmp_path, [way], PLACEMENT)
    assert found[0] == found[1]
    assert found[0][way] >= 3 * 3 + 1 + 1 + 3 * 2, "in the forwards of three layers, the loss, and the backwards"


def test_a_rank_without_experts(tmp_path):
    found = run_ranks(tmp_path, 2, at_each_exchange, tmp_path, ["eager", "not reentrant"], [[1] * E, [0] * E])
    assert found[0] == found[1]


def test_ranks_that_exchange_no_tokens(tmp_path):
    found = run_ranks(tmp_path, 2, at_each_exchange, tmp_path, ["eager", "not reentrant"], [[1] * E] * 2)
    assert found[0] == found[1] == {"eager": 3 + 2, "not reentrant": 3 + 2 + 2}, "those of the counts and the loss"


@pytest.mark.parametrize("matrix", [PLACEMENT, [[1] * E] * 2], ids=["exchanged", "kept"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) for way in GRAPHS])
@pytest.mark.timeout(400)
def test_in_a_graph(tmp_path, way, matrix):
    found = run_ranks(tmp_path, 2, at_each_exchange, tmp_path, [way], matrix)
    assert found[0] == found[1]


def zeros(group):
    """Rank 0 is lost in the backward, then the forward is repeated."""
    layer = MoE(H, 16, E)
    hold(layer, group, np.array(PLACEMENT))
    x = torch.randn(T, H, requires_grad=True)
    out = layer(x)
    assert out.any()
    group.all_reduce(torch.zeros(1))
    group.drop("a test")
    with pytest.raises(PeerLost, match="a test"):
        out.sum().backward(retain_graph=True)
    with pytest.raises(PeerLost, match="a test"):
        layer(x)
    group.finishes_steps = True
    layer.router.weight.requires_grad_(False)
    inputs = [x, layer.experts.weights]
    in_backward = torch.autograd.grad(out.sum(), inputs)
    out = layer(x)
    after = torch.autograd.grad(out.sum(), inputs)
    assert not any(bool(each.any()) for each in (out, *after, in_backward[1]))
    with pytest.raises(PeerLost, match="a test"):
        group.all_reduce(torch.zeros(1))
    group.broken, group.size = None, 1  # the test's own exchanges at the end have no group
    return True


def test_without_the_switch_a_loss_raises_and_with_it_gives_zeros(tmp_path):
    assert run_ranks(tmp_path, 2, zeros) == [True, True]
