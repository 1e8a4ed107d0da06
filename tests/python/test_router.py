"""Routers of known models equal plain loops over tokens, alone and in a layer on three ranks."""

import math

import numpy as np
import pytest
import torch

import evermoe
from evermoe import Expert, Experts, MoE, Router
from evermoe.moe.layer import update_balance
from support.ranks import run_each
from support.routers import best_ids
from test_moe import PLACEMENTS, TOKENS, expert, hold

H, EXPERTS, T = 8, 8, 23
KINDS = {
    "mixtral": {"top_k": 2},
    "switch": {"top_k": 1, "normalize": False},
    "qwen3": {"top_k": 3, "normalize": False},
    "deepseek-v2": {"top_k": 3, "normalize": False, "groups": 4, "top_groups": 2, "scale": 16.0},
    "deepseek-v3": {
        "top_k": 3,
        "scores": "sigmoid",
        "groups": 4,
        "top_groups": 2,
        "scale": 2.5,
        "balance_rate": 0.5,
    },
    "sigmoid, not normalized": {"top_k": 2, "scores": "sigmoid", "normalize": False},
    "gpt-oss": {"top_k": 4, "scores": "chosen", "bias": True},
}


def make(kind, num_experts=EXPERTS, **options):
    torch.manual_seed(1)
    router = Router(H, num_experts, **KINDS[kind] | options)
    if router.balance is not None:
        router.balance.copy_(torch.randn(num_experts))
    return router


def draw(tokens=T):
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens))


def softmax(numbers):
    parts = [math.exp(number - max(numbers)) for number in numbers]
    return [part / sum(parts) for part in parts]


def chosen(router, token):
    """Ids and weights of one token, by the models' own words."""
    logits = (router.weight.detach().double() @ token.double()).tolist()
    if router.bias is not None:
        logits = [a + b for a, b in zip(logits, router.bias.tolist(), strict=True)]
    scores = [1 / (1 + math.exp(-logit)) for logit in logits] if router.scores == "sigmoid" else softmax(logits)
    ids = best_ids(router, scores)
    weights = softmax([logits[e] for e in ids]) if router.scores == "chosen" else [scores[e] for e in ids]
    if router.normalize:
        weights = [weight / sum(weights) for weight in weights]
    return ids, [weight * router.scale for weight in weights], [score / sum(scores) for score in scores]


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_those_of_plain_loops(kind):
    router, x_TH = make(kind), draw()
    routes = router(x_TH)
    expected = [chosen(router, token) for token in x_TH]
    assert routes.ids_TK.tolist() == [ids for ids, _, _ in expected]
    torch.testing.assert_close(routes.weights_TK, torch.tensor([weights for _, weights, _ in expected]))
    mean = np.mean([shares for _, _, shares in expected], axis=0)
    torch.testing.assert_close(routes.probabilities_E, torch.tensor(mean).float())
    routes.weights_TK.square().sum().backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()


def on_rank(group, kind, matrix, tokens):
    matrix = np.array(matrix)
    router = make(kind, 5, groups=1, top_groups=None)
    experts = router.out_features
    torch.manual_seed(0)
    layer = MoE.of(router, Experts(Expert(H, 6), experts))
    hold(layer, group, matrix[:, :experts])
    start = sum(tokens[: group.rank])
    mine = slice(start, start + tokens[group.rank])
    out = layer(draw(sum(tokens))[mine])
    update_balance(layer)
    return {"out": out.detach(), "load": layer.load_E.tolist(), "balance": router.balance}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_layer_with_such_a_router(tmp_path, ranks):
    kinds, name = ["deepseek-v3", "gpt-oss", "qwen3"], {1: "one rank", 3: "skewed"}[ranks]
    cases = [(kind, PLACEMENTS[name], TOKENS[ranks]) for kind in kinds]
    for kind, results in zip(kinds, run_each(tmp_path, ranks, on_rank, cases), strict=True):
        router = make(kind, 5, groups=1, top_groups=None)
        torch.manual_seed(0)
        layer = MoE.of(router, Experts(Expert(H, 6), 5))
        rows, load = [], [0] * router.out_features
        for token in draw(sum(TOKENS[ranks])):
            ids, weights, _ = chosen(router, token)
            rows.append(sum(weight * expert(layer, e, token) for e, weight in zip(ids, weights, strict=True)))
            for e in ids:
                load[e] += 1
        torch.testing.assert_close(
            torch.cat([each["out"] for each in results]), torch.stack(rows).detach(), rtol=1e-4, atol=1e-6
        )
        for each in results:
            assert each["load"] == load
            if router.balance is not None:
                moved = 0.5 * np.sign(np.mean(load) - np.array(load))
                torch.testing.assert_close(each["balance"], router.balance + torch.from_numpy(moved).float())


def test_identity_experts_return_the_token():
    torch.manual_seed(2)
    layer = MoE.of(Router(H, 4, 3, identity_experts=2), Experts(Expert(H, 6), 4), shared=torch.nn.Linear(H, H))
    x_TH, expected, load = draw(), [], [0] * 4
    for token in x_TH:
        scores = softmax((layer.router.weight.detach().double() @ token.double()).tolist())
        ids = sorted(range(6), key=lambda e: -scores[e])[:3]
        weights = [scores[e] / sum(scores[e] for e in ids) for e in ids]
        row = layer.shared(token)
        for e, weight in zip(ids, weights, strict=True):
            row = row + weight * (expert(layer, e, token) if e < 4 else token)
            if e < 4:
                load[e] += 1
        expected.append(row)
    assert sum(load) < 3 * T, "some identity experts were chosen"
    torch.testing.assert_close(layer(x_TH), torch.stack(expected), rtol=1e-4, atol=1e-6)
    assert layer.load_E.tolist() == load


def test_experts_by_the_tokens_numbers():
    layer = MoE.of(Router(H, EXPERTS, 3, vocabulary=50, hash_seed=7), Experts(Expert(H, 6), EXPERTS))
    table, numbers, x_TH = layer.router.table, torch.randint(50, (T,)), draw()
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert torch.equal(table, Router(H, EXPERTS, 3, vocabulary=50, hash_seed=7).table)
    assert not torch.equal(table, Router(H, EXPERTS, 3, vocabulary=50).table)
    expected = []
    for token, number in zip(x_TH, numbers.tolist(), strict=True):
        scores, ids = softmax((layer.router.weight.detach() @ token).tolist()), table[number].tolist()
        weights = [scores[e] / sum(scores[e] for e in ids) for e in ids]
        expected.append(sum(weight * expert(layer, e, token) for e, weight in zip(ids, weights, strict=True)))
    out = layer(x_TH.view(1, T, H), numbers.view(1, T))
    torch.testing.assert_close(out[0], torch.stack(expected), rtol=1e-4, atol=1e-6)
    for wrong in (None, numbers[1:], numbers.float()):
        with pytest.raises(ValueError, match="expected the numbers of 23 tokens for its vocabulary, got"):
            layer(x_TH, wrong)


def test_a_session_balances_after_each_step():
    torch.manual_seed(0)
    router = Router(H, 4, 1, scores="sigmoid", balance_rate=0.25)
    model = MoE.of(router, Experts(Expert(H, 8), 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.zeros(4)
    for step in evermoe.Session(model, optimizer, evermoe.ElasticSampler(64, 8), preset="auto").steps(5):
        with step:
            step.backward(model(draw(64)[step.indices]).square().mean())
            load_E = torch.from_numpy(model.load_E).double()
        expected += 0.25 * torch.sign(load_E.mean() - load_E).float()
        assert load_E.sum() == 8
    assert torch.equal(router.balance, expected)


def test_scores_are_in_float32_whatever_the_tokens():
    router = make("mixtral")
    x_TH = draw().bfloat16()
    expected = router(x_TH.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x_TH)
    assert torch.equal(found.ids_TK, expected.ids_TK) and torch.equal(found.weights_TK, expected.weights_TK)
    assert make("mixtral", dtype=torch.bfloat16)(x_TH).weights_TK.dtype == torch.float32


def test_noise_and_jitter_only_in_training():
    for options in ({"noise": 1.0}, {"jitter": 0.5}):
        router, x_TH = make("qwen3", **options), draw()
        assert not torch.equal(router(x_TH).weights_TK, router(x_TH).weights_TK)
        router.eval()
        assert torch.equal(router(x_TH).weights_TK, make("qwen3")(x_TH).weights_TK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "1 <= top_k"),
        (
            {"top_k": 3, "groups": 4, "top_groups": 1},
            "the experts of top_groups groups, got top_groups=1, groups=4, top_k=3",
        ),
        ({"top_k": 1, "groups": 3}, "groups that divide num_experts"),
        ({"top_k": 1, "groups": 2, "top_groups": 3}, "top_groups=3"),
        ({"top_k": 1, "scores": "tanh"}, "scores to be one of softmax, sigmoid, chosen, got 'tanh'"),
        ({"top_k": 1, "noise": -1.0}, "noise=-1"),
        ({"top_k": 1, "jitter": 1.0}, "0 <= jitter < 1"),
        ({"top_k": 1, "balance_rate": 0.0}, "balance_rate > 0 or None"),
        ({"top_k": 1, "identity_experts": -1}, "identity_experts >= 0"),
        ({"top_k": 1, "identity_experts": 2, "balance_rate": 0.1}, "none of them with groups, balance_rate"),
        ({"top_k": 1, "vocabulary": 0}, "vocabulary >= 1"),
        ({"top_k": 1, "vocabulary": 9, "balance_rate": 0.1}, "without top_groups and balance_rate"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Router(H, EXPERTS, **options)


def test_a_router_of_other_sizes_is_refused():
    with pytest.raises(
        ValueError, match="a router of hidden=8 and num_experts=4 as the experts are, got hidden=8 and n"
    ):
        MoE.of(Router(8, 5, 2), Experts(Expert(8, 8), 4))


def test_settings_name_what_is_unusual():
    assert make("mixtral").settings() == "top_k=2, router_noise=0.0"
    assert make("deepseek-v3").settings() == (
        "top_k=3, router_noise=0.0, scores=sigmoid, groups=4, top_groups=2, scale=2.5, balance_rate=0.5"
    )
