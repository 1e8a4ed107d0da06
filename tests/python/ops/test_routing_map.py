"""Routing maps to ids and weights, and the plain sum that goes with experts which apply the weights themselves."""

import pytest
import torch

from evermoe import ops
from support.tokens import make_ids


def draw(tokens, experts, most, device, seed=0, dtype=torch.float32):
    """A map with 0 to `most` experts for each token, and probabilities; NaN where the map is False."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=random)
    wanted = torch.randint(0, most + 1, (tokens, 1), generator=random)
    routing_map = scores.argsort(1).argsort(1) < wanted
    probabilities = torch.rand(tokens, experts, generator=random).to(dtype).masked_fill(~routing_map, torch.nan)
    return routing_map.to(device), probabilities.to(device)


def test_the_documented_example(device):
    routing_map = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]], device=device).bool()
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], device=device)
    ids, weights = ops.routing_map_to_ids(routing_map, probabilities)
    assert ids.tolist() == [[1, 3], [2, -1]]
    assert torch.equal(weights, torch.tensor([[0.2, 0.4], [0.7, 0.0]], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 1), (53, 7, 7), (64, 300, 8), (9, 5, 0)])
def test_it_is_a_loop_over_the_tokens(shape, dtype, device):
    tokens, experts, most = shape
    routing_map, probabilities = draw(tokens, experts, most, device, dtype=dtype)
    wide = min(experts, most + 2)
    for top_k in (None, wide):
        ids, weights = ops.routing_map_to_ids(routing_map, probabilities, top_k)
        width = max(1, int(routing_map.sum(1).max()) if tokens else 0) if top_k is None else wide
        assert ids.shape == weights.shape == (tokens, width)
        assert (ids.dtype, weights.dtype, ids.device) == (torch.int64, dtype, routing_map.device)
        for token in range(tokens):
            chosen = routing_map[token].nonzero().flatten().tolist()
            rest = width - len(chosen)
            assert ids[token].tolist() == chosen + [-1] * rest
            assert weights[token].tolist() == [float(probabilities[token, expert]) for expert in chosen] + [0.0] * rest
    assert torch.equal(ops.expert_histogram(ids, experts), routing_map.sum(0)), "counts, which stay on the device"


def test_gradients_go_to_the_chosen_probabilities(device):
    routing_map, _ = draw(6, 5, 3, device)
    probabilities = torch.rand(6, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: ops.routing_map_to_ids(routing_map, p, 4)[1], probabilities)
    ops.routing_map_to_ids(routing_map, probabilities, 4)[1].sum().backward()
    assert torch.equal(probabilities.grad, routing_map.double())


def test_a_layer_of_a_map_compiles_to_one_graph_with_dynamic_shapes(device):
    """As Megatron-Core has it: probabilities on the rows, a plain sum, counts on the device."""

    def layer(x, routing_map, probabilities):
        ids, weights = ops.routing_map_to_ids(routing_map, probabilities, 3)
        counts = ops.expert_histogram(ids, routing_map.shape[1])
        row_ids, positions = ops.dispatch_plan(ids, counts[:, None])
        rows = ops.permute(x, row_ids, positions) * weights.flatten()[row_ids][:, None]
        return ops.unpermute(rows * rows, positions), counts

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11, 64):
        routing_map, probabilities = draw(tokens, 5, 3, device, seed=tokens)
        results = []
        for run in (layer, compiled):
            x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
            p = probabilities.nan_to_num().requires_grad_()
            out, counts = run(x, routing_map, p)
            out.square().sum().backward()
            results.append((out, counts, x.grad, p.grad))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(eager, traced)


@pytest.mark.filterwarnings("ignore:.*double precision")
def test_a_plain_sum_has_the_gradient_of_a_copy(device):
    ids = make_ids(7, 3, 5).to(device)
    _, positions = ops.dispatch_plan(ids, ops.expert_histogram(ids, 5)[:, None])
    rows = torch.randn(21, 4, device=device, requires_grad=True)
    # It is linear, so that large steps lose nothing to float32.
    assert torch.autograd.gradcheck(lambda r: ops.unpermute(r, positions), rows, eps=1.0, atol=1e-5)
    ones = torch.ones(7, 3, device=device)
    assert torch.equal(ops.unpermute(rows, positions), ops.unpermute(rows, positions, ones))
    results = torch.library.opcheck(torch.ops.evermoe.unpermute.default, (rows.detach(), positions, None))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("routing_map: expected a tensor, got list", {"routing_map": [[True]]}),
        ("routing_map: expected bool .* got torch.int64", {"routing_map": torch.ones(2, 4, dtype=torch.int64)}),
        (r"routing_map: expected bool of shape \[T, E\].*\[4\]", {"routing_map": torch.ones(4, dtype=torch.bool)}),
        ("one expert or more", {"routing_map": torch.ones(2, 0, dtype=torch.bool)}),
        ("probabilities: expected a tensor, got NoneType", {"probabilities": None}),
        (r"probabilities: .* shape \[2, 4\] as routing_map.*\[2, 3\]", {"probabilities": torch.ones(2, 3)}),
        ("probabilities: expected floating-point .*int64", {"probabilities": torch.ones(2, 4, dtype=torch.int64)}),
        ("probabilities: expected a tensor on cpu", {"probabilities": torch.ones(2, 4, device="meta")}),
        ("top_k: expected 1 to the number of experts, 4, got 5", {"top_k": 5}),
        ("at most top_k = 2 experts for each token, got 3 for token 1", {"top_k": 2}),
        ("at most top_k = 0 experts", {"top_k": 0}),
    ],
)
def test_refusals_say_what_was_expected(message, change):
    routing_map = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1]]).bool()
    good = {"routing_map": routing_map, "probabilities": torch.ones(2, 4), "top_k": 3}
    with pytest.raises(RuntimeError, match=message):
        ops.routing_map_to_ids(**good | change)


def test_too_many_experts_of_a_token_are_left_out_where_values_are_not_read():
    routing_map, probabilities = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4)
    compiled = torch.compile(ops.routing_map_to_ids, fullgraph=True, backend="eager")
    assert compiled(routing_map, probabilities, 2)[0].tolist() == [[0, 1], [0, 1]]
