"""Experts with another router's choices equal plain loops over tokens and experts, on one rank and on three."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evermoe import Experts
from evermoe.comm.collectives import ExpertReducer
from support.ranks import run_ranks

H, INNER, EXPERTS, TOP_K = 8, 8, 5, 3
PLACEMENTS = {
    1: [[1, 1, 1, 1, 1]],
    3: [[1, 1, 0, 0, 1], [0, 1, 1, 0, 0], [1, 0, 0, 2, 0]],
}
TOKENS = {1: [15], 3: [9, 0, 6]}


def make(**options):
    torch.manual_seed(0)
    return Experts(H, INNER, EXPERTS, gated=True, activation=torch.tanh, **options)


def choices(seed=0):
    """Tokens, and what a sigmoid router without normalisation chooses; some tokens have fewer experts, or none."""
    random = torch.Generator().manual_seed(seed)
    x_TH, logits_TE = torch.randn(15, H, generator=random), torch.randn(15, EXPERTS, generator=random)
    weights_TK, ids_TK = logits_TE.sigmoid().topk(TOP_K)
    ids_TK[3:5, 2] = -1
    ids_TK[7] = -1
    return x_TH, ids_TK, weights_TK


def reference(layer, x_TH, ids_TK, weights_TK):
    """Outputs, and the gradients of their sum of squares."""
    x_TH, weights_TK = x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    rows = []
    for token, ids, weights in zip(x_TH, ids_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros(H)
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                gate, up, down = layer.weights[expert, : 3 * H * INNER].view(3, H, INNER)
                row = row + weight * (
                    down.view(H, INNER) @ (torch.tanh(gate.view(INNER, H) @ token) * (up.view(INNER, H) @ token))
                )
        rows.append(row)
    out = torch.stack(rows)
    out.square().sum().backward()
    return {"out": out.detach(), "x": x_TH.grad, "scores": weights_TK.grad, "experts": layer.weights.grad}


def on_rank(group, options, dtype=torch.int64):
    layer = make(**options)
    matrix = np.array(PLACEMENTS[group.size])
    layer.ids = np.flatnonzero(matrix[group.rank]).tolist()
    layer.weights = nn.Parameter(layer.weights.detach()[layer.ids].clone())
    layer.group, layer.matrix_RE = group, matrix
    tokens = TOKENS[group.size]
    mine = slice(sum(tokens[: group.rank]), sum(tokens[: group.rank + 1]))
    x_TH, ids_TK, weights_TK = (each[mine].clone() for each in choices())
    x_TH.requires_grad_(), weights_TK.requires_grad_()
    out = layer(x_TH, ids_TK.to(dtype), weights_TK)
    out.square().sum().backward()
    ExpertReducer([matrix], [layer.weights.shape[1]], group.rank).reduce([layer.weights.grad], group)
    grads = {"x": x_TH.grad, "scores": weights_TK.grad, "experts": layer.weights.grad}
    return {"out": out.detach(), "load": layer.load_E.tolist(), "share": layer.share_E, **grads}


@pytest.mark.parametrize("options", [{}, {"max_tokens": 15}, {"token_split": "even"}], ids=str)
@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_any_router(tmp_path, ranks, options):
    expected = reference(make(), *choices())
    ids_TK = choices()[1]
    load = torch.bincount(ids_TK[ids_TK >= 0], minlength=EXPERTS)
    results = run_ranks(tmp_path, ranks, on_rank, options)
    for name in ("out", "x", "scores"):
        torch.testing.assert_close(torch.cat([each[name] for each in results]), expected[name], rtol=1e-4, atol=1e-6)
    for each, row in zip(results, PLACEMENTS[ranks], strict=True):
        torch.testing.assert_close(each["experts"], expected["experts"][np.flatnonzero(row)], rtol=1e-4, atol=1e-6)
        assert each["load"] == load.tolist()
        torch.testing.assert_close(each["share"].double(), load / load.sum().double())


def test_ids_of_32_bits(tmp_path):
    found = [run_ranks(tmp_path, 1, on_rank, {}, dtype)[0]["out"] for dtype in (torch.int64, torch.int32)]
    assert torch.equal(*found)


def test_the_same_in_a_compiled_graph():
    layer = make()
    x_TH, ids_TK, weights_TK = choices()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x_TH, ids_TK, weights_TK), layer(x_TH, ids_TK, weights_TK))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, ids, weights: (x[:, 1:], ids, weights),
            r"expected tokens \[T, 8\] and ids \[T, K\], got \[15, 7\] and",
        ),
        (lambda x, ids, weights: (x[None], ids, weights), r"got \[1, 15, 8\] and \[15, 3\]"),
        (lambda x, ids, weights: (x, ids[1:], weights), r"got \[15, 8\] and \[14, 3\]"),
        (lambda x, ids, weights: (x, ids, weights[:, 1:]), r"weights of the ids' shape \[15, 3\], got \[15, 2\]"),
    ],
)
def test_wrong_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        make()(*change(*choices()))


def test_wrong_options():
    for arguments, message in [
        ((0, 4, 4), "hidden=0"),
        ((4, 0, 4), "intermediate=0"),
        ((4, 4, 0), "num_experts=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Experts(*arguments)
    with pytest.raises(ValueError, match="token_split to be one of even, balanced, got 'fair'"):
        make(token_split="fair")


def test_a_model_of_another_router_and_plain_layers_names_its_settings():
    model = nn.Sequential(nn.Linear(4, 4), Experts(4, 4, 2, activation=F.gelu, fp8_dispatch=True))
    from evermoe.moe import layer_settings

    assert layer_settings(model) == ["activation=gelu, token_split=balanced, fp8_dispatch"]
