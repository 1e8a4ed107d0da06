"""`torch.compile(fullgraph=True)` of a model with MoE layers gives what the model gives without it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from evermoe import MoE, load_balancing_loss
from evermoe.errors import PeerLost
from evermoe.moe.layer import moe_layers
from support.ranks import run_ranks
from test_moe import PLACEMENTS, hold

WIDTH, EXPERTS = 16, 5
SAME, ROUNDED = {"rtol": 0, "atol": 0}, {"rtol": 2e-2, "atol": 2e-3}


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch._dynamo.reset()


def make(dtype=torch.float32, intermediate=32, fp8_dispatch=False):
    """Two layers, of which the second is gated."""
    torch.manual_seed(0)
    options = {"fp8_dispatch": fp8_dispatch}
    second = MoE(WIDTH, intermediate, EXPERTS, top_k=1, gated=True, **options)
    layers = [MoE(WIDTH, intermediate, EXPERTS, **options), nn.Tanh(), second]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers).to(dtype)


def make_inputs(tokens, dtype=torch.float32):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def results(model, run, inputs):
    """Outputs, losses, gradients and loads of a forward and a backward."""
    x = inputs.clone().requires_grad_()
    model.zero_grad()
    out = run(x)
    loss = out.float().square().mean() + load_balancing_loss(model)
    loss.backward()
    found = {"out": out.detach(), "loss": loss.detach(), "x": x.grad}
    found |= {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return found | {f"load {name}": torch.tensor(layer.load_E) for name, layer in moe_layers(model).items()}


def compare(model, compiled, inputs, eager=None, **close):
    expected = results(model, eager or model, inputs)
    before = {name: expected.pop(f"load {name}") for name in moe_layers(model)}
    found = results(model, compiled, inputs)
    for name, layer in moe_layers(model).items():
        assert torch.equal(found.pop(f"load {name}") - before[name], torch.tensor(layer.tokens_E)), "counted once"
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("fp8_dispatch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.few(1)
def test_same_bits_as_eager(dtype, fp8_dispatch):
    model = make(dtype, fp8_dispatch=fp8_dispatch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (6, 11, 17, 64):
        compare(model, compiled, make_inputs(tokens, dtype), **SAME)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_inductor_rounds_as_closely_as_eager(dtype):
    model = make(dtype)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else ROUNDED
    for tokens in (6, 17):
        compare(model, compiled, make_inputs(tokens, dtype), **close)


def test_sizes_that_no_grouped_product_takes():
    model = make(intermediate=7)
    compare(model, torch.compile(model, fullgraph=True, backend="aot_eager"), make_inputs(9), **SAME)


def opcheck_cases():
    layer, counts = MoE(WIDTH, 32, EXPERTS), torch.tensor([3, 1, 0, 4, 0])
    rows, splits = torch.randn(8, WIDTH, requires_grad=True), torch.tensor([[8], [8]])
    matrices, ends = torch.randn(EXPERTS, 32, WIDTH, requires_grad=True), counts.cumsum(0).int()
    odd = [each.detach()[..., :7].requires_grad_() for each in (rows, matrices)]
    return {
        "plan_exchange": (layer.experts._name, counts, EXPERTS, [2, 0, 0, 1], True),
        "send_rows": (layer.experts._name, rows, splits),
        "exchange_rows": (layer.experts._name, rows, splits, 8, True),
        "multiply": (rows, matrices, ends),
        "multiply of odd sizes": (*odd, ends),
        "multiply_backward": (torch.randn(8, 32), rows.detach(), matrices.detach(), ends),
    }, layer


@pytest.mark.parametrize("name", list(opcheck_cases()[0]))
def test_opcheck(name):
    cases, _layer = opcheck_cases()
    operator = getattr(torch.ops.evermoe, name.split()[0]).default
    assert set(torch.library.opcheck(operator, cases[name]).values()) == {"SUCCESS"}


@pytest.mark.long
def test_no_tokens():
    model = make()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 0):
        assert compiled(make_inputs(tokens)).shape == (tokens, WIDTH)


def test_autocast():
    model = make()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compare(model, torch.compile(run, fullgraph=True, backend="aot_eager"), make_inputs(8), eager=run, **ROUNDED)


def test_checkpointing_around_a_compiled_model():
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compare(model, lambda x: checkpoint(compiled, x, use_reentrant=False), make_inputs(8), **SAME)


def test_checkpointing_inside_a_compiled_model():
    model = make()
    run = lambda x: model[2:](checkpoint(model[:2], x, use_reentrant=False))  # noqa: E731
    compare(model, torch.compile(run, fullgraph=True, backend="aot_eager"), make_inputs(8), eager=run, **SAME)


def test_no_graph_breaks_with_torchs_defaults():
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compare(model, torch.compile(model, backend=counter), make_inputs(8), **SAME)
    assert counter.frame_count == 1


def test_equal_layers_share_a_graph():
    layers = [MoE(WIDTH, 32, EXPERTS) for _ in range(12)]
    counter = CompileCounter()
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    for layer in layers:
        layer(make_inputs(6))
        assert layer.tokens_E.sum() == 12
    assert counter.frame_count == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_counts_its_own_load(duplicate):
    layer = MoE(WIDTH, 32, EXPERTS)
    other = duplicate(layer)
    torch.compile(other, fullgraph=True, backend="eager")(make_inputs(6))
    assert (layer.tokens_E.sum(), other.tokens_E.sum()) == (0, 12)


def on_rank(group, matrix, tokens, backend, dtype):
    torch.manual_seed(0)
    layer = MoE(WIDTH, 32, EXPERTS, gated=True, dtype=dtype)
    hold(layer, group, np.array(matrix))
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        for count in (tokens[group.rank], 2 * tokens[group.rank] + 1):
            found.append(results(layer, run, make_inputs(count, dtype)))
            layer.experts.count.reset()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["skewed", "rank without experts"])
@pytest.mark.long
@pytest.mark.timeout(400)
def test_several_ranks(tmp_path, name, dtype):
    matrix = PLACEMENTS[name]
    for found in run_ranks(tmp_path, len(matrix), on_rank, matrix, [9, 2, 13, 6], "aot_eager", dtype):
        for eager, compiled in zip(found[:2], found[2:], strict=True):
            assert eager.keys() == compiled.keys()
            for key, value in eager.items():
                torch.testing.assert_close(compiled[key], value, **SAME, msg=lambda text, key=key: key + text)


def lose_a_peer(group):
    layer = MoE(WIDTH, 32, EXPERTS)
    hold(layer, group, np.ones((2, EXPERTS), np.int64))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(make_inputs(6 + 2 * group.rank).requires_grad_())
    before = group.size
    group.all_reduce(torch.zeros(1))
    group.drop("a test")
    for use in (lambda: out.sum().backward(), lambda: compiled(make_inputs(6))):
        with pytest.raises(PeerLost, match="a test"):
            use()
    group.broken, group.size = None, 1  # the test's own exchanges at the end have no group
    return torch.tensor(before)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_lost_peer_raises_the_same_error_as_without_compile(tmp_path):
    assert run_ranks(tmp_path, 2, lose_a_peer) == [2, 2]
