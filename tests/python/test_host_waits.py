"""How often a forward makes the host wait for a GPU: on the CPU counted with tensors that only say they are on one."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe.moe_exchange import Exchange, Padding
from support.paper_gpu import PaperGpu
from support.ranks import run_ranks
from test_moe import hold

E, H = 4, 16
PLACEMENTS = {1: [[1, 1, 1, 1]], 2: [[1, 1, 1, 0], [1, 0, 0, 1]]}


def waits(group, matrix, gated, dtype, max_tokens):
    torch.manual_seed(0)
    layer = MoE(H, 16, E, gated=gated, dtype=dtype, max_tokens=max_tokens)
    hold(layer, group, np.array(matrix))
    x = torch.randn(9 + group.rank, H, dtype=dtype)
    expected = layer(x).detach()
    tokens_E = layer.tokens_E
    with torch.no_grad(), PaperGpu() as gpu:
        found = gpu.move(layer)(gpu.tensor(x))
        seen = list(gpu.waits)
        gpu.waits.clear()
        counted = layer.load_E, layer.tokens_E
    return {
        "waits": seen,
        "out": found.value,
        "expected": expected,
        "tokens": tokens_E.tolist(),
        "total": counted[0].tolist(),
        "last": counted[1].tolist(),
        "to read": gpu.waits,
    }


def run(tmp_path, ranks, *options):
    for found in run_ranks(tmp_path, ranks, waits, PLACEMENTS[ranks], *options):
        torch.testing.assert_close(found["out"], found["expected"])
        assert found["total"] == [2 * tokens for tokens in found["tokens"]]
        assert found["last"] == found["tokens"]
        yield found


@pytest.mark.parametrize("ranks", PLACEMENTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wait_a_layer_and_none_if_alone(tmp_path, ranks, gated, dtype):
    for found in run(tmp_path, ranks, gated, dtype, None):
        # In float32 experts are multiplied one by one, and the host must know their rows.
        is_quick = ranks == 1 and dtype == torch.bfloat16
        assert found["waits"] == ([] if is_quick else ["aten::_to_copy from the GPU"])


@pytest.mark.parametrize("ranks", PLACEMENTS)
@pytest.mark.parametrize("gated", [False, True])
def test_no_wait_where_the_most_tokens_are_known(tmp_path, ranks, gated):
    for found in run(tmp_path, ranks, gated, torch.bfloat16, 12):
        assert found["waits"] == []
        assert found["to read"] == ["aten::_to_copy from the GPU"] * 2


def test_a_larger_exchange_has_exact_sizes(tmp_path):
    for found in run(tmp_path, 2, False, torch.bfloat16, 1 << 21):
        assert found["waits"] == ["aten::_to_copy from the GPU"]


@contextmanager
def watched(mode):
    """CUDA's own count: an exception or a warning for each wait of the host."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(dtype):
    torch.manual_seed(0)
    layer = MoE(H, 16, E, gated=True, dtype=dtype, device="cuda")
    x = torch.randn(2, 9, H, dtype=dtype, device="cuda")
    layer(x[1]).float().sum().backward()  # so that all is loaded
    layer.experts.count.forget()
    return layer, x[0]


@pytest.mark.gpu
@pytest.mark.chip
def test_a_gpu_makes_nobody_wait_for_a_layer_that_is_alone():
    layer, x = on_gpu(torch.bfloat16)
    with watched("error"):
        layer(x).float().sum().backward()
    assert layer.load_E.sum() == 2 * len(x)


@pytest.mark.gpu
@pytest.mark.chip
def test_a_gpu_makes_the_host_wait_once():
    layer, x = on_gpu(torch.float32)
    with watched("warn"), warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        layer(x)
    assert len(waited) == 1, [str(each.message) for each in waited]


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
    layer.experts.count.forget()
    graph, place = torch.cuda.CUDAGraph(), x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        layer(place)
    torch.cuda.current_stream().wait_stream(side)
    layer.experts.count.forget()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(place)
    for each, wanted in zip(inputs, expected, strict=True):
        place.copy_(each)
        graph.replay()
        torch.testing.assert_close(out, wanted)
    assert layer.load_E.sum() == 3 * 2 * len(x)
