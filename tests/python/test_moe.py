"""The MoE layer on any placement equals plain loops over tokens and experts on one process."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from evermoe import MoE, load_balancing_loss
from evermoe._native import digest
from evermoe.comm.collectives import ExpertReducer
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.moe.layer import moe_layers
from support.ranks import members, run_each, run_ranks, sum_gradients

H, EXPERTS, BALANCE = 8, 5, 0.1
PLACEMENTS = {
    "one rank": [[1, 1, 1, 1, 1]],
    "all on both": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "split": [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
    "skewed": [[2, 1, 0, 0, 1], [0, 1, 1, 0, 0], [1, 0, 0, 2, 0]],
    "rank without experts": [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 3, 1]],
}
TOKENS = {1: [23], 2: [16, 7], 3: [9, 1, 13], 4: [6, 11, 0, 6]}
KINDS = [(1, False), (1, True), (2, False), (2, True)]


def make(top_k, gated, max_tokens=None, fp8_dispatch=False, **options):
    torch.manual_seed(0)
    inner = 6 if max_tokens is None else 8  # with rows of 16 bytes
    options |= {"max_tokens": max_tokens, "fp8_dispatch": fp8_dispatch}
    return MoE(H, inner, EXPERTS, top_k, gated=gated, **options)


def inputs(count, collapsed=False):
    """Tokens `[count, H]` and what the loss weighs each output with."""
    generator = torch.Generator().manual_seed(count)
    x, y = torch.randn(2, count, H, generator=generator)
    return (x.abs() + 0.1 if collapsed else x), y


def collapse(layer):
    """With positive tokens, all go to expert 3, then 1: the others get none."""
    with torch.no_grad():
        layer.router.weight.mul_(0.01)
        layer.router.weight[3] += 1
        layer.router.weight[1] += 0.5


def reference(layer, x, y):
    """Token by token, with autograd's gradients: outputs, gradients, balance loss and loads."""
    x = x.clone().requires_grad_()
    probabilities = (x @ layer.router.weight.T).softmax(-1)
    outputs, load = [], torch.zeros(EXPERTS)
    for token, chances in zip(x, probabilities, strict=True):
        best = sorted(range(EXPERTS), key=lambda e: -chances[e].item())[: layer.top_k]
        total = sum(chances[e] for e in best) if layer.top_k > 1 else 1.0
        sent = token + (in_8_bits(token) - token).detach() if layer.experts.fp8_dispatch else token
        outputs.append(sum(chances[e] / total * expert(layer, e, sent) for e in best))
        load[best] += 1
    balance = EXPERTS * (load / load.sum() * probabilities.mean(0)).sum()
    out = torch.stack(outputs)
    ((out * y).sum() / len(x) + BALANCE * balance).backward()
    grads = {"x": x.grad, "router": layer.router.weight.grad, "experts": layer.experts.weights.grad}
    return {"out": out.detach(), "balance": balance.detach(), "load": load.long(), **grads}


def in_8_bits(token):
    scale = token.detach().abs().max() / 448
    return (token.detach() / scale).to(torch.float8_e4m3fn).float() * scale


def expert(layer, e, token):
    parts = [view[e] for view in layer.experts.expert.views(layer.experts.weights).values()]
    if len(parts) == 3:
        return parts[2] @ (F.silu(parts[0] @ token) * (parts[1] @ token))
    return parts[1] @ F.silu(parts[0] @ token)


def hold(layer, group, matrix):
    """Leaves the layer with its rank's experts."""
    experts = layer.experts
    experts.ids = np.flatnonzero(matrix[group.rank]).tolist()
    experts.weights = nn.Parameter(experts.weights.detach()[experts.ids].clone())
    experts.group, experts.matrix_RE = group, matrix


def on_rank(group, kind, matrix, tokens, collapsed):
    matrix = np.array(matrix)
    layer = make(*kind)
    # Fills memory that is not written with NaN.
    torch.use_deterministic_algorithms(layer.experts.max_tokens is not None)
    if collapsed:
        collapse(layer)
    hold(layer, group, matrix)
    x, y = inputs(sum(tokens), collapsed)
    start = sum(tokens[: group.rank])
    mine = slice(start, start + tokens[group.rank])
    x = x[mine].clone().requires_grad_()
    out = layer(x)
    total = max(1, sum(tokens))
    share = len(x) / total
    ((out * y[mine]).sum() / total + BALANCE * share * layer.balance_loss).backward()
    sum_gradients([layer.router.weight], group)
    ExpertReducer([matrix], [layer.experts.weights.shape[1]], group.rank).reduce([layer.experts.weights.grad], group)
    grads = {"x": x.grad, "router": layer.router.weight.grad, "experts": layer.experts.weights.grad}
    found = {"out": out.detach(), "balance": share * layer.balance_loss.detach(), **grads}
    return found | {"load": torch.from_numpy(layer.tokens_E)}


def run(tmp_path, kind, name, tokens=None, collapsed=False):
    (found,) = run_kinds(tmp_path, [kind], name, tokens, collapsed)
    return found


def run_kinds(tmp_path, kinds, name, tokens=None, collapsed=False):
    """Yield what the ranks of a placement find with one kind of layer after the other."""
    matrix = PLACEMENTS[name]
    cases = [(kind, matrix, tokens or TOKENS[len(matrix)], collapsed) for kind in kinds]
    yield from run_each(tmp_path, len(matrix), on_rank, cases)


def check(results, matrix, expected):
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(torch.cat([r["out"] for r in results]), expected["out"], **close)
    torch.testing.assert_close(torch.cat([r["x"] for r in results]), expected["x"], **close)
    torch.testing.assert_close(sum(r["balance"] for r in results), expected["balance"], **close)
    for rank, result in enumerate(results):
        assert torch.equal(result["load"], expected["load"])
        assert torch.equal(result["router"], results[0]["router"])
        torch.testing.assert_close(result["router"], expected["router"], **close)
        torch.testing.assert_close(result["experts"], expected["experts"][np.flatnonzero(matrix[rank])], **close)
    for e in range(EXPERTS):
        hosts = [r for r in range(len(matrix)) if matrix[r][e]]
        rows = [results[r]["experts"][int(np.count_nonzero(matrix[r][:e]))] for r in hosts]
        assert all(torch.equal(row, rows[0]) for row in rows), f"replicas of expert {e}"


@pytest.mark.parametrize("name", PLACEMENTS)
def test_any_placement_equals_plain_loops(tmp_path, name):
    tokens = TOKENS[len(PLACEMENTS[name])]
    for kind, results in zip(KINDS, run_kinds(tmp_path, KINDS, name), strict=True):
        check(results, PLACEMENTS[name], reference(make(*kind), *inputs(sum(tokens))))
        assert int(results[0]["load"].sum()) == sum(tokens) * kind[0], "no token is dropped"


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_padded_exchange_equals_plain_loops(tmp_path, name):
    """Also with all tokens on one rank, for one expert: no buffer is too small."""
    kinds, ranks = [(*kind, 23) for kind in KINDS], len(PLACEMENTS[name])
    for tokens, collapsed in ((TOKENS[ranks], False), ([23] + [0] * (ranks - 1), True)):
        for kind, results in zip(kinds, run_kinds(tmp_path, kinds, name, tokens, collapsed), strict=True):
            layer = make(*kind)
            if collapsed:
                collapse(layer)
            check(results, PLACEMENTS[name], reference(layer, *inputs(sum(tokens), collapsed)))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_tokens_travel_in_8_bits(tmp_path, name):
    tokens = TOKENS[len(PLACEMENTS[name])]
    kinds = [(*kind, max_tokens, True) for kind in KINDS[1:3] for max_tokens in (None, 23)]
    for kind, results in zip(kinds, run_kinds(tmp_path, kinds, name), strict=True):
        expected = reference(make(*kind), *inputs(sum(tokens)))
        check(results, PLACEMENTS[name], expected)
        exact = reference(make(*kind[:3]), *inputs(sum(tokens)))
        assert 1e-4 < (exact["out"] - expected["out"]).abs().max() < 0.1, "they are rounded"


class Wrapper(nn.Module):
    """Around experts, as activation checkpointing is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return getattr(super().__getattr__("inner"), name) if name != "inner" else super().__getattr__(name)

    def forward(self, *tensors):
        assert torch.is_grad_enabled()
        with torch.no_grad():  # of what runs in here, autograd sees nothing
            return self.inner(*tensors)


@pytest.mark.parametrize("kind", ["plain", "wrapped", "another forward"])
def test_a_shared_expert_adds_its_output_and_has_its_gradient(kind):
    layer, (x, y) = make(2, True), inputs(23)
    layer.shared = nn.Sequential(nn.Linear(H, 12), nn.Dropout(0.5), nn.GELU(), nn.Linear(12, H))
    expected = copy.deepcopy(layer)
    if kind == "wrapped":
        layer.experts = Wrapper(layer.experts)
    elif kind == "another forward":
        layer.experts.forward = partial(type(layer.experts).forward, layer.experts)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    out = layer(ours)
    (out * y).sum().backward()
    torch.manual_seed(1)
    routes = expected.router(theirs)
    other = expected.experts(theirs, routes.ids_TK, routes.weights_TK) + expected.shared(theirs)
    assert torch.equal(out, other)
    (other * y).sum().backward()
    for mine, one in zip(layer.shared.parameters(), expected.shared.parameters(), strict=True):
        assert torch.equal(mine.grad, one.grad)
    if kind != "wrapped":
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(layer.experts.weights.grad, expected.experts.weights.grad)


def lose_after_the_plan(group, folder):
    """A member is lost while the shared expert computes."""
    layer = make(2, True)
    layer.shared = nn.Linear(H, H)
    own, transport = members(group, folder, 30)
    hold(layer, own, np.ones((2, EXPERTS), np.int64))
    x = inputs(9)[0][2 * group.rank :]  # with as many tokens on both, none would be exchanged
    out = layer(x)
    if group.rank == 0:
        layer.shared.register_forward_hook(lambda *_: own.drop("the test drops it"))
    with pytest.raises(PeerLost, match="all_to_all"):
        layer(x)
    layer.experts.group, layer.experts.matrix_RE = Group(), np.ones((1, EXPERTS), np.int64)
    layer.shared._forward_hooks.clear()
    torch.testing.assert_close(layer(x), out)
    transport.close()
    return True


def test_a_member_that_is_lost_while_a_shared_expert_computes(tmp_path):
    assert run_ranks(tmp_path, 2, lose_after_the_plan, str(tmp_path)) == [True, True]


class Regrouped(TorchDispatchMode):
    """Types and bytes of a row of all that is brought into another order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.evermoe.regroup.default:
            self.found.append((str(args[0].dtype), args[0].shape[1] * args[0].element_size(), args[2]))
        return func(*args, **kwargs or {})


def regrouped(group, fp8_dispatch):
    layer = MoE(256, 16, EXPERTS, fp8_dispatch=fp8_dispatch, dtype=torch.bfloat16)
    hold(layer, group, np.array(PLACEMENTS["all on both"]))
    with Regrouped() as forward:
        out = layer(torch.randn(9 - 2 * group.rank, 256, dtype=torch.bfloat16, requires_grad=True))
    with Regrouped() as backward:
        out.float().sum().backward()
    return {"forward": forward.found, "backward": backward.found}


def test_tokens_in_8_bits_are_brought_into_order_before_they_are_longer_again(tmp_path):
    out, back = ("torch.bfloat16", 512, False), ("torch.bfloat16", 512, True)
    for fp8_dispatch, first in ((False, out), (True, ("torch.uint8", 256 + 16, False))):
        for each in run_ranks(tmp_path, 2, regrouped, fp8_dispatch):
            assert each == {"forward": [first, back], "backward": [out, back]}


def exchanges_of_even_tokens(group):
    """Output in 8 bits of a rank with all experts, the same without a group, and the number of exchanges."""
    layer = MoE(256, 16, EXPERTS, fp8_dispatch=True)
    x = torch.randn(9, 256, requires_grad=True)
    alone = layer(x).detach()
    hold(layer, group, np.array(PLACEMENTS["all on both"]))
    count, all_to_all = [], group.all_to_all
    group.all_to_all = lambda *call: count.append(1) or all_to_all(*call)
    out = layer(x)
    out.sum().backward()
    group.all_to_all = all_to_all
    return out.detach(), alone, len(count)


def test_even_tokens_in_8_bits_stay_where_all_have_all_experts(tmp_path):
    for out, alone, exchanges in run_ranks(tmp_path, 2, exchanges_of_even_tokens):
        assert exchanges == 0
        torch.testing.assert_close(out, alone)


def test_more_tokens_than_the_layer_is_made_for():
    layer = make(2, False, max_tokens=4)
    layer(torch.randn(4, H))
    with pytest.raises(ValueError, match="expected at most max_tokens=4 tokens in a forward, got 5"):
        layer(torch.randn(5, H))
    with pytest.raises(ValueError, match="max_tokens >= 1 or None, got 0"):
        make(2, False, max_tokens=0)


@pytest.mark.parametrize("name", ["split", "skewed", "rank without experts"])
def test_experts_without_a_token(tmp_path, name):
    layer = make(2, False)
    collapse(layer)
    tokens = TOKENS[len(PLACEMENTS[name])]
    expected = reference(layer, *inputs(sum(tokens), True))
    assert expected["load"].tolist() == [0, sum(tokens), 0, sum(tokens), 0]
    check(run(tmp_path, (2, False), name, collapsed=True), PLACEMENTS[name], expected)


def close_to(found, expected):
    """Whether numbers in bfloat16 differ from those in float32 by what rounding explains."""
    found, expected = found.detach().float().cpu(), expected.float()
    return (found - expected).norm() <= 5e-2 * expected.norm()


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [3, 300])
def test_a_layer_in_bfloat16_equals_plain_loops(device, rows, gated, collapsed):
    """Experts without a token, of which three rows leave some, have gradients of zeros."""
    torch.manual_seed(0)
    layer = MoE(64, 128, EXPERTS, 2, gated=gated, dtype=torch.bfloat16)
    if collapsed:
        collapse(layer)
    x, y = torch.randn(2, rows, 64).bfloat16()
    x = x.abs() + 0.1 if collapsed else x
    expected = reference(copy.deepcopy(layer).float(), x.float(), y.float())
    layer, x = layer.to(device), x.to(device).requires_grad_()
    out = layer(x)
    ((out * y.to(device)).sum().float() / rows + BALANCE * layer.balance_loss).backward()
    assert layer.tokens_E.tolist() == expected["load"].tolist()
    assert close_to(out, expected["out"]) and close_to(x.grad, expected["x"])
    assert collapsed or close_to(layer.router.weight.grad, expected["router"])  # else it is too small
    found = layer.experts.weights.grad
    assert close_to(found, expected["experts"])
    idle = expected["load"] == 0
    assert idle.any() or (rows == 300 and not collapsed)
    assert not found[idle.to(device)].any() and found.isfinite().all()


def test_one_rank_has_all_the_tokens_or_none_has_any_and_the_same_again_has_the_same_bits(tmp_path):
    matrix, same = PLACEMENTS["skewed"], ((2, True), PLACEMENTS["skewed"], TOKENS[3], False)
    cases = [((2, True), matrix, [0, 8, 0], False), ((2, False), matrix, [0, 0, 0], False), same, same]
    one, none, first, second = run_each(tmp_path, 3, on_rank, cases)
    check(one, matrix, reference(make(2, True), *inputs(8)))
    for result in none:
        assert result["out"].shape == (0, H)
        assert not result["experts"].any()
        assert result["load"].tolist() == [0] * EXPERTS
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_no_tokens_at_all():
    layer = make(2, False)
    out = layer(torch.empty(0, H, requires_grad=True))
    assert out.shape == (0, H)
    (out.sum() + layer.balance_loss).backward()
    assert not layer.experts.weights.grad.any()
    assert layer(torch.empty(2, 0, H)).shape == (2, 0, H)


def train(group, matrix, steps):
    """Digests of the local experts, by id, along 200 steps."""
    matrix = np.array(matrix)
    layer = make(2, False)
    hold(layer, group, matrix)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    reducer = ExpertReducer([matrix], [layer.experts.weights.shape[1]], group.rank)
    generator = torch.Generator().manual_seed(group.rank)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(7, H, generator=generator)
        (layer(x) - x.roll(1, 1)).square().mean().backward()
        sum_gradients([layer.router.weight], group)
        reducer.reduce([layer.experts.weights.grad], group)
        optimizer.step()
        if step % 20 == 19:
            state = optimizer.state[layer.experts.weights]
            weights, moments = layer.experts.weights.detach(), [state["exp_avg"], state["exp_avg_sq"]]
            rows = zip(layer.experts.ids, weights, *moments, strict=True)
            found.append({e: digest(torch.cat(parts).numpy().view(np.uint8)) for e, *parts in rows})
    return found


def test_replicas_stay_equal_to_the_bit(tmp_path):
    matrix = PLACEMENTS["skewed"]
    results = run_ranks(tmp_path, 3, train, matrix, 200)
    for found in zip(*results, strict=True):
        for e in range(EXPERTS):
            assert len({digests[e] for digests in found if e in digests}) == 1
    assert len({found[0] for found in results[0]}) == 10, "the experts do change"


def test_shape_and_dtype_are_those_of_the_input():
    layer = make(2, True)
    x = torch.randn(3, 4, H)
    out = layer(x)
    assert out.shape == x.shape
    torch.testing.assert_close(layer(x.transpose(0, 1)), out.transpose(0, 1))
    half = make(2, True, dtype=torch.bfloat16)
    x = x.bfloat16().requires_grad_()
    out = half(x)
    assert out.dtype == torch.bfloat16
    (out.float().square().mean() + half.balance_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [x, *half.parameters()])


def test_router_noise_only_in_training():
    noisy, plain = make(1, False, router_noise=0.5), make(1, False)
    x = torch.randn(50, H)
    torch.manual_seed(1)
    first, second = noisy(x), noisy(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(noisy(x), first)
    noisy.eval()
    assert torch.equal(noisy(x), plain(x))


def test_expert_padding_is_zero_and_stays_out_of_the_result():
    layer = make(1, False)
    assert layer.experts.weights.shape[1] == 2 * 6 * H + -(2 * 6 * H) % 32
    odd = MoE(3, 5, 2)
    assert odd.experts.weights.shape == (2, 32)
    assert not odd.experts.weights[:, 30:].any()
    odd(torch.randn(9, 3)).sum().backward()
    assert not odd.experts.weights.grad[:, 30:].any()


def test_balance_loss_is_one_at_perfect_balance():
    model = nn.Sequential(make(1, False), make(2, True))
    for layer in moe_layers(model).values():
        with torch.no_grad():
            layer.router.weight.zero_()
    model(torch.randn(40, H))
    assert load_balancing_loss(model).item() == pytest.approx(1)
    assert list(moe_layers(model)) == ["0", "1"]


def test_balance_loss_needs_a_layer():
    with pytest.raises(ValueError, match=r"expected a model with evermoe\.MoE layers"):
        load_balancing_loss(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 4), "hidden=0"),
        ((4, 0, 4), "intermediate=0"),
        ((4, 4, 0), "num_experts=0"),
        ((4, 4, 4, 5), "1 <= top_k <= num_experts.*top_k=5"),
        ((4, 4, 4, 0), "top_k=0"),
    ],
)
def test_wrong_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        MoE(*arguments)


def test_wrong_noise():
    with pytest.raises(ValueError, match="router_noise >= 0, got -1"):
        MoE(4, 4, 4, router_noise=-1)


def test_wrong_width_of_the_input():
    with pytest.raises(ValueError, match=rf"expected \[\.\.\., {H}\], got \[{H}, {H + 1}\]"):
        make(1, False)(torch.randn(H, H + 1))  # as many numbers as H + 1 tokens have


def test_a_layer_by_itself_holds_everything():
    layer = make(2, False)
    assert layer.experts.ids == list(range(EXPERTS))
    assert isinstance(layer.experts.group, Group)
    assert "num_experts=5" in repr(layer)


def test_load_is_counted_over_all_forwards_in_training():
    layer = MoE(8, 8, 4, top_k=2)
    for rows in (3, 5):
        layer(torch.randn(rows, 8))
    layer.eval()
    layer(torch.randn(7, 8))
    assert (layer.load_E.sum(), layer.tokens_E.sum()) == (16, 14)


def test_unknown_token_split_is_refused():
    with pytest.raises(ValueError, match="token_split to be one of even, balanced, got 'fair'"):
        MoE(8, 8, 4, token_split="fair")
