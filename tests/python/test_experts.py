"""Experts with another router's choices equal plain loops over tokens and experts, on one rank and on three."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evermoe import Expert, Experts, MoE
from evermoe.comm.collectives import ExpertReducer
from evermoe.moe.expert import clamped_swiglu
from support.ranks import alone, run_each, run_ranks

H, INNER, EXPERTS, TOP_K = 8, 8, 5, 3
PLACEMENTS = {
    1: [[1, 1, 1, 1, 1]],
    3: [[1, 1, 0, 0, 1], [0, 1, 1, 0, 0], [1, 0, 0, 2, 0]],
}
TOKENS = {1: [15], 3: [9, 0, 6]}


def halved(both):
    first, second = both.chunk(2, -1)
    return first.relu() * second - 1


KINDS = {
    "plain": {"activation": F.relu},
    "plain, biases": {"activation": F.gelu, "bias": True},
    "gated": {"gated": True, "activation": torch.tanh},
    "fused": {"gated": True, "layout": "fused"},
    "fused activation": {"gated": True, "layout": "fused", "bias": True, "fused_activation": halved},
    "transposed": {"gated": True, "transposed": True, "bias": True},
    "llama-4": {"gated": True, "layout": "fused", "transposed": True, "weighted": "inputs"},
    "gpt-oss": {
        "gated": True,
        "layout": "interleaved",
        "transposed": True,
        "bias": True,
        "gating": clamped_swiglu,
    },
    "post-norm": {"gated": True, "layout": "fused"},
}


def make(kind="gated", inner=INNER, **options):
    torch.manual_seed(0)
    norm = nn.RMSNorm(H) if kind == "post-norm" else None
    return Experts(Expert(H, inner, **KINDS[kind]), EXPERTS, post_norm=norm, **options)


def feed_forward(layer, expert, token):
    """Return one expert's result for one token, by the models' own formulas."""
    kind = layer.expert
    part = {name: view[expert] for name, view in kind.views(layer.weights).items()}

    def linear(x, name):
        matrix = part[name].T if kind.transposed else part[name]
        return matrix @ x + part.get(f"{name}_bias", 0)

    if not kind.gated:
        return linear(kind.activation(linear(token, "up")), "down")
    if kind.layout == "separate":
        return linear(kind.activation(linear(token, "gate")) * linear(token, "up"), "down")
    both = linear(token, "gate_up")
    if kind.fused_activation:
        return linear(kind.fused_activation(both), "down")
    gate, up = (both[: len(both) // 2], both[len(both) // 2 :]) if kind.layout == "fused" else (both[::2], both[1::2])
    if kind.gating:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return linear((up + 1) * (gate * torch.sigmoid(gate * 1.702)), "down")
    return linear(kind.activation(gate) * up, "down")


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
                if layer.expert.weighted == "inputs":
                    row = row + feed_forward(layer, expert, weight * token)
                else:
                    out = feed_forward(layer, expert, token)
                    row = row + weight * (out if layer.post_norm is None else layer.post_norm(out))
        rows.append(row)
    out = torch.stack(rows)
    out.square().sum().backward()
    return {
        "out": out.detach(),
        "x": x_TH.grad,
        "scores": weights_TK.grad,
        "experts": layer.weights.grad,
        **norm(layer),
    }


def norm(layer):
    return {} if layer.post_norm is None else {"norm": {n: p.grad for n, p in layer.post_norm.named_parameters()}}


def on_rank(group, options, dtype=torch.int64, kind="gated", inner=INNER, wrap=None):
    layer = make(kind, inner, **options)
    matrix = np.array(PLACEMENTS[group.size])
    layer.ids = np.flatnonzero(matrix[group.rank]).tolist()
    layer.weights = nn.Parameter(layer.weights.detach()[layer.ids].clone())
    layer.group, layer.matrix_RE = group, matrix
    tokens = TOKENS[group.size]
    mine = slice(sum(tokens[: group.rank]), sum(tokens[: group.rank + 1]))
    x_TH, ids_TK, weights_TK = (each[mine].clone() for each in choices())
    x_TH.requires_grad_(), weights_TK.requires_grad_()
    out = (wrap(layer) if wrap else layer)(x_TH, ids_TK.to(dtype), weights_TK)
    out.square().sum().backward()
    ExpertReducer([matrix], [layer.weights.shape[1]], group.rank).reduce([layer.weights.grad], group)
    grads = {"x": x_TH.grad, "scores": weights_TK.grad, "experts": layer.weights.grad}
    return {"out": out.detach(), "load": layer.load_E.tolist(), "share": layer.share_E, **grads, **norm(layer)}


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_any_router(tmp_path, ranks):
    expected = reference(make(), *choices())
    ids_TK = choices()[1]
    load = torch.bincount(ids_TK[ids_TK >= 0], minlength=EXPERTS)
    cases = [({},), ({"max_tokens": 15},), ({"token_split": "even"},)]
    for results in run_each(tmp_path, ranks, on_rank, cases):
        for name in ("out", "x", "scores"):
            found = torch.cat([each[name] for each in results])
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)
        for each, row in zip(results, PLACEMENTS[ranks], strict=True):
            torch.testing.assert_close(each["experts"], expected["experts"][np.flatnonzero(row)], rtol=1e-4, atol=1e-6)
            assert each["load"] == load.tolist()
            torch.testing.assert_close(each["share"].double(), load / load.sum().double())


def with_all_experts(group, tokens_R, options, is_compiled=False):
    """A rank that has all experts: what it computes, and how often it exchanges tokens."""
    exchanges, all_to_all = [], group.all_to_all
    group.all_to_all = lambda *call: exchanges.append(1) or all_to_all(*call)
    layer = make(**options)
    layer.group, layer.matrix_RE = group, np.ones((group.size, EXPERTS), np.int64)
    run = torch.compile(layer, fullgraph=True, backend="eager") if is_compiled else layer
    mine = slice(sum(tokens_R[: group.rank]), sum(tokens_R[: group.rank + 1]))
    x_TH, ids_TK, weights_TK = (each[mine].clone() for each in complete_choices(sum(tokens_R)))
    x_TH.requires_grad_(), weights_TK.requires_grad_()
    out = run(x_TH, ids_TK, weights_TK)
    out.square().sum().backward()
    group.all_reduce(layer.weights.grad)
    count = len(exchanges)
    group.all_to_all = all_to_all
    return (
        {"out": out.detach(), "x": x_TH.grad, "scores": weights_TK.grad},
        layer.weights.grad,
        layer.load_E.tolist(),
        count,
    )


def complete_choices(tokens):
    generator = torch.Generator().manual_seed(tokens)
    ids_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return torch.randn(tokens, H, generator=generator), ids_TK, torch.rand(tokens, TOP_K, generator=generator)


def test_ranks_with_all_experts_and_as_many_tokens_exchange_none(tmp_path):
    cases = [([6, 6], {}), ([6, 6], {}, True), ([6, 5], {}), ([6, 6], {"token_split": "even"})]
    for (tokens_R, *_), results, wanted in zip(
        cases, run_each(tmp_path, 2, with_all_experts, cases), [0, 0, 4, 4], strict=True
    ):
        choices_TK = complete_choices(sum(tokens_R))
        expected = reference(make(), *choices_TK)
        for name in ("out", "x", "scores"):
            torch.testing.assert_close(
                torch.cat([each[0][name] for each in results]), expected[name], rtol=1e-4, atol=1e-6
            )
        for _, experts, load_E, exchanges in results:
            assert exchanges == wanted
            assert load_E == torch.bincount(choices_TK[1].flatten(), minlength=EXPERTS).tolist()
            torch.testing.assert_close(experts, expected["experts"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", [INNER, 6])  # with 6, rows are no multiples of 16 bytes: the products go one by one
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gated"])
def test_any_expert_on_one_rank(kind, inner):
    check([alone(on_rank, {}, torch.int64, kind, inner)], reference(make(kind, inner), *choices()))


def test_any_expert_on_three_ranks(tmp_path):
    kinds = ["fused activation", "llama-4", "gpt-oss", "post-norm"]
    cases = [(options, torch.int64, kind) for kind in kinds for options in ({}, {"max_tokens": 15})]
    for case, found in zip(cases, run_each(tmp_path, 3, on_rank, cases), strict=True):
        check(found, reference(make(case[-1]), *choices()))


def check(results, expected):
    for name, gradient in expected.get("norm", {}).items():
        gradients = [each["norm"][name] for each in results if each["norm"][name] is not None]
        torch.testing.assert_close(sum(gradients), gradient, rtol=1e-4, atol=1e-5)
    for name in ("out", "x", "scores"):
        torch.testing.assert_close(torch.cat([each[name] for each in results]), expected[name], rtol=1e-4, atol=1e-5)
    for each, row in zip(results, PLACEMENTS[len(results)], strict=True):
        torch.testing.assert_close(each["experts"], expected["experts"][np.flatnonzero(row)], rtol=1e-4, atol=1e-5)


def test_ids_of_32_bits():
    assert torch.equal(*(alone(on_rank, {}, dtype)["out"] for dtype in (torch.int64, torch.int32)))


def compiled(layer):
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("inner", [INNER, 6])
@pytest.mark.parametrize("kind", ["gated", "gpt-oss", "llama-4"])
def test_the_same_in_a_compiled_graph(kind, inner):
    found = []
    for is_compiled in (True, False):
        layer = make(kind, inner)
        x_TH, ids_TK, weights_TK = choices()
        x_TH.requires_grad_()
        out = (compiled(layer) if is_compiled else layer)(x_TH, ids_TK, weights_TK)
        out.square().sum().backward()
        found.append((out, x_TH.grad, layer.weights.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(*found)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_same_in_a_compiled_graph_over_three_ranks(tmp_path):
    """Some choices are of no expert: their rows are not sent."""
    found = run_ranks(tmp_path, 3, on_rank, {}, torch.int64, "gpt-oss", INNER, compiled)
    check(found, reference(make("gpt-oss"), *choices()))


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
    for options, message in [
        ({"hidden": 0}, "positive sizes, got hidden=0"),
        ({"activation": "gelu"}, "activation to be a function such as torch.nn.functional.gelu, got 'gelu'"),
        ({"intermediate": 0}, "intermediate=0"),
        ({"layout": "fused"}, "gated=True"),
        ({"gating": clamped_swiglu}, "gated=True"),
        ({"gated": True, "layout": "both"}, "layout to be one of separate, fused, interleaved, got 'both'"),
        ({"gated": True, "fused_activation": halved}, "with layout='fused'"),
        ({"weighted": "gradients"}, "weighted to be one of outputs, inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            Expert(**{"hidden": 4, "intermediate": 4} | options)
    with pytest.raises(ValueError, match=r"num_experts >= 1, got Expert\(.*\) and 0"):
        Experts(Expert(4, 4), 0)
    with pytest.raises(ValueError, match=r"an evermoe.Expert and num_experts >= 1, got 4 and 4"):
        Experts(4, 4)
    with pytest.raises(ValueError, match="expected fp8_dispatch=False"):
        make("llama-4", fp8_dispatch=True)
    with pytest.raises(ValueError, match="token_split to be one of even, balanced, got 'fair'"):
        make(token_split="fair")


def test_a_model_of_another_router_and_plain_layers_names_its_settings():
    model = nn.Sequential(nn.Linear(4, 4), Experts(Expert(4, 4, activation=F.gelu), 2, fp8_dispatch=True))
    from evermoe.moe.layer import layer_settings

    assert layer_settings(model) == ["activation=gelu, token_split=balanced, fp8_dispatch"]
    assert make("gpt-oss").settings() == (
        "gating=clamped_swiglu, layout=interleaved, gated, bias, transposed, token_split=balanced"
    )


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copy_after_a_forward(duplicate):
    layer = MoE(H, INNER, EXPERTS)
    x = choices()[0]
    expected = layer(x)
    twin = duplicate(layer)
    assert torch.equal(twin(x), expected)
    assert not twin.experts.group.is_elastic


def test_state_dict_warns_where_it_has_a_part_of_the_experts():
    layer = MoE(H, INNER, EXPERTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.state_dict()
    layer.experts.ids = [1, 3]
    layer.experts.weights = nn.Parameter(layer.experts.weights.detach()[:2].clone())
    with pytest.warns(
        UserWarning, match=r"state_dict\(\) has 2 of the 5 experts of layer 0.experts: .*evermoe.load_weights"
    ):
        nn.Sequential(layer).state_dict()
