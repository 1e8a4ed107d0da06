"""Waits of the host for a GPU in a forward: on the CPU counted with tensors that only say they are on one."""

import copy
import warnings
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from evermoe import Expert, Experts, MoE, Router
from evermoe.comm.group import Group
from evermoe.moe import exchange_planner
from evermoe.moe.token_exchange import Exchange, HostMemory, Padding
from support.paper_gpu import PaperGpu
from support.ranks import run_each, run_ranks
from test_moe import hold

E, H = 4, 16
PLACEMENTS = {1: [[1, 1, 1, 1]], 2: [[1, 1, 1, 0], [1, 0, 0, 1]]}


def pass_through(layer, x):
    """A forward and a backward, and what they have computed."""
    x = x.detach().requires_grad_()
    out = layer(x)
    yield
    (out.float().square().sum() + layer.balance_loss).backward()
    yield {"out": out.detach(), "x": x.grad} | {name: each.grad for name, each in layer.named_parameters()}


def waits(group, matrix, options, shared=False):
    torch.manual_seed(0)
    layer = MoE(H, 16, E, **options)
    if shared:
        layer.shared = torch.nn.Linear(H, H, dtype=options["dtype"])
    hold(layer, group, np.array(matrix))
    x = torch.randn(9 + group.rank, H, dtype=layer.router.weight.dtype)
    _, expected = pass_through(layer, x)
    tokens_E = layer.tokens_E
    layer.zero_grad()
    with (
        PaperGpu() as gpu,
        mock.patch.object(exchange_planner, "split_tokens", wraps=exchange_planner.split_tokens) as split,
    ):
        passes = pass_through(gpu.move(layer), gpu.tensor(x))
        next(passes)
        forward, backward, done = list(gpu.waits), gpu.waits, list(gpu.done)
        backward.clear()
        found = {name: each.value for name, each in next(passes).items()}
        backward = list(gpu.waits)
        gpu.waits.clear()
        counted = layer.load_E, layer.tokens_E
    return {
        "forward": forward,
        "before the wait": done[: done.index("wait")] if forward else [],
        "backward": backward,
        "found": found,
        "expected": expected,
        "tokens": tokens_E.tolist(),
        "total": counted[0].tolist(),
        "last": counted[1].tolist(),
        "to read": gpu.waits,
        "splits of the host": split.call_count,
    }


def run(tmp_path, ranks, *several, shared=False):
    """Yield options of a layer with what each rank has found with them."""
    cases = [(PLACEMENTS[ranks], options, shared) for options in several]
    for options, results in zip(several, run_each(tmp_path, ranks, waits, cases), strict=True):
        for found in results:
            torch.testing.assert_close(found["found"], found["expected"])
            assert found["total"] == [2 * tokens for tokens in found["tokens"]]
            assert found["last"] == found["tokens"]
            assert found["backward"] == []
            yield options, found


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_one_wait_a_layer_and_none_if_alone(tmp_path, ranks):
    several = [{"gated": gated, "dtype": dtype} for gated in (False, True) for dtype in (torch.float32, torch.bfloat16)]
    for options, found in run(tmp_path, ranks, *several):
        # In float32 experts are multiplied one by one, and the host must know their rows.
        is_quick = ranks == 1 and options["dtype"] == torch.bfloat16
        assert found["forward"] == ([] if is_quick else ["synchronize"])


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_the_gpu_has_work_while_the_host_waits(tmp_path, ranks):
    """Where the GPU plans the exchange, the rows for experts are launched before the host waits for their number."""
    several = [{"dtype": torch.float32, "token_split": "even", "fp8_dispatch": fp8} for fp8 in (False, True)]
    for _, found in run(tmp_path, ranks, *several, {"dtype": torch.float32} if ranks == 1 else several[0]):
        assert {"evermoe::dispatch_plan", "evermoe::permute"} <= set(found["before the wait"])


def test_the_gpu_computes_the_shared_expert_while_the_host_waits(tmp_path):
    several = [
        {"dtype": torch.bfloat16, "token_split": split, "fp8_dispatch": fp8}
        for split, fp8 in (("balanced", False), ("balanced", True), ("even", False))
    ]
    for _, found in run(tmp_path, 2, *several, shared=True):
        assert found["forward"] == ["synchronize"]
        assert "aten::addmm" in found["before the wait"], "that of the shared expert alone has a bias"


def test_the_gpu_splits_tokens_evenly_and_the_host_reads_how_many_in_its_one_wait(tmp_path):
    """Results and counts are those of the CPU, where the host splits them. A larger exchange has exact sizes."""
    several = [
        {"dtype": dtype, "token_split": split}
        for dtype in (torch.float32, torch.bfloat16)
        for split in ("even", "balanced")
    ]
    for options, found in run(tmp_path, 2, *several, {"dtype": torch.bfloat16, "max_tokens": 1 << 21}):
        assert found["forward"] == ["synchronize"]
        assert "token_split" not in options or found["splits of the host"] == (options["token_split"] == "balanced")


def numbers_of(exchange):
    found = vars(exchange.sizes) | vars(exchange)
    return {name: getattr(each, "value", each) for name, each in found.items() if "sizes" not in name}


def plan_both(group):
    """The exchange of a layer as the host plans it for the CPU, and as a GPU splits the tokens."""
    layer = MoE(H, 16, E, token_split="even").experts
    layer.group, found = group, []
    with PaperGpu() as gpu:
        for placement in ([[1, 1, 2, 0], [1, 0, 1, 1], [1, 0, 0, 3]], [[0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 1]]):
            layer.matrix_RE = np.array(placement)
            layer.ids = np.flatnonzero(layer.matrix_RE[group.rank]).tolist()
            counts_E = torch.randint(0, 50, (E,))
            each = layer.plan_exchange(counts_E), layer.plan_exchange(gpu.tensor(counts_E))
            found.append([numbers_of(exchange) for exchange in each])
        assert gpu.waits == ["synchronize"] * 2
    return found


def test_the_split_of_a_gpu_is_that_of_the_host_to_the_number(tmp_path):
    for found in run_ranks(tmp_path, 3, plan_both):
        for ours, theirs in found:
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
                assert same, name


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_no_wait_where_the_most_tokens_are_known(tmp_path, ranks):
    common = {"dtype": torch.bfloat16, "max_tokens": 12}
    for _, found in run(tmp_path, ranks, *({"gated": gated} | common for gated in (False, True))):
        assert found["forward"] == []
        assert found["to read"] == ["aten::_to_copy from the GPU"] * 2


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_tokens_in_8_bits_make_nobody_wait_once_more(tmp_path, ranks):
    common = {"dtype": torch.bfloat16, "fp8_dispatch": True}
    for options, found in run(tmp_path, ranks, *(common | {"max_tokens": most} for most in (None, 12))):
        assert found["forward"] == ["synchronize"] * (ranks > 1 and options["max_tokens"] is None)


ROUTERS = {
    "DeepSeek-V3": {"scores": "sigmoid", "groups": 2, "top_groups": 1, "scale": 2.0, "balance_rate": 0.1},
    "noise, jitter": {"noise": 0.1, "jitter": 0.1, "bias": True},
    "GPT-OSS": {"scores": "chosen"},
    "identity experts": {"identity_experts": 2},
    "hash": {"vocabulary": 11},
    "Llama-4": {"scores": "sigmoid", "normalize": False},
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_no_router_makes_the_host_wait(kind):
    options = ROUTERS[kind]
    expert = Expert(H, 16, gated=True, weighted="inputs" if kind == "Llama-4" else "outputs")
    layer = MoE.of(Router(H, E, 2, **options), Experts(expert, E, dtype=torch.bfloat16, post_norm=RMSNorm()))
    x, tokens = torch.randn(9, H), torch.arange(9) if "vocabulary" in options else None
    with PaperGpu() as gpu:
        if layer.router.balance is not None:
            layer.router.balance = gpu.tensor(layer.router.balance)
        if layer.router.table is not None:
            layer.router.table, tokens = gpu.tensor(layer.router.table), gpu.tensor(tokens)
        out = gpu.move(layer)(gpu.tensor(x), tokens)
        (out.square().sum() + layer.balance_loss).backward()
        assert gpu.waits == []


class RMSNorm(torch.nn.Module):
    """Without weights."""

    def forward(self, x_NH):
        return x_NH * (x_NH.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "to another": lambda x: torch.zeros(3).copy_(x),
    "from another": lambda x: x.copy_(torch.zeros(3)),
    "bincount": lambda x: x.bincount(),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask, written": lambda x: x.index_put_([x > 0], x.clone()),
    "index on the CPU": lambda x: torch.ops.aten.index(x, [torch.tensor([1])]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x.double(), x.double()),
    "grouped_mm": lambda x: torch.nn.functional.grouped_mm(
        x.float().repeat(4, 4), x.float().repeat(3, 12, 4), offs=x.cumsum(0).to(torch.int32)
    ),
    "an event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "a device": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_is_noticed(name):
    with PaperGpu() as gpu:
        WAITS[name](gpu.tensor(torch.tensor([1, 2, 5])))
    assert len(gpu.waits) >= 1


def test_values_that_were_not_waited_for_are_not_visible():
    with PaperGpu() as gpu:
        x = gpu.tensor(torch.arange(3))
        to = torch.empty(3, dtype=torch.int64, pin_memory=True)
        to.copy_(x, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        assert (to.tolist(), gpu.waits) == ([-1] * 3, [])
        event.synchronize()
        assert (to.tolist(), gpu.waits) == ([0, 1, 2], ["synchronize"])


@pytest.mark.gpu
def test_values_that_the_host_has_read_are_visible():
    memory, place = HostMemory(), 0
    for numbers in (torch.arange(6).view(2, 3), torch.arange(7, 11), torch.rand(3)):
        read = memory.begin_read(numbers.cuda())()
        assert (read == numbers.numpy()).all()
        assert read.dtype == numbers.numpy().dtype
        assert (read.ctypes.data == place) == (numbers.shape == (4,)), "memory that is large enough is used again"
        place = read.ctypes.data
    twin = copy.deepcopy(memory)
    assert twin.begin_read(numbers.cuda())().ctypes.data != place
    assert memory.begin_read(numbers)().ctypes.data == numbers.data_ptr(), "on the CPU it is read where it is"


@contextmanager
def watched(mode):
    """CUDA's own count: an exception or a warning for each wait of the host."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def counted():
    """Return the waits of the host: those that CUDA's own count warns of, and events, which it leaves out."""
    found, synchronize = [], torch.cuda.Event.synchronize

    def wait(event):
        found.append("an event")
        synchronize(event)

    patch = mock.patch.object(torch.cuda.Event, "synchronize", wait)
    with watched("warn"), warnings.catch_warnings(record=True) as warned, patch:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in warned if "synchroniz" in str(each.message).lower()]


class Twin(Group):
    """A group of two, whose other rank brings what this one brings."""

    def __init__(self):
        super().__init__()
        self.size, self.is_alone = 2, False

    def all_gather(self, tensor):
        return torch.stack([tensor, tensor])

    def all_to_all(self, rows, send_counts, receive_counts):
        received = rows.new_zeros((sum(receive_counts), *rows.shape[1:]))
        number = min(len(rows), len(received))
        received[:number] = rows[:number]
        return received


LAUNCHES = {
    "balanced, float32": ({"dtype": torch.float32}, 2, 51, 75, 1),
    "balanced": ({}, 2, 38, 51, 1),
    "even": ({"token_split": "even"}, 2, 50, 51, 1),
    "max_tokens": ({"max_tokens": 12}, 2, 63, 51, 0),
    "alone, float32": ({"dtype": torch.float32}, 1, 52, 69, 1),
    "alone": ({}, 1, 38, 45, 0),
}
"""Options of a layer and ranks; launches of its forward and of its backward, and waits of the host."""


@pytest.mark.parametrize("kind", LAUNCHES)
def test_a_layer_has_no_more_launches_and_waits(kind):
    """Without views and empty tensors; an exchange counts as the ops of `Twin`. Where there are fewer, lower these."""
    options, ranks, forward, backward, waits = LAUNCHES[kind]
    layer = MoE(H, 16, E, gated=True, **({"dtype": torch.bfloat16} | options))
    layer.shared = torch.nn.Linear(H, H, dtype=layer.experts.weights.dtype)
    if ranks > 1:
        hold(layer, Twin(), np.ones((ranks, E), np.int64))
    with PaperGpu() as gpu:
        gpu.move(layer)
        x = gpu.tensor(torch.randn(9, H, dtype=layer.experts.weights.dtype)).requires_grad_()
        layer(x)  # copies the placement
        gpu.done.clear()
        out = layer(x)
        launched = [name for name in gpu.done if name != "wait"]
        assert len(launched) <= forward
        assert gpu.done.count("wait") == waits
        loss = out.float().square().sum() + layer.balance_loss
        gpu.done.clear()
        loss.backward()
        assert "wait" not in gpu.done
        assert len(gpu.done) <= backward


def on_gpu(dtype, ranks=1, **options):
    torch.manual_seed(0)
    layer = MoE(H, 16, E, gated=True, dtype=dtype, device="cuda", **options)
    if ranks > 1:
        hold(layer, Twin(), np.ones((ranks, E), np.int64))
    x = torch.randn(2, 9, H, dtype=dtype, device="cuda")
    layer(x[1]).float().sum().backward()  # so that all is loaded
    layer.experts.count.reset()
    return layer, x[0]


@pytest.mark.gpu
@pytest.mark.chip
def test_a_gpu_makes_nobody_wait_for_a_layer_that_is_alone():
    layer, x = on_gpu(torch.bfloat16)
    with counted() as waits:
        layer(x).float().sum().backward()
    assert waits == []
    assert layer.load_E.sum() == 2 * len(x)


@pytest.mark.gpu
@pytest.mark.chip
def test_a_gpu_makes_the_host_wait_once():
    layer, x = on_gpu(torch.float32)
    with counted() as waits:
        layer(x)
    assert waits == ["an event"]


@pytest.mark.gpu
@pytest.mark.chip
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"token_split": "even"}, ["an event"]),
        ({"token_split": "balanced"}, ["an event"]),
        ({"max_tokens": 12}, []),
    ],
)
def test_a_gpu_makes_the_host_wait_once_for_what_goes_to_another_and_comes_from_it(options, expected):
    layer, x = on_gpu(torch.bfloat16, 2, **options)
    with counted() as waits:
        out = layer(x)
    assert waits == expected
    with counted() as waits:
        out.float().sum().backward()
    assert waits == []
    assert layer.load_E.sum() == 2 * 2 * len(x)


@pytest.mark.gpu
@pytest.mark.chip
def test_a_gpu_pads_without_a_wait():
    matrix_RE = np.array(PLACEMENTS[2])
    counts_RE = torch.tensor([[3, 1, 2, 0], [4, 0, 0, 2]], device="cuda")
    positions_TK = torch.arange(6, dtype=torch.int32, device="cuda").view(3, 2)
    found = []
    for _ in range(2):
        padding = Padding.of(matrix_RE, [0, 1, 2], 4, 2, counts_RE.device)
        with watched("error"):
            exchange = Exchange.padded(counts_RE, padding, 0)
            found = [*exchange.pad(positions_TK), exchange.receive_Re, exchange.ends_e]
    on_cpu = Exchange.padded(counts_RE.cpu(), Padding.of(matrix_RE, [0, 1, 2], 4, 2, torch.device("cpu")), 0)
    expected = [*on_cpu.pad(positions_TK.cpu()), on_cpu.receive_Re, on_cpu.ends_e]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.chip
def test_a_forward_in_a_cuda_graph():
    layer, x = on_gpu(torch.bfloat16)
    inputs = [torch.randn_like(x) for _ in range(3)]
    expected = [layer(each).detach() for each in inputs]
    layer.experts.count.reset()
    graph, place = torch.cuda.CUDAGraph(), x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        layer(place)
    torch.cuda.current_stream().wait_stream(side)
    layer.experts.count.reset()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(place)
    for each, wanted in zip(inputs, expected, strict=True):
        place.copy_(each)
        graph.replay()
        torch.testing.assert_close(out, wanted)
    assert layer.load_E.sum() == 3 * 2 * len(x)
