"""The largest tables and offsets that kernels take: as much shared memory as they may use, elements past 2**32."""

import pytest
import torch

from evermoe import ops
from evermoe.ops.chunks import BLOCK_BYTES, num_chunks, pack_chunks, unpack_chunks
from evermoe.ops.optim import adamw_, adamw_step
from support.tokens import make_ids

raw = torch.ops.evermoe
MAX_EXPERTS = 12288
"""This number of counts fills the 48 KiB of shared memory that a kernel gets without asking for more."""
MAX_RANKS = 755
"""Over which `split_tokens` splits on a GPU."""
LARGE_BYTES = 40 << 30
"""The most bytes that the tests of large tensors take."""


@pytest.fixture
def large(cuda):
    """A GPU with room for large tensors."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < LARGE_BYTES:
        pytest.skip("needs 40 GiB of free memory on the GPU")
    return cuda


@pytest.mark.gpu
def test_the_largest_tables(cuda):
    ids = make_ids(1500, 8, MAX_EXPERTS)
    counts = ops.expert_histogram(ids, MAX_EXPERTS)
    assert torch.equal(ops.expert_histogram(ids.to(cuda), MAX_EXPERTS).cpu(), counts)
    fewer = MAX_EXPERTS - 2  # a plan has a place for each rank and one for the end, too
    ids = make_ids(1500, 8, fewer)
    send = ops.expert_histogram(ids, fewer)[:, None]
    found = ops.dispatch_plan(ids.to(cuda), send.to(cuda))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, ops.dispatch_plan(ids, send), strict=True))
    with pytest.raises(RuntimeError, match="fewer than 12288 experts and ranks together"):
        ops.dispatch_plan(ids.to(cuda), torch.zeros(MAX_EXPERTS, 1, dtype=torch.int64, device=cuda))


@pytest.mark.gpu
def test_a_split_over_the_most_ranks(cuda):
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 50, (3, MAX_RANKS), generator=random)
    replicas = torch.randint(1, 3, (MAX_RANKS, 3), generator=random)
    found = ops.split_tokens(counts.to(cuda), replicas.to(cuda), 7)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, ops.split_tokens(counts, replicas, 7), strict=True))


def check_rows(device, tokens, width):
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    row_ids = torch.randperm(tokens, device=device).int()
    positions = torch.empty_like(row_ids)
    positions[row_ids.long()] = torch.arange(tokens, dtype=torch.int32, device=device)
    positions = positions[:, None]
    rows = ops.permute(x, row_ids, positions)
    for some in (slice(1000), slice(tokens // 2, tokens // 2 + 1000), slice(-1000, None)):
        assert torch.equal(rows[some], x[row_ids[some].long()])
    assert torch.equal(ops.unpermute(rows, positions), x)
    weights = torch.ones(tokens, 1, device=device)
    of_rows, of_weights = raw.unpermute_backward(x, rows, positions, weights)
    assert torch.equal(of_rows, rows)
    squares = x[-1000:].double().square().sum(1, keepdim=True)
    torch.testing.assert_close(of_weights[-1000:].double(), squares, rtol=1e-4, atol=0.0)
    del of_rows, of_weights
    a, b, c, d = tokens // 3, tokens // 6, tokens // 4, tokens // 4
    ordered = ops.regroup(rows, torch.tensor([[a, b], [c, d]], device=device))
    expected = [rows[:a], rows[a + b : a + b + c], rows[a : a + b], rows[a + b + c :]]
    assert all(torch.equal(*each) for each in zip(ordered.split([a, c, b, d]), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.chip
def test_rows_past_2_to_the_31_elements(large):
    check_rows(large, 300_000, 8192)


def check_chunks(device, elements):
    state, chunk_bytes = torch.arange(elements, dtype=torch.int32, device=device), 4 << 20
    chunks = torch.empty(num_chunks([state], chunk_bytes), chunk_bytes, dtype=torch.uint8, device=device)
    hashes = torch.empty(len(chunks), chunk_bytes // BLOCK_BYTES, dtype=torch.int64, device=device)
    pack_chunks([state], 0, chunks, hashes)
    assert torch.equal(chunks.view(-1)[: state.nbytes], state.view(torch.uint8))
    again, wrong = torch.zeros_like(state), torch.ones(len(chunks), dtype=torch.int64, device=device)
    unpack_chunks(chunks, hashes, 0, [again], wrong)
    assert torch.equal(again, state) and not wrong.any()


@pytest.mark.gpu
@pytest.mark.chip
def test_chunks_of_a_tensor_past_2_to_the_32_bytes(large):
    check_chunks(large, (1 << 30) + 3)


def check_adamw(device, elements):
    arrays = [torch.full((elements,), value, device=device) for value in (1.0, 0.5, 0.25, 2.0)]
    last = 1000
    for each in arrays:
        each[-last:] += torch.rand(last, device=device)
    small = [each[-last:].clone() for each in arrays]
    step = adamw_step(t=3, lr=0.1, weight_decay=0.01)[None]
    for p, m, v, gradient in (arrays, small):
        adamw_(p, m, v, [gradient], step)
    for each, expected in zip(arrays, small, strict=True):
        assert torch.equal(each[-last:], expected)
        assert (each[:-last] == each[0]).all()
    assert arrays[0][0] != 1.0


@pytest.mark.gpu
@pytest.mark.chip
def test_an_optimizers_step_past_2_to_the_31_elements(large):
    check_adamw(large, (1 << 31) + 8)
