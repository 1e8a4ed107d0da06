"""Every kind of router in a layer, on one rank and on three, equals plain loops over tokens: outputs and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evermoe import Expert, Experts, MoE, Router
from evermoe.comm.collectives import ExpertReducer
from evermoe.moe.layer import update_balance
from support.ranks import run_each, sum_gradients
from support.routers import best_ids

H, EXPERTS, BALANCE, VOCABULARY = 8, 8, 0.1, 50
PLACEMENTS = {
    1: [[1] * EXPERTS],
    3: [[2, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 2, 0, 0, 1, 0]],
}
TOKENS = {1: [23], 3: [9, 0, 14]}
V3 = {"top_k": 3, "scores": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "balance_rate": 0.5}
VARIANTS = {
    "softmax, normalised": {"top_k": 2},
    "softmax, not normalised": {"top_k": 3, "normalize": False},
    "softmax, the best one": {"top_k": 1, "normalize": False},
    "softmax over the chosen, bias": {"top_k": 4, "scores": "chosen", "bias": True},
    "softmax over the chosen, scale": {"top_k": 2, "scores": "chosen", "scale": 0.5},
    "sigmoid, normalised": {"top_k": 3, "scores": "sigmoid"},
    "sigmoid, not normalised": {"top_k": 2, "scores": "sigmoid", "normalize": False},
    "numbers for the choice alone": {"top_k": 2, "scores": "sigmoid", "balance_rate": 0.5},
    "numbers for the choice, softmax": {"top_k": 2, "balance_rate": 0.25},
    "groups, best expert, scale": {"top_k": 3, "normalize": False, "groups": 4, "top_groups": 2, "scale": 16.0},
    "groups, best two, numbers": V3,
    "one group, as a token stays on one node": V3 | {"top_groups": 1, "groups": 2},
    "jitter": {"top_k": 2, "jitter": 0.4},
    "noise": {"top_k": 2, "noise": 1.0},
    "jitter and noise, sigmoid": {"top_k": 3, "scores": "sigmoid", "jitter": 0.2, "noise": 0.5},
    "bfloat16 weights, scores in float32": {"top_k": 2, "dtype": torch.bfloat16},
    "hash": {"top_k": 3, "vocabulary": VOCABULARY, "hash_seed": 7},
    "hash, sigmoid, not normalised": {
        "top_k": 2,
        "scores": "sigmoid",
        "normalize": False,
        "vocabulary": VOCABULARY,
    },
    "identity experts": {"top_k": 3, "identity_experts": 3},
    "identity experts, softmax over the chosen": {"top_k": 3, "identity_experts": 2, "scores": "chosen"},
    "identity experts, sigmoid, scale": {"top_k": 2, "identity_experts": 4, "scores": "sigmoid", "scale": 2.0},
}


def make(variant):
    torch.manual_seed(3)
    router = Router(H, EXPERTS, **VARIANTS[variant])
    if router.balance is not None:
        router.balance.copy_(torch.randn(EXPERTS) * 0.1)
    return MoE.of(router, Experts(Expert(H, 6, gated=True), EXPERTS))


def inputs():
    """Tokens `[T, H]`, their numbers, and what the loss weighs each output with."""
    random = torch.Generator().manual_seed(4)
    x_TH, y_TH = torch.randn(2, 23, H, generator=random)
    return x_TH, torch.randint(VOCABULARY, (23,), generator=random), y_TH


def noise_of(router, tokens):
    """Factors of each token of a forward, and terms that are added to its logits: drawn rank by rank."""
    factors, summands = [], []
    for rank, count in enumerate(tokens):
        torch.manual_seed(50 + rank)
        jitter = router.jitter
        factors.append(torch.empty(count, H).uniform_(1 - jitter, 1 + jitter) if jitter else torch.ones(count, H))
        noise = torch.randn(count, router.out_features) * router.noise if router.noise else None
        summands.append(torch.zeros(count, router.out_features) if noise is None else noise)
    return torch.cat(factors), torch.cat(summands)


def choose(router, scores, number):
    """The ids of one token, best first."""
    if router.table is not None:
        return router.table[number].tolist()
    ids = best_ids(router, scores)
    return ids


def scores_of(router, logits_E):
    return logits_E.sigmoid() if router.scores == "sigmoid" else logits_E.softmax(-1)


def by_loops(layer, tokens):
    """Outputs, gradients, load, and the numbers after `update_balance`."""
    router = layer.router
    x_TH, numbers_T, y_TH = inputs()
    x_TH.requires_grad_()
    factors_TH, summands_TE = noise_of(router, tokens)
    views, rows, load, shares = layer.experts.expert.views(layer.experts.weights), [], torch.zeros(EXPERTS), []
    for token, factor_H, summand_E, number in zip(x_TH, factors_TH, summands_TE, numbers_T.tolist(), strict=True):
        logits_E = router.weight.float() @ (token * factor_H)
        if router.bias is not None:
            logits_E = logits_E + router.bias
        scores_E = scores_of(router, logits_E)
        shares.append(scores_E / scores_E.sum())
        logits_E = logits_E + summand_E
        scores_E = scores_of(router, logits_E)
        ids = choose(router, scores_E.tolist(), number)
        weights_K = logits_E[ids].softmax(-1) if router.scores == "chosen" else scores_E[ids]
        if router.scores != "chosen" and router.normalize:
            weights_K = weights_K / weights_K.sum()
        row = torch.zeros(H)
        for e, weight in zip(ids, weights_K * router.scale, strict=True):
            if e >= EXPERTS:
                row = row + weight * token
            else:
                inner = F.silu(views["gate"][e] @ token) * (views["up"][e] @ token)
                row = row + weight * (views["down"][e] @ inner)
                load[e] += 1
        rows.append(row)
    out_TH = torch.stack(rows)
    balance = EXPERTS * (load / load.sum() * torch.stack(shares).mean(0)[:EXPERTS]).sum()
    ((out_TH * y_TH).sum() / len(x_TH) + BALANCE * balance).backward()
    return {
        "out": out_TH.detach(),
        "x": x_TH.grad,
        "load": load,
        "experts": layer.experts.weights.grad,
        "balance loss": balance.detach(),
        **{f"router's {name}": p.grad for name, p in router.named_parameters()},
        "numbers": moved(router, load),
    }


def moved(router, load):
    if router.balance is None:
        return torch.zeros(EXPERTS)
    return router.balance + router.balance_rate * (load.mean() - load).sign()


def on_rank(group, variant, matrix, tokens):
    layer = make(variant)
    experts, router, matrix = layer.experts, layer.router, np.array(matrix)
    experts.ids = np.flatnonzero(matrix[group.rank]).tolist()
    experts.weights = nn.Parameter(experts.weights.detach()[experts.ids].clone())
    experts.group, experts.matrix_RE = group, matrix
    mine = slice(sum(tokens[: group.rank]), sum(tokens[: group.rank + 1]))
    x_TH, numbers_T, y_TH = (each[mine].clone() for each in inputs())
    x_TH.requires_grad_()
    torch.manual_seed(50 + group.rank)
    out_TH = layer(x_TH, numbers_T if router.vocabulary else None)
    share = len(x_TH) / sum(tokens)
    ((out_TH * y_TH).sum() / sum(tokens) + BALANCE * share * layer.balance_loss).backward()
    sum_gradients(list(router.parameters()), group)
    ExpertReducer([matrix], [experts.weights.shape[1]], group.rank).reduce([experts.weights.grad], group)
    load = torch.from_numpy(layer.load_E).float()
    update_balance(layer)
    return {
        "out": out_TH.detach(),
        "x": x_TH.grad,
        "load": load,
        "experts": experts.weights.grad,
        "balance loss": share * layer.balance_loss.detach(),
        **{f"router's {name}": p.grad for name, p in router.named_parameters()},
        "numbers": torch.zeros(EXPERTS) if router.balance is None else router.balance,
    }


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_a_layer_equals_plain_loops(tmp_path, ranks):
    cases = [(variant, PLACEMENTS[ranks], TOKENS[ranks]) for variant in VARIANTS]
    for variant, results in zip(VARIANTS, run_each(tmp_path, ranks, on_rank, cases), strict=True):
        check(results, by_loops(make(variant), TOKENS[ranks]), PLACEMENTS[ranks])


def check(results, expected, placement):
    close = {"rtol": 1e-4, "atol": 1e-5}
    for name in ("out", "x"):
        torch.testing.assert_close(torch.cat([each[name] for each in results]), expected[name], **close)
    torch.testing.assert_close(sum(each["balance loss"] for each in results), expected["balance loss"], **close)
    for each, row in zip(results, placement, strict=True):
        torch.testing.assert_close(each["experts"], expected["experts"][np.flatnonzero(row)], **close)
        for name in ("load", "numbers"):
            torch.testing.assert_close(each[name], expected[name], rtol=0, atol=1e-6)
        for name in (name for name in expected if name.startswith("router's")):
            is_rounded = expected[name].dtype == torch.bfloat16
            torch.testing.assert_close(
                each[name], expected[name], **({"rtol": 2e-2, "atol": 2e-3} if is_rounded else close)
            )


def test_the_variants_differ():
    """Each option does something: no two kinds give the same outputs."""
    outs = {name: by_loops(make(name), TOKENS[1])["out"] for name in VARIANTS}
    assert all(not torch.allclose(outs[one], outs[other]) for one in outs for other in outs if one < other)
