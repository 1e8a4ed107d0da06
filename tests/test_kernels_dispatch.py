"""The kernels of dispatch.cu and histogram.cu, bit by bit against the CPU ops."""

import pytest
import torch

from evermoe import ops
from kernels import Buffer, sparse

SHAPES = [(1, 1, 1, 1, 1), (7, 3, 5, 13, 2), (31, 2, 64, 257, 3), (64, 2, 4, 64, 4), (700, 2, 3, 8, 5)]
LARGE = (6001, 4, 96, 136, 9)
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TILE = 512
raw = torch.ops.evermoe


def case(shape, dtype=torch.float32):
    tokens, top_k, experts, width, ranks = shape
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=random)
    counts = torch.zeros(experts, ranks, dtype=torch.int64)
    for expert in ids[ids >= 0].tolist():
        counts[expert, torch.randint(ranks, (), generator=random)] += 1
    row_ids, positions = ops.dispatch_plan(ids, counts)
    x = torch.randn(tokens, width, generator=random).to(dtype)
    return ids, counts, row_ids, positions, x, torch.rand(tokens, top_k, generator=random)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [32, 64])
def test_histogram_and_plan(kernels, shape, bits):
    check_histogram_and_plan(kernels, shape, bits)


@pytest.mark.parametrize("bits", [32, 64])
def test_large_histogram_and_plan(fast_kernels, bits):
    check_histogram_and_plan(fast_kernels, LARGE, bits)


def check_histogram_and_plan(kernels, shape, bits):
    ids, counts, row_ids, positions, _, _ = case(shape)
    experts, ranks = counts.shape
    slots, tiles = ids.numel(), -(-ids.numel() // TILE)
    typed = ids.to(torch.int32 if bits == 32 else torch.int64)
    histogram = Buffer([experts], torch.int64, 0)
    kernels(f"expert_histogram_i{bits}", 3, 64, 4 * experts, typed, histogram.tensor, slots, experts)
    histogram.equals(ops.expert_histogram(ids, experts))

    tile_counts = Buffer([tiles, experts], torch.int32)
    kernels(f"plan_count_i{bits}", tiles, 32, 4 * experts, typed, tile_counts.tensor, slots, experts)
    per_tile = [ops.expert_histogram(tile, experts) for tile in ids.flatten().split(TILE)]
    tile_counts.equals(torch.stack(per_tile).int())
    ends, first_rows = Buffer([experts, ranks], torch.int64), Buffer([ranks, experts], torch.int64)
    sizes = (tiles, experts, ranks)
    kernels("plan_segments", 1, 64, 64 * 8, counts, tile_counts.tensor, ends.tensor, first_rows.tensor, *sizes)
    ends.equals(counts.cumsum(1))
    first_rows.equals((counts.t().flatten().cumsum(0) - counts.t().flatten()).view(ranks, experts))
    ours = Buffer([slots], torch.int64, 0xFF), Buffer(ids.shape, torch.int64)
    arguments = (tile_counts.tensor, ends.tensor, first_rows.tensor, ours[0].tensor, ours[1].tensor)
    kernels(f"plan_place_i{bits}", tiles, 32, 4 * experts, typed, *arguments, slots, experts, ranks)
    ours[0].equals(row_ids)
    ours[1].equals(positions)


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("weight", ["none", "f32", "same"])
def test_rows(kernels, shape, row, weight):
    check_rows(kernels, shape, row, weight)


@pytest.mark.parametrize("row", TYPES)
def test_large_rows(fast_kernels, row):
    check_rows(fast_kernels, LARGE, row, "f32")


def check_rows(kernels, shape, row, weight):
    _, _, row_ids, positions, x, weights = case(shape, TYPES[row])
    (tokens, top_k), (slots, width) = positions.shape, (row_ids.shape[0], x.shape[1])
    weight_type = row if weight == "same" else "f32"
    weights = weights.to(TYPES[weight_type])
    used = None if weight == "none" else weights
    row_bytes = width * x.dtype.itemsize
    rows = Buffer([slots, width], x.dtype)
    for unit in [2, 16] if row_bytes % 16 == 0 else [2]:
        kernels(f"permute_{unit}", 3, 32, 0, x, row_ids, rows.tensor, slots, row_bytes // unit, tokens, top_k)
        rows.equals(ops.permute(x, row_ids, positions))
        rows.tensor.zero_()
    permuted = ops.permute(x, row_ids, positions)
    for count in [1, 16 // x.dtype.itemsize] if row_bytes % 16 == 0 else [1]:
        out = Buffer([tokens, width], x.dtype)
        name = f"unpermute_{row}_{weight_type}_{count}"
        sizes = (tokens, top_k, slots, width)
        kernels(name, 5, 64, 0, permuted, positions, 0 if used is None else used, out.tensor, *sizes)
        out.equals(ops.unpermute(permuted, positions, used))
    inverse = Buffer([slots], torch.int64, 0xFF)
    kernels("invert_positions", 2, 32, 0, positions, inverse.tensor, slots, slots)
    inverse.equals(row_ids)
    grad_rows, grad_weights = Buffer([slots, width], x.dtype), Buffer(positions.shape, weights.dtype, 0)
    arguments = (
        x,
        permuted,
        row_ids,
        weights,
        grad_rows.tensor,
        grad_weights.tensor,
        slots,
        width,
        slots,
        top_k,
    )
    kernels(f"unpermute_backward_{row}_{weight_type}", 2, 64, 0, *arguments)
    expected = raw.unpermute_backward(x, permuted, positions, weights)
    grad_rows.equals(expected[0])
    grad_weights.equals(expected[1])


def test_values_out_of_range_are_unrouted(kernels):
    ids, counts = torch.tensor([0, 1, 2, 7, -5]), torch.tensor([[1], [0], [3]])
    histogram = Buffer([3], torch.int64, 0)
    kernels("expert_histogram_i64", 1, 32, 12, ids, histogram.tensor, 5, 3)
    histogram.equals(torch.tensor([1, 1, 1]))
    starts, ends, first_rows = (
        torch.zeros(1, 3, dtype=torch.int32),
        Buffer([3], torch.int64),
        Buffer([3], torch.int64),
    )
    kernels("plan_segments", 1, 32, 256, counts, starts, ends.tensor, first_rows.tensor, 1, 3, 1)
    row_ids, positions = Buffer([5], torch.int64, 0xFF), Buffer([5], torch.int64)
    arguments = (ids, starts, ends.tensor, first_rows.tensor, row_ids.tensor, positions.tensor, 5, 3, 1)
    kernels("plan_place_i64", 1, 32, 12, *arguments)
    row_ids.equals(torch.tensor([0, 2, -1, -1, -1]))
    positions.equals(torch.tensor([0, -1, 1, -1, -1]))


def test_more_than_2_to_31_elements(kernels):
    """The last rows of buffers of 2**31 elements and more, which only 64-bit indices reach."""
    tokens, top_k, width = (1 << 21) + 2, 2, 1024
    x, rows = sparse([tokens, width], torch.bfloat16), sparse([tokens, width], torch.bfloat16)
    x[-1] = torch.arange(width) / 8
    row_ids = torch.full([tokens], -1)
    row_ids[-1] = last = (tokens - 1) * top_k + 1
    kernels("permute_2", tokens, 32, 0, x, row_ids, rows, tokens, width, tokens, top_k, first_block=tokens - 2)
    assert torch.equal(rows[-1], x[-1])
    assert not rows[-2].any()

    positions, weights = torch.full([tokens, top_k], -1), torch.zeros(tokens, top_k)
    positions[-1, 1], weights[-1, 1] = tokens - 1, 0.5
    out = sparse([tokens, width], torch.bfloat16)
    sizes = (tokens, top_k, tokens, width)
    for count in [1, 8]:
        out[-1] = 0
        name = f"unpermute_bf16_f32_{count}"
        kernels(name, tokens, 32, 0, rows, positions, weights, out, *sizes, first_block=tokens - 1)
        assert torch.equal(out[-1], x[-1] / 2)

    grad_rows, grad_weights = sparse([tokens, width], torch.bfloat16), torch.zeros(tokens, top_k)
    sizes = (tokens, width, tokens * top_k, top_k)
    name = "unpermute_backward_bf16_f32"
    kernels(name, tokens, 32, 0, x, rows, row_ids, weights, grad_rows, grad_weights, *sizes, first_block=tokens - 1)
    assert torch.equal(grad_rows[-1], x[-1] / 2)
    assert grad_weights.flatten()[last] > 0
