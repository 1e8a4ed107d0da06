"""Each op against plain torch, on the CPU and, where there is one, on a GPU: the same bodies for both."""

import gc
import mmap
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from evermoe import ops
from evermoe.ops.dispatch import expert_histograms, permute_out, regroup_out, unpermute_out
from support.tokens import make_ids

SLOW = [pytest.mark.long, pytest.mark.timeout(600)]
"""Of tests that compile C++: two minutes on a busy machine."""
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# tokens, choices, experts, columns, ranks: nothing, one, primes, one expert for all, rows past a block
SHAPES = [
    (0, 2, 3, 8, 1),
    (1, 1, 1, 1, 1),
    (7, 3, 5, 13, 2),
    (31, 2, 64, 257, 3),
    (64, 2, 4, 64, 4),
    (53, 1, 1, 32, 5),
]
raw = torch.ops.evermoe


def spread(ids, experts, ranks, seed=0):
    """Splits the count of each expert over the ranks, unevenly."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.zeros(experts, ranks, dtype=torch.int64)
    for expert in ids[ids >= 0].flatten().tolist():
        counts[expert, torch.randint(ranks, (), generator=random)] += 1
    return counts


def reference_plan(ids, send_counts):
    """int32, as for fewer than 2**31 slots."""
    slots = [(expert, slot) for slot, expert in enumerate(ids.flatten().tolist()) if expert >= 0]
    keyed = []
    for expert in range(send_counts.shape[0]):
        mine = iter([slot for e, slot in slots if e == expert])
        keyed += [(rank, expert, next(mine)) for rank, n in enumerate(send_counts[expert].tolist()) for _ in range(n)]
    order = [slot for _, _, slot in sorted(keyed)]
    row_ids = torch.tensor(order + [-1] * (ids.numel() - len(order)), dtype=torch.int64)
    positions = torch.full((ids.numel(),), -1)
    positions[row_ids[: len(order)]] = torch.arange(len(order))
    return row_ids.int(), positions.view(ids.shape).int()


def reference_permute(x, row_ids, top_k):
    rows = x[row_ids.clamp(min=0) // top_k]
    return rows * (row_ids >= 0)[:, None]


def reference_unpermute(rows, positions, weights=None):
    """In float32, in the order of k."""
    total = torch.zeros(positions.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    for k in range(positions.shape[1]):
        position = positions[:, k]
        term = rows[position.clamp(min=0)].float()
        factor = (position >= 0).float() if weights is None else weights[:, k].float() * (position >= 0)
        total = total + factor[:, None] * term
    return total.to(rows.dtype)


def case(shape, dtype, device, seed=0):
    tokens, top_k, experts, width, ranks = shape
    random = torch.Generator().manual_seed(seed)
    ids = make_ids(tokens, top_k, experts, seed=seed)
    row_ids, positions = ops.dispatch_plan(ids.to(device), spread(ids, experts, ranks).to(device))
    x = torch.randn(tokens, width, generator=random).to(dtype).to(device)
    weights = torch.rand(tokens, top_k, generator=random).to(device)
    return x, row_ids, positions, weights


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_histogram(shape, dtype, device):
    tokens, top_k, experts, _, _ = shape
    ids = make_ids(tokens, top_k, experts, dtype)
    counts = ops.expert_histogram(ids.to(device), experts)
    assert counts.dtype == torch.int64 and counts.device.type == device
    assert torch.equal(counts.cpu(), torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts))
    assert torch.equal(counts, ops.expert_histogram(ids.t().to(device), experts)), "not contiguous"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [*SHAPES, (70_001, 2, 64, 0, 8)])
def test_plan(shape, dtype, device):
    tokens, top_k, experts, _, ranks = shape
    ids = make_ids(tokens, top_k, experts, dtype)
    counts = spread(ids, experts, ranks) if tokens < 1000 else torch.zeros(experts, ranks, dtype=torch.int64)
    if tokens >= 1000:
        counts[:, 1] = 3
        counts[:, 5] = ops.expert_histogram(ids, experts) - 3
    row_ids, positions = ops.dispatch_plan(ids.to(device), counts.to(device))
    expected_rows, expected_positions = reference_plan(ids, counts)
    for ours, expected in ((row_ids, expected_rows), (positions, expected_positions)):
        assert ours.dtype == torch.int32 and torch.equal(ours.cpu(), expected)
    for wide in (False, True):
        rows, slots = (row_ids.long(), positions.long()) if wide else (row_ids, positions)
        inverse = raw.invert_positions(slots, rows.shape[0])
        assert inverse.dtype == slots.dtype and torch.equal(inverse, rows)


def test_plan_gives_the_documented_example(device):
    ids = torch.tensor([[1, 0], [1, -1], [1, -1]], device=device)
    row_ids, positions = ops.dispatch_plan(ids, torch.tensor([[0, 1], [2, 1]], device=device))
    assert row_ids.tolist() == [0, 2, 1, 4, -1, -1]
    assert positions.tolist() == [[0, 2], [1, -1], [3, -1]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_permute_and_unpermute(shape, dtype, device):
    x, row_ids, positions, weights = case(shape, dtype, device)
    rows = ops.permute(x, row_ids, positions)
    assert torch.equal(rows, reference_permute(x, row_ids, shape[1]))
    routed = int((row_ids >= 0).sum())
    assert torch.equal(ops.permute(x, row_ids[:routed], positions), rows[:routed]), "a prefix"
    assert torch.equal(ops.unpermute(rows, positions, weights), reference_unpermute(rows, positions, weights))
    assert torch.equal(ops.unpermute(rows[:routed], positions), reference_unpermute(rows, positions))
    same = weights.to(dtype)
    assert torch.equal(ops.unpermute(rows, positions, same), reference_unpermute(rows, positions, same))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_int64_gives_the_same(shape, dtype, device):
    x, row_ids, positions, weights = case(shape, dtype, device)
    wide_rows, wide_positions = row_ids.long(), positions.long()
    rows = ops.permute(x, row_ids, positions)
    assert torch.equal(ops.permute(x, wide_rows, wide_positions), rows)
    assert torch.equal(ops.unpermute(rows, wide_positions, weights), ops.unpermute(rows, positions, weights))
    ours = raw.unpermute_backward(x, rows, wide_positions, weights)
    expected = raw.unpermute_backward(x, rows, positions, weights)
    assert all(torch.equal(one, two) for one, two in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", ["float32", "same", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, dtype, weighted, device):
    x, row_ids, positions, weights = case(shape, dtype, device)
    weights = None if weighted == "none" else weights.to(torch.float32 if weighted == "float32" else dtype)
    inputs = [x] if weights is None else [x, weights]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)

    def run(permute, unpermute, inputs):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        rows = permute(inputs[0])
        rows.retain_grad()
        out = unpermute(rows, positions, inputs[1] if len(inputs) == 2 else None)
        out.backward(grad.to(out.dtype))
        return [rows.grad, *(tensor.grad for tensor in inputs)]

    ours = run(lambda x: ops.permute(x, row_ids, positions), ops.unpermute, inputs)
    wide = [tensor.double() for tensor in inputs]

    def plain_unpermute(rows, positions, weights):
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        taken = padded[torch.where(positions < 0, rows.shape[0], positions)]
        return (taken if weights is None else taken * weights[..., None]).sum(1)

    plain = run(lambda x: reference_permute(x, row_ids, shape[1]), plain_unpermute, wide)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for ours_grad, plain_grad, like in zip(ours, plain, [x, *inputs], strict=True):
        assert ours_grad.dtype == like.dtype
        torch.testing.assert_close(ours_grad.double(), plain_grad, rtol=tolerance, atol=tolerance)


def test_gradient_of_a_prefix_leaves_the_rest_out(device):
    x, row_ids, positions, _ = case((7, 2, 3, 5, 1), torch.float32, device)
    x.requires_grad_()
    ops.permute(x, row_ids[:4], positions).sum().backward()
    expected = torch.zeros(7, device=device).index_add_(0, row_ids[:4] // 2, torch.ones(4, device=device))
    assert torch.equal(x.grad, expected[:, None].expand(7, 5))


def opcheck_cases(device):
    x, row_ids, positions, weights = case((7, 3, 5, 13, 2), torch.float32, device)
    rows = ops.permute(x, row_ids, positions)
    ids = make_ids(7, 3, 5).to(device)
    counts = ops.expert_histogram(ids, 5)[:, None].contiguous()
    return {
        "expert_histogram": (ids, 5),
        "dispatch_plan": (ids, counts),
        "invert_positions": (positions, 21),
        "permute": (x, row_ids, positions),
        "permute_out": (x, row_ids, positions, torch.empty_like(rows)),
        "unpermute": (rows, positions, weights),
        "unpermute_out": (rows, positions, None, torch.empty_like(x)),
        "unpermute_backward": (x, rows, positions, weights),
        "unpermute_backward_out": (x, rows, positions, weights, torch.empty_like(rows), torch.empty_like(weights)),
    }


@pytest.mark.parametrize("name", list(opcheck_cases("cpu")))
def test_opcheck(name, device):
    results = torch.library.opcheck(getattr(raw, name).default, opcheck_cases(device)[name])
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_compiles_to_one_graph_with_dynamic_shapes(device, backend):
    def layer(x, ids, weights):
        counts = ops.expert_histogram(ids, 5)
        row_ids, positions = ops.dispatch_plan(ids, counts[:, None])
        rows = ops.permute(x, row_ids, positions)
        return ops.unpermute(rows * rows, positions, weights) + ops.unpermute(rows, positions)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (6, 11, 17, 64):
        results = []
        for run in (layer, compiled):
            random = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, 8, generator=random).to(device).requires_grad_()
            weights = torch.rand(tokens, 3, generator=random).to(device).requires_grad_()
            out = run(x, make_ids(tokens, 3, 5).to(device), weights)
            out.square().sum().backward()
            results.append((out, x.grad, weights.grad))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(eager, traced)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_compiled_out_variant(device, backend):
    def fill(x, row_ids, positions, out):
        permute_out(x, row_ids, positions, out)
        return out + 1

    x, row_ids, positions, _ = case((7, 3, 5, 13, 2), torch.float32, device)
    out = torch.empty(21, 13, device=device)
    result = torch.compile(fill, fullgraph=True, backend=backend)(x, row_ids, positions, out)
    assert torch.equal(result, ops.permute(x, row_ids, positions) + 1)
    assert torch.equal(out, ops.permute(x, row_ids, positions))


def test_out_variants_fill_the_buffer_and_autograd_learns_of_it(device):
    x, row_ids, positions, weights = case((7, 3, 5, 13, 2), torch.bfloat16, device)
    rows, back = torch.empty(21, 13, dtype=x.dtype, device=device), torch.empty_like(x)
    before = rows._version, back._version
    assert permute_out(x, row_ids, positions, rows) is rows
    assert unpermute_out(rows, positions, weights, back) is back
    assert (rows._version, back._version) == (before[0] + 1, before[1] + 1)
    assert torch.equal(rows, ops.permute(x, row_ids, positions))
    assert torch.equal(back, ops.unpermute(rows, positions, weights))
    grads = torch.empty_like(rows), torch.empty_like(weights)
    raw.unpermute_backward_out(x, rows, positions, weights, *grads)
    expected = raw.unpermute_backward(x, rows, positions, weights)
    assert all(torch.equal(one, two) for one, two in zip(grads, expected, strict=True))
    assert [grad._version for grad in grads] == [1, 1]
    saved = torch.ones_like(back, requires_grad=True) * back
    unpermute_out(rows, positions, None, back)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def refusals(device):
    x, row_ids, positions, weights = case((7, 3, 5, 13, 2), torch.float32, device)
    rows = ops.permute(x, row_ids, positions)
    ids = make_ids(7, 3, 5).to(device)
    counts = ops.expert_histogram(ids, 5)[:, None]
    big = torch.empty(100, 13, device=device)
    yield "ids: expected int32 or int64, got float32", lambda: ops.expert_histogram(x, 5)
    yield "num_experts: expected 1 to", lambda: ops.expert_histogram(ids, 0)
    yield r"ids: expected shape \[T, K\], got \[21\]", lambda: ops.dispatch_plan(ids.flatten(), counts)
    yield "send_counts: expected int64, got int32", lambda: ops.dispatch_plan(ids, counts.int())
    yield r"send_counts: expected shape \[E, R\]", lambda: ops.dispatch_plan(ids, counts[:, 0])
    yield "float32, bfloat16 or float16, got float64", lambda: ops.permute(x.double(), row_ids, positions)
    yield "row_ids: expected int32 or int64, got int16", lambda: ops.permute(x, row_ids.short(), positions)
    yield r"positions: expected shape \[T, K\] with T = 7", lambda: ops.permute(x, row_ids, positions[:3])
    yield (
        "weights: expected float32 or the rows' float32",
        lambda: ops.unpermute(rows, positions, weights.half()),
    )
    yield (
        r"weights: expected the shape of positions, \[7, 3\]",
        lambda: ops.unpermute(rows, positions, weights[:2]),
    )
    yield r"out: expected float32 of shape \[21, 13\]", lambda: permute_out(x, row_ids, positions, x)
    yield "out: expected a contiguous", lambda: permute_out(x, row_ids, positions, big[:42:2])
    yield "overlaps x", lambda: permute_out(big[:7], row_ids, positions, big[3:24])
    yield "no gradient", lambda: permute_out(x.clone().requires_grad_(), row_ids, positions, rows)
    yield (
        r"grad: expected float32 of shape \[7, 13\]",
        lambda: raw.unpermute_backward(rows, rows, positions, weights),
    )
    yield (
        "grad_weights: expected memory of its own, got a tensor that overlaps weights",
        lambda: raw.unpermute_backward_out(x, rows, positions, weights, rows.clone(), weights),
    )
    yield (
        r"grad_rows: expected float32 of shape \[21, 13\]",
        lambda: raw.unpermute_backward_out(x, rows, positions, weights, x, weights.clone()),
    )


@pytest.mark.parametrize("index", range(17))
def test_refusals_say_what_was_expected(index, device):
    message, call = list(refusals(device))[index]
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda bad, ids: ops.permute(bad, ids[0], ids)),
        ("positions", lambda bad, ids: ops.permute(torch.ones(2, 3), ids[0], bad)),
        ("x", lambda bad, ids: permute_out(bad, ids[0], ids, torch.ones(2, 3))),
        ("rows", ops.unpermute),
        ("rows", lambda bad, ids: unpermute_out(bad, ids, None, torch.ones(2, 3))),
        ("rows", ops.regroup),
        ("rows", lambda bad, ids: regroup_out(bad, ids, False, torch.ones(2, 3))),
        ("ids", lambda bad, ids: ops.expert_histogram(bad, 3)),
        ("ids", lambda bad, ids: expert_histograms(bad, 3)),
        ("ids", ops.dispatch_plan),
        ("counts", lambda bad, ids: ops.split_tokens(bad, ids, 0)),
    ],
)
@pytest.mark.parametrize("bad", [None, 5, torch.tensor(1.0)], ids=["None", "a number", "no dimension"])
def test_what_is_no_tensor_or_has_no_rows_is_named(name, call, bad):
    with pytest.raises(RuntimeError, match=name):
        call(bad, torch.tensor([[0], [1]]))


def test_permute_example(device):
    """Token 0 goes to experts 1 and 0, token 1 to 1 alone: its second slot is unrouted. And the gradients of that."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device, requires_grad=True)
    row_ids = torch.tensor([1, 0, 2], device=device)
    positions = torch.tensor([[1, 0], [2, -1]], device=device)
    weights = torch.tensor([[0.5, 0.25], [1.0, 7.0]], device=device, requires_grad=True)
    rows = ops.permute(x, row_ids, positions)
    assert rows.tolist() == [[1, 2], [1, 2], [3, 4]]
    out = ops.unpermute(rows * torch.tensor([[1.0], [10.0], [100.0]], device=device), positions, weights)
    assert out.tolist() == [[5.25, 10.5], [300, 400]]
    out.sum().backward()
    assert x.grad.tolist() == [[5.25, 5.25], [100, 100]]
    assert weights.grad.tolist() == [[30, 3], [700, 0]]


def test_bad_values_are_named_on_the_cpu():
    ids = torch.tensor([[0, 1], [2, 7]])
    with pytest.raises(RuntimeError, match=r"ids\[3\].* = 7 is out of range: expected -1 .*num_experts = 3"):
        ops.expert_histogram(ids, 3)
    with pytest.raises(RuntimeError, match="send_counts of expert 1 add up to 5: expected 1"):
        ops.dispatch_plan(ids[:1], torch.tensor([[1, 0], [2, 3]]))
    x, positions = torch.ones(2, 3), torch.tensor([[0], [1]])
    with pytest.raises(RuntimeError, match=r"row_ids\[1\] .* = 2 is out of range"):
        ops.permute(x, torch.tensor([0, 2]), positions)
    with pytest.raises(RuntimeError, match=r"positions\[0\] .* = -2 is out of range"):
        ops.unpermute(x, positions - 2)
    with pytest.raises(RuntimeError, match="positions name row 0 twice: for slot 0 and slot 1"):
        ops.unpermute(x.requires_grad_(), positions * 0, torch.ones(2, 1)).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_bad_values_count_as_unrouted_on_a_gpu(device):
    ids = torch.tensor([[0, 1], [2, 7]], device=device)
    assert ops.expert_histogram(ids, 3).tolist() == [1, 1, 1]
    row_ids, positions = ops.dispatch_plan(ids, torch.tensor([[1], [0], [3]], device=device))
    assert positions.tolist() == [[0, -1], [1, -1]] and row_ids.tolist() == [0, 2, -1, -1]
    rows = ops.permute(torch.ones(2, 3, device=device), torch.tensor([9, 1], device=device), positions)
    assert rows.tolist() == [[0] * 3, [1] * 3]
    with pytest.raises(RuntimeError, match="row_ids: expected a tensor on cuda:0"):
        ops.permute(torch.ones(2, 3, device=device), torch.tensor([0]), positions)


def test_offsets_past_2_to_the_31():
    """Rows of zeros that no memory backs, but for one at the end: elements at and past 2**31, in few pages."""
    width, tokens = 1 << 16, (1 << 15) + 3
    try:
        memory = mmap.mmap(-1, tokens * width * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        pytest.skip("no address space for 4 GiB")
    x = torch.frombuffer(memory, dtype=torch.bfloat16).view(tokens, width)
    x[-1] = torch.arange(width) % 100
    last = tokens - 1
    for index in (torch.int32, torch.int64):
        row_ids, positions = torch.tensor([last, 0, -1], dtype=index), torch.full((tokens, 1), -1, dtype=index)
        rows = ops.permute(x, row_ids, positions)
        assert torch.equal(rows[0], x[-1]) and not rows[1:].any()
        near = torch.tensor([[last, 1]], dtype=index)
        out = ops.unpermute(x, near, torch.tensor([[2.0, 1.0]]))
        assert torch.equal(out[0], 2 * x[-1])


def test_bits_do_not_depend_on_threads():
    def run():
        x, row_ids, positions, weights = case((20_011, 2, 8, 64, 2), torch.bfloat16, "cpu")
        x.requires_grad_()
        weights.requires_grad_()
        ops.unpermute(ops.permute(x, row_ids, positions), positions, weights).float().square().sum().backward()
        return row_ids, positions, x.grad, weights.grad

    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_freed_storage_is_refused():
    row_ids = torch.arange(4)
    for freed in range(2):
        arguments = [torch.ones(4, 2), torch.ones(4, 2)]
        arguments[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"shape \[4, 2\] whose storage was freed"):
            raw.permute_out(arguments[0], row_ids, row_ids[:, None], arguments[1])


def test_threads_get_their_own_messages():
    def work(thread):
        for bad in range(1000 * thread, 1000 * thread + 200):
            with pytest.raises(RuntimeError, match=rf"= {bad} is out of range"):
                ops.expert_histogram(torch.tensor([0, bad]), 5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))


def test_nothing_leaks():
    x, row_ids, positions, weights = case((64, 2, 4, 256, 2), torch.float32, "cpu")
    bad = torch.tensor([999])

    def loop(rounds):
        for _ in range(rounds):
            rows = ops.permute(x, row_ids, positions)
            ops.unpermute(rows, positions, weights)
            ops.unpermute(rows, positions)
            raw.unpermute_backward(x, rows, positions, weights)
            with pytest.raises(RuntimeError):
                ops.permute(x, bad, positions)
        gc.collect()

    loop(50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loop(2000)  # one leaked row buffer a round would be 256 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
