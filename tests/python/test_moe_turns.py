"""Members that run different forwards in an evaluation, for each kind of layer."""

import numpy as np
import pytest
import torch

from evermoe import Expert, Experts
from evermoe.errors import UnequalForwards
from evermoe.moe.forward_turns import Turns
from support.ranks import run_ranks

H, E = 128, 4
KINDS = {
    "plain": {},
    "after a norm": {"post_norm": torch.nn.RMSNorm(H)},
    "in 8 bits": {"fp8_dispatch": True},
    "padded": {"max_tokens": 8},
    "autocast": {"post_norm": torch.nn.LayerNorm(H)},
    "compiled": {},
    "compiled in 8 bits": {"fp8_dispatch": True},
}


def make(kind):
    torch.manual_seed(0)
    return Experts(Expert(H, 16), E, **KINDS[kind])


def spread(layer, group):
    """Gives each rank its half of the experts."""
    half = E // group.size
    layer.ids = list(range(group.rank * half, (group.rank + 1) * half))
    layer.weights = torch.nn.Parameter(layer.weights.detach()[layer.ids].clone())
    layer.group, layer.matrix_RE = group, np.kron(np.eye(group.size, dtype=np.int64), np.ones(half, np.int64))


def call(kind, layer):
    x_TH = torch.randn(5, H, generator=torch.Generator().manual_seed(1))
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]])
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if kind.startswith("compiled") else layer
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        return run(x_TH, ids_TK, torch.full((5, 2), 0.5))


def evaluate(group, kind):
    """Rank 0 runs two forwards of the first layer and one of the second, rank 1 one of the second alone."""
    first, second = make(kind), make(kind)
    for layer in (first, second):
        layer.eval()
        spread(layer, group)
    turns = Turns([first, second], group)
    turns.begin()
    found = [call(kind, first), call(kind, first)] if group.rank == 0 else []
    found.append(call(kind, second))
    turns.serve_all()
    turns.end()
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * kind.startswith("compiled")) for kind in KINDS]
)
def test_layers_serve_forwards_that_others_run_alone(tmp_path, kind):
    expected = call(kind, make(kind).eval())
    for rank in run_ranks(tmp_path, 2, evaluate, kind):
        for found in rank:
            torch.testing.assert_close(found, expected)


def leave_one_out(group):
    turns = Turns([], group)
    try:
        turns.meet() if group.rank == 1 else turns.serve_all()
    except UnequalForwards as error:
        return str(error)
    return ""


def test_member_that_is_not_met_is_named_on_all(tmp_path):
    found = run_ranks(tmp_path, 2, leave_one_out)
    assert found[0] == found[1]
    assert "rank 1 asked for the complete model" in found[0]
    assert "rank 0 left" in found[0]
