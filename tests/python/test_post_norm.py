"""A norm of the experts' outputs equals plain loops: it sees no padding, no empty expert and no token without experts.

Memory that nothing was written to is NaN here, so that a row of padding that counts would be seen.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import evermoe
from evermoe import Expert, Experts
from support.ranks import run_each, run_ranks

H, EXPERTS, TOP_K = 8, 5, 3
UNUSED = 4
"""An expert that no token chooses, with replicas of its own; the second rank of three has no other."""
PLACEMENTS = {1: [[1, 1, 1, 1, 1]], 3: [[1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 2, 0, 0]]}
WITHOUT_EXPERTS = [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 2, 0, 0]]
TOKENS = {1: [15], 3: [9, 0, 6]}


class NoEps(nn.Module):
    """A norm that has no derivative where all elements are zero."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.weight + self.bias


def layer_norm(eps):
    norm = nn.LayerNorm(H, eps=eps)
    nn.init.normal_(norm.bias)
    return norm


NORMS = {
    "RMSNorm": lambda: nn.RMSNorm(H),
    "LayerNorm": lambda: layer_norm(1e-5),
    "LayerNorm without eps": lambda: layer_norm(0.0),
    "without eps": lambda: NoEps(H),
    "two layers": lambda: nn.Sequential(nn.Linear(H, H), NoEps(H)),
}


def make(norm, dtype=torch.float32, **options):
    torch.manual_seed(0)
    expert = Expert(H, H, gated=True, bias=True)
    return Experts(expert, EXPERTS, post_norm=NORMS[norm](), **options).to(dtype)


def choices():
    """Tokens, their weights and experts: some have fewer, two have none; nobody chooses `UNUSED`."""
    random = torch.Generator().manual_seed(0)
    x_TH, logits_TE = torch.randn(15, H, generator=random), torch.randn(15, EXPERTS, generator=random)
    logits_TE[:, UNUSED] = -torch.inf
    weights_TK, ids_TK = logits_TE.softmax(-1).topk(TOP_K)
    ids_TK[3:5, 2] = ids_TK[7] = ids_TK[14] = -1
    return x_TH, ids_TK, weights_TK


def run(layer, x_TH, ids_TK, weights_TK, forward):
    x_TH, weights_TK = x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    out_TH = forward(layer, x_TH, ids_TK, weights_TK)
    out_TH.square().sum().backward()
    norm = {f"norm's {name}": p.grad for name, p in layer.post_norm.named_parameters()}
    return {"out": out_TH.detach(), "x": x_TH.grad, "scores": weights_TK.grad, "experts": layer.weights.grad} | norm


def by_loops(layer, x_TH, ids_TK, weights_TK):
    views = layer.expert.views(layer.weights)
    rows = []
    for token, ids, weights in zip(x_TH, ids_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros(H)
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                gate = views["gate"][expert] @ token + views["gate_bias"][expert]
                up = views["up"][expert] @ token + views["up_bias"][expert]
                down = views["down"][expert] @ (nn.functional.silu(gate) * up) + views["down_bias"][expert]
                row = row + weight * layer.post_norm(down)
        rows.append(row)
    return torch.stack(rows)


def on_rank(group, norm, options, matrix, is_compiled):
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    assert torch.empty(3).isnan().all()
    layer = make(norm, **options)
    layer.ids = np.flatnonzero(matrix[group.rank]).tolist()
    layer.weights = nn.Parameter(layer.weights.detach()[layer.ids].clone())
    layer.group, layer.matrix_RE = group, np.array(matrix)
    tokens = TOKENS[group.size]
    mine = slice(sum(tokens[: group.rank]), sum(tokens[: group.rank + 1]))
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    found = run(layer, *(each[mine].clone() for each in choices()), lambda _, *inputs: forward(*inputs))
    return found | {"ids": layer.ids}


def check(results, expected):
    for name in ("out", "x", "scores"):
        torch.testing.assert_close(torch.cat([each[name] for each in results]), expected[name], rtol=1e-4, atol=1e-5)
    for name in (name for name in expected if name.startswith("norm")):
        parts = [each[name] for each in results if each[name] is not None]
        torch.testing.assert_close(sum(parts), expected[name], rtol=1e-4, atol=1e-5)
    sums = torch.zeros_like(expected["experts"])
    for each in results:
        if each["ids"]:
            sums.index_add_(0, torch.tensor(each["ids"]), each["experts"])
    torch.testing.assert_close(sums, expected["experts"], rtol=1e-4, atol=1e-5)
    assert sums[UNUSED].abs().max() == 0


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_a_norm_sees_the_rows_of_tokens_alone(tmp_path, ranks):
    """Also with padding on each rank: `max_tokens=24`. A rank without experts has no gradient of the norm."""
    cases = [(norm, options, PLACEMENTS[ranks], False) for norm in NORMS for options in ({}, {"max_tokens": 24})]
    if ranks == 3:
        cases += [("LayerNorm", options, WITHOUT_EXPERTS, False) for options in ({}, {"max_tokens": 24})]
    for case, found in zip(cases, run_each(tmp_path, ranks, on_rank, cases), strict=True):
        expected = run(make(case[0]), *choices(), by_loops)
        if case[2] is WITHOUT_EXPERTS:
            expected["experts"][UNUSED] = 0
            assert found[1]["norm's weight"] is None  # the session makes it zeros
        check(found, expected)


@pytest.mark.parametrize("ranks", PLACEMENTS)
@pytest.mark.parametrize("norm", ["LayerNorm", "without eps"])
@pytest.mark.few(1)
def test_a_norm_in_a_compiled_graph(tmp_path, norm, ranks):
    expected = run(make(norm), *choices(), by_loops)
    check(run_ranks(tmp_path, ranks, on_rank, norm, {}, PLACEMENTS[ranks], True), expected)


@pytest.mark.parametrize("norm", ["RMSNorm", "without eps"])
def test_a_norm_without_any_tokens_has_finite_gradients(norm):
    layer = make(norm, max_tokens=24)
    ids_TK = torch.full((4, TOP_K), -1)
    out = layer(torch.randn(4, H), ids_TK, torch.rand(4, TOP_K))
    assert out.abs().max() == 0
    out.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in layer.parameters())


def test_a_norm_in_half_precision():
    full, half = make("without eps"), make("without eps", torch.bfloat16, max_tokens=24)
    x_TH, ids_TK, weights_TK = choices()
    expected = run(full, x_TH, ids_TK, weights_TK, by_loops)
    found = run(half, x_TH.bfloat16(), ids_TK, weights_TK, lambda layer, *inputs: layer(*inputs))
    assert found["out"].dtype == torch.bfloat16
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_a_norm_over_rows_is_refused(kind):
    with pytest.raises(ValueError, match=rf"post_norm to treat each row by itself, got {kind.__name__}"):
        evermoe.Experts(Expert(H, H), 2, post_norm=nn.Sequential(nn.Identity(), kind(H)))


def test_a_copy_of_a_layer_has_a_norm_of_its_own():
    layer = make("RMSNorm")
    other = copy.deepcopy(layer)
    assert other.post_norm.weight is not layer.post_norm.weight
