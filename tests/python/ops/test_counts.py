"""Counts of several layers, the split of tokens, and regrouping: against plain torch and the planners."""

import numpy as np
import pytest
import torch

from evermoe import ops, planning
from evermoe.ops.dispatch import expert_histograms, regroup_out
from evermoe.planning.load import LoadAverage
from support.tokens import COUNTS, draw_split, make_ids

raw = torch.ops.evermoe


# ---- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 7, 4096])
def test_layers_are_counted_each_for_itself(experts, device):
    shapes = [(0, 2), (1, 1), (53, 3), (7,), (5, 2, 3), ()]
    random = torch.Generator().manual_seed(experts)
    types = [torch.int32, torch.int64]
    layers = [torch.randint(-1, experts, s, generator=random).to(types[i % 2]) for i, s in enumerate(shapes)]
    layers.append(make_ids(70_001, 2, experts).t())  # not contiguous, more than one block
    counts = expert_histograms([ids.to(device) for ids in layers], experts)
    assert counts.dtype == torch.int64 and counts.device.type == device
    expected = [torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts) for ids in layers]
    assert torch.equal(counts.cpu(), torch.stack(expected))


def test_histograms_example(device):
    layers = [torch.tensor([[0, 2], [2, -1]], device=device), torch.tensor([1], device=device)]
    assert expert_histograms(layers, 3).tolist() == [[1, 0, 2], [0, 1, 0]]


def test_more_layers_than_one_launch_takes(device):
    layers = [make_ids(layer % 11, 2, 5, seed=layer).to(device) for layer in range(150)]
    assert torch.equal(expert_histograms(layers, 5), torch.stack([ops.expert_histogram(ids, 5) for ids in layers]))


def test_histograms_name_the_layer():
    ids = torch.tensor([0, 1])
    for layers, message in [
        ([], "one layer or more, got none"),
        ([ids, ids.float()], "layer 1: ids: expected int32 or int64, got float32"),
        ([ids, ids, torch.tensor([0, 9])], r"layer 2: ids\[1\].* = 9 is out of range.*num_experts = 2"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            expert_histograms(layers, 2)
    with pytest.raises(RuntimeError, match="num_experts: expected 1 to"):
        expert_histograms([ids], 0)


# ---- split of tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_split_is_the_planners(block, device):
    for seed in range(block * 50, block * 50 + 50):
        counts, replicas, rank = draw_split(seed)
        expected = planning.split_tokens(counts, replicas, rank, policy="even")
        found = ops.split_tokens(torch.from_numpy(counts).to(device), torch.from_numpy(replicas).to(device), rank)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), torch.from_numpy(theirs))


def test_split_example(device):
    counts, replicas = torch.tensor([[5, 0, 1]], device=device), torch.ones(3, 1, dtype=torch.int64, device=device)
    send, receive = ops.split_tokens(counts, replicas, 0)
    assert (send.tolist(), receive.tolist()) == ([[2, 2, 1]], [[2], [0], [0]])
    assert ops.split_tokens(counts, replicas, 2)[1].tolist() == [[1], [0], [1]]


def test_split_takes_strided_tensors_and_no_experts(device):
    counts, replicas, rank = draw_split(3)
    ours, theirs = torch.from_numpy(counts).to(device), torch.from_numpy(replicas).to(device)
    expected = ops.split_tokens(ours, theirs, rank)
    found = ops.split_tokens(ours.t().contiguous().t(), theirs.t().contiguous().t(), rank)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    send, receive = ops.split_tokens(ours[:0], theirs[:, :0], rank)
    assert (send.shape, receive.shape) == ((0, counts.shape[1]), (counts.shape[1], 0))


def test_split_names_what_is_wrong():
    counts, replicas = torch.tensor([[1, 7]]), torch.tensor([[0], [0]])
    for arguments, message in [
        ((counts, replicas, 0), "expert 0 has 8 tokens and no replica"),
        ((-counts, replicas, 0), "expert 0 has -1 tokens on rank 0"),
        ((counts << 60, replicas + 1, 0), r"more than 2\^61"),
        ((counts, replicas.t(), 0), r"replicas: expected shape \[2, 1\] as counts is \[1, 2\], got \[1, 2\]"),
        ((counts, replicas, 2), "rank: expected 0 or more and below 2, got 2"),
        ((counts, replicas, -1), "rank: expected 0 or more and below 2, got -1"),
        ((counts.int(), replicas, 0), "counts: expected int64, got int32"),
        ((counts[0], replicas, 0), r"counts: expected shape \[E, R\], got \[2\]"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.split_tokens(*arguments)


# ---- regrouping -------------------------------------------------------------------------------

ROW_TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.int64, torch.complex64, torch.float16]


def by_expert(counts):
    """Where the rows of the regrouped order come from: plainly sorted by (expert, source, place)."""
    sources, experts = counts.shape
    rows = [(e, r, i) for r in range(sources) for e in range(experts) for i in range(counts[r, e])]
    return torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), dtype=torch.int64)


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", [0, 1, 7, 32, 129])
def test_regroup(dtype, width, device):
    for counts in map(torch.tensor, COUNTS):
        order = by_expert(counts)
        rows = torch.arange(len(order) * width).view(len(order), width).to(dtype)
        ordered = ops.regroup(rows.to(device), counts.to(device))
        assert torch.equal(ordered.cpu(), rows[order])
        assert torch.equal(ops.regroup(ordered, counts.to(device), inverse=True).cpu(), rows)


def test_regroup_example(device):
    rows = torch.tensor([[ord(letter), 0] for letter in "abcdef"], dtype=torch.uint8, device=device)
    found = ops.regroup(rows, torch.tensor([[1, 2], [3, 0]], device=device))
    assert bytes(found[:, 0].tolist()) == b"adefbc"


def test_regroup_takes_bytes_in_pairs_and_strided_rows(device):
    counts = torch.tensor([[2, 1], [1, 3]], device=device)
    rows = torch.arange(14 * 5, device=device).view(14, 5).short()
    for strided in (rows[::2], rows[:7, 1:4], rows.t()[:, :7].contiguous().t(), rows.flatten()[1:36].view(7, 5)):
        assert torch.equal(ops.regroup(strided, counts), strided[by_expert(counts.cpu()).to(device)])
    with pytest.raises(RuntimeError, match="rows: expected an even number of bytes each, got 5"):
        ops.regroup(rows[:7].to(torch.uint8), counts)


def test_a_large_regroup(device):
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 500, (8, 16), generator=random)
    rows = torch.randint(0, 1 << 15, (int(counts.sum()), 300), dtype=torch.int16, generator=random)
    ordered = ops.regroup(rows.to(device), counts.to(device))
    assert torch.equal(ordered.cpu(), rows[by_expert(counts)])
    assert torch.equal(ops.regroup(ordered, counts.to(device), inverse=True).cpu(), rows)


@pytest.mark.parametrize("inverse", [False, True])
def test_the_gradient_goes_back(inverse, device):
    counts = torch.tensor(COUNTS[-1], device=device)
    rows = torch.randn(50, 6, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.randn(50, 6, dtype=torch.float64, device=device)
    (ops.regroup(rows, counts, inverse) * weights).sum().backward()
    assert torch.equal(rows.grad, ops.regroup(weights, counts, not inverse))
    assert torch.autograd.gradgradcheck(lambda rows: ops.regroup(rows, counts, inverse) ** 2, (rows,))


def test_regroup_out_fills_the_buffer_and_autograd_learns_of_it(device):
    counts, rows = torch.tensor(COUNTS[0], device=device), torch.randn(6, 3, device=device)
    out = torch.empty_like(rows)
    before = out._version
    assert regroup_out(rows, counts, False, out) is out
    assert out._version == before + 1 and torch.equal(out, ops.regroup(rows, counts))
    for call, message in [
        (lambda: regroup_out(rows, counts, False, rows), "out: expected memory of its own.*overlaps rows"),
        (lambda: regroup_out(rows, counts, False, out[:5]), r"out: expected float32 of shape \[6, 3\]"),
        (lambda: regroup_out(rows.clone().requires_grad_(), counts, False, out), "has no gradient"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_regroup_names_what_is_wrong():
    counts, rows = torch.tensor(COUNTS[0]), torch.randn(6, 3)
    for arguments, message in [
        ((rows[:5], counts), "counts add up to 6: expected 5, the number of rows"),
        ((rows[:, :0], counts + 1), "counts add up to 10: expected 6"),
        ((rows, counts - 1), r"counts\[1, 1\] = -1: expected 0 rows or more"),
        ((rows, counts.int()), "counts: expected int64, got int32"),
        ((rows, counts[0]), r"counts: expected shape \[R, e\], got \[2\]"),
        ((rows[0], counts), r"rows: expected shape \[N, H\], got \[3\]"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.regroup(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_wrong_values_on_a_gpu(device):
    rows = torch.ones(5, 3, device=device)
    assert ops.regroup(rows, torch.tensor([[1, -2], [2, 0]], device=device))[:, 0].tolist() == [1, 1, 1, 0, 0]
    counts, replicas = torch.tensor([[3, 1], [1, 7]]), torch.tensor([[1, 0], [1, 0]])
    send, _ = ops.split_tokens(counts.to(device), replicas.to(device), 0)
    assert send.tolist() == [[2, 1], [0, 0]]


# ---- torch's own checks -----------------------------------------------------------------------


def opcheck_cases(device):
    counts = torch.tensor(COUNTS[-1], device=device)
    rows = torch.randn(50, 6, device=device)
    ids = make_ids(7, 3, 5).to(device)
    return {
        "expert_histograms": ([ids, ids.int()[:2]], 5),
        "split_tokens": (counts.t().contiguous(), (counts + 1).contiguous(), 2),
        "regroup": (rows, counts, True),
        "regroup_out": (rows, counts, False, torch.empty_like(rows)),
    }


@pytest.mark.parametrize("name", list(opcheck_cases("cpu")))
def test_opcheck(name, device):
    results = torch.library.opcheck(getattr(raw, name).default, opcheck_cases(device)[name])
    assert set(results.values()) == {"SUCCESS"}


def test_compiles_to_one_graph_with_dynamic_shapes(device):
    def exchange(rows, ids, counts, replicas):
        ordered = ops.regroup(rows * 2, counts)
        send, receive = ops.split_tokens(expert_histograms([ids, ids], 3).t().contiguous(), replicas, 1)
        return ops.regroup(ordered.relu(), counts, inverse=True), send, receive

    torch._dynamo.reset()
    compiled = torch.compile(exchange, fullgraph=True, dynamic=True, backend="aot_eager")
    for each in (2, 3, 7):
        random = torch.Generator().manual_seed(each)
        counts = torch.randint(1, each + 1, (4, 3), generator=random).to(device)
        start = torch.randn(int(counts.sum()), 5, generator=random).to(device)
        ids, replicas = make_ids(each, 2, 3).to(device), torch.ones(2, 3, dtype=torch.int64, device=device)
        results = []
        for run in (exchange, compiled):
            rows = start.clone().requires_grad_()
            out, *split = run(rows, ids, counts, replicas)
            out.square().sum().backward()
            results.append((out.detach(), rows.grad, *split))
        assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))


# ---- load average -----------------------------------------------------------------------------


def test_the_average_is_right_from_the_first_step():
    average = LoadAverage(2, 3, half_life=7)
    assert not average.loads.any()
    average.add([[5, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(average.loads, [[5, 0, 1], [0, 0, 0]])
    for _ in range(50):
        average.add(np.array([[5, 0, 1], [2, 2, 2]]))
    np.testing.assert_allclose(average.loads, [[5, 0, 1], [2, 2, 2]], rtol=1e-14)


def test_training_continues_elsewhere_with_the_same_bits():
    random = np.random.default_rng(0)
    first = LoadAverage(3, 5, half_life=2.5)
    for step in range(30):
        if step == 11:
            second = LoadAverage(3, 5, half_life=2.5, state=first.state)
        tokens = random.integers(0, 100, (3, 5))
        first.add(tokens)
        if step >= 11:
            second.add(np.asfortranarray(tokens))
    assert first.state.tobytes() == second.state.tobytes()
    assert first.state.dtype == first.loads.dtype == np.float64
    assert repr(first) == "LoadAverage(3 layers, 5 experts)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LoadAverage(1, 2, half_life=0.5), "half_life: expected a finite number of steps, 1 or more"),
        (lambda: LoadAverage(1, 2, half_life="7"), "half_life: expected a number of steps, got '7'"),
        (lambda: LoadAverage(-1, 2, half_life=7), "layers: expected an integer from 0"),
        (lambda: LoadAverage(1, 2, half_life=7, state=[[1, 1]]), r"state: expected shape \[1, 2 \+ 1\]"),
        (lambda: LoadAverage(1, 1, half_life=7, state=[[1, 0]]), "no steps lead to the numbers of layer 0"),
        (lambda: LoadAverage(1, 2, half_life=7).add([[1, 2, 3]]), r"tokens: expected shape \[1, 2\]"),
        (lambda: LoadAverage(1, 2, half_life=7).add([[1, -2]]), "expert 1 of layer 0 has -2"),
        (lambda: LoadAverage(1, 2, half_life=7).add([[1, 0.5]]), "tokens: expected int64, got float64"),
    ],
)
def test_errors_of_the_average_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
