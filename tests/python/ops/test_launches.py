"""The launches of ops on a GPU, counted by the stand-in driver and compared with the table of kernels."""

import ctypes
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from evermoe import Expert, Experts, ops
from evermoe.ops.chunks import hash_blocks, num_chunks, pack_chunks, unpack_chunks
from evermoe.ops.fp8 import dequantize_rows, quantize_rows
from evermoe.ops.optim import adamw_all_, adamw_step, sgd_all_, sgd_step
from support import stand_in

sys.path.append(str(Path(__file__).parents[3] / "benches"))

from kernel_table import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("stands_in")]
T, K, E, H = 6, 2, 4, 16
ROWS = T * K


def of_table(*names):
    """Kernels and memsets of ops, by the table."""
    found = Counter()
    for name in names:
        [op] = [each for each in OPS if each.name == name]
        found += Counter([launch.kernel for launch in op.launches] + ["memset"] * op.memsets)
    return found


@pytest.fixture
def launched(cuda):
    """`launched(call)`: kernels and memsets of a call."""
    take = stand_in.DRIVER.fake_driver_launched
    take.restype = ctypes.c_char_p

    def run(call):
        take()
        call()
        return Counter(take().decode().split())

    return run


@pytest.fixture
def plan(cuda):
    """Ids, and what they are planned to."""
    ids = (torch.arange(ROWS, dtype=torch.int32).view(T, K) % E).to(cuda)
    counts = torch.full((E, 1), ROWS // E, device=cuda)
    return ids, counts, *ops.dispatch_plan(ids, counts)


def rows(number, device, **options):
    return torch.ones(number, H, dtype=torch.bfloat16, device=device, requires_grad=options.get("requires_grad", False))


def backward_of(op, *inputs, **options):
    """A call of the backward alone."""
    out = op(*inputs, **options)
    return lambda: out.backward(torch.ones_like(out))


def test_plan(plan, launched):
    ids, counts, *_ = plan
    assert launched(lambda: ops.dispatch_plan(ids, counts)) == of_table("dispatch_plan")


def test_permute_and_its_backward(plan, launched):
    *_, row_ids, positions = plan
    x = rows(T, row_ids.device, requires_grad=True)
    assert launched(lambda: ops.permute(x, row_ids, positions)) == of_table("permute")
    assert launched(backward_of(ops.permute, x, row_ids, positions)) == of_table("unpermute")


def test_unpermute_and_its_backward(plan, launched):
    *_, positions = plan
    x = rows(ROWS, positions.device, requires_grad=True)
    weights = torch.ones(T, K, device=positions.device, requires_grad=True)
    assert launched(lambda: ops.unpermute(x, positions, weights)) == of_table("unpermute")
    assert launched(backward_of(ops.unpermute, x, positions, weights)) == of_table("unpermute_backward")


def test_regroup_and_its_backward(cuda, launched):
    x, counts = rows(ROWS, cuda, requires_grad=True), torch.full((2, E), ROWS // 2 // E, device=cuda)
    assert launched(lambda: ops.regroup(x, counts)) == of_table("regroup")
    assert launched(backward_of(ops.regroup, x, counts)) == of_table("regroup")


def test_counts_and_their_split(plan, cuda, launched):
    ids, *_ = plan
    counts, replicas = (
        torch.ones(E, 2, dtype=torch.int64, device=cuda),
        torch.ones(2, E, dtype=torch.int64, device=cuda),
    )
    assert launched(lambda: ops.expert_histogram(ids, E)) == of_table("expert_histogram")
    assert launched(lambda: ops.split_tokens(counts, replicas, 0)) == of_table("split_tokens")


@pytest.mark.parametrize(("policy", "kernels"), [("even", ["split_tokens"]), ("balanced", [])])
def test_a_layer_splits_tokens_evenly_by_one_kernel_and_balanced_on_the_host(cuda, launched, policy, kernels):
    layer = Experts(Expert(H, H), E, token_split=policy, device=cuda)
    counts = torch.arange(E, device=cuda)
    layer.plan_exchange(counts)  # the placement exists
    assert launched(lambda: layer.plan_exchange(counts).sizes) == of_table(*kernels)
    assert layer.tokens_E.tolist() == [*range(E)]


def test_rows_in_8_bits(cuda, launched):
    x = torch.ones(T, 128, dtype=torch.bfloat16, device=cuda)
    small = quantize_rows(x)
    assert launched(lambda: quantize_rows(x)) == of_table("quantize_rows")
    assert launched(lambda: dequantize_rows(small, 128, torch.bfloat16)) == of_table("dequantize_rows")


@pytest.mark.parametrize("count", [1, 5])
def test_steps_of_optimizers(cuda, launched, count):
    """One launch, of however many parameters."""
    p, m, v, gradients = ([torch.ones(33, device=cuda) for _ in range(count)] for _ in range(4))
    adamw = torch.stack([adamw_step(t=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)] * count)
    sgd = torch.stack([sgd_step(is_first=False, lr=0.1, momentum=0.9)] * count)
    assert launched(lambda: adamw_all_(p, m, v, gradients, adamw)) == of_table("adamw_, adamw_all_ (a step)")
    assert launched(lambda: sgd_all_(p, m, gradients, sgd)) == of_table("sgd_, sgd_all_ with momentum")


def test_chunks(cuda, launched):
    tensors = [torch.ones(300, device=cuda), torch.ones(5, device=cuda)]
    chunks = torch.empty(num_chunks(tensors, 4096), 4096, dtype=torch.uint8, device=cuda)
    hashes = torch.empty(len(chunks), 1, dtype=torch.int64, device=cuda)
    wrong = torch.zeros(len(chunks), dtype=torch.int64, device=cuda)
    assert launched(lambda: pack_chunks(tensors, 0, chunks, hashes)) == of_table("pack_chunks")
    assert launched(lambda: unpack_chunks(chunks, hashes, 0, tensors, wrong)) == of_table("unpack_chunks")
    assert launched(lambda: hash_blocks(chunks, hashes)) == of_table("hash_blocks")
