"""The kernels of dispatch.cu, bit by bit against the CPU ops."""

import pytest
import torch

from evermoe import ops
from support.kernels import Buffer, sparse

raw = torch.ops.evermoe
# tokens, choices, experts, columns, ranks
SHAPES = [(1, 1, 1, 1, 1), (7, 3, 5, 13, 2), (31, 2, 64, 257, 3), (64, 2, 4, 64, 4), (700, 2, 3, 8, 5)]
LARGE = (6001, 4, 96, 136, 9)
MANY_ROWS = (1201, 4, 96, 136, 9)
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
INDICES = [torch.int32, torch.int64]
# one, primes, rows of 16, 8, 4 and 2 bytes, rows longer than a block and than
# the 256 partial sums, no choice
ROWS = [
    (1, 1, 1, 1, 1),
    (7, 3, 5, 13, 2),
    (31, 2, 64, 257, 3),
    (64, 2, 4, 64, 4),
    (5, 8, 4, 1032, 1),
    (9, 1, 3, 516, 2),
    (9, 5, 3, 262, 2),
    (3, 0, 2, 8, 1),
]


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


def tile_slots(experts):
    """As in dispatch.cu."""
    return max(512, 1 << (2 * experts - 1).bit_length())


def at_offset(tensor, offset):
    """A copy that starts so many elements past an aligned address."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:]
    return memory.view(tensor.shape).copy_(tensor)


def offset_buffer(shape, dtype, offset):
    """A buffer like that."""
    buffer = Buffer(shape, dtype)
    if offset:
        buffer = Buffer([torch.Size(shape).numel() + offset], dtype)
        buffer.tensor[:offset].view(torch.uint8).fill_(0x5A)
        buffer.tensor = buffer.tensor[offset:].view(shape)
    return buffer


@pytest.mark.parametrize("shape", [*SHAPES, (700, 1, 300, 1, 2)])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("index", INDICES)
def test_plan(kernels, shape, bits, index):
    check_plan(kernels, shape, bits, index)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("index", INDICES)
def test_large_plan(fast_kernels, bits, index):
    check_plan(fast_kernels, LARGE, bits, index)


def check_plan(kernels, shape, bits, index):
    ids, counts, row_ids, positions, _, _ = case(shape)
    experts, ranks = counts.shape
    slots, tile = ids.numel(), tile_slots(experts)
    tiles = -(-slots // tile)
    typed = ids.to(torch.int32 if bits == 32 else torch.int64)
    tile_counts = Buffer([tiles, experts], torch.int32)
    kernels(f"plan_count_i{bits}", tiles, 32, 4 * experts, typed, tile_counts.tensor, slots, experts)
    per_tile = torch.stack([ops.expert_histogram(part, experts) for part in ids.flatten().split(tile)])
    tile_counts.equals(per_tile.int())
    kernels("plan_starts", -(-experts // 32), 64, 4 * 64, tile_counts.tensor, tiles, experts)
    tile_counts.equals((per_tile.cumsum(0) - per_tile).int())
    ends, first_rows = Buffer([experts, ranks], torch.int64), Buffer([ranks, experts], torch.int64)
    kernels("plan_segments", 1, 64, 64 * 8, counts, ends.tensor, first_rows.tensor, experts, ranks)
    ends.equals(counts.cumsum(1))
    first_rows.equals((counts.t().flatten().cumsum(0) - counts.t().flatten()).view(ranks, experts))
    ours = Buffer([slots], index, 0xFF), Buffer(ids.shape, index)
    arguments = (tile_counts.tensor, ends.tensor, first_rows.tensor, ours[0].tensor, ours[1].tensor)
    wide = int(index == torch.int64)
    kernels(f"plan_place_i{bits}", tiles, 32, 4 * experts, typed, *arguments, wide, slots, experts, ranks)
    ours[0].equals(row_ids.to(index))
    ours[1].equals(positions.to(index))
    inverse = Buffer([slots], index, 0xFF)
    kernels("invert_positions", 2, 32, 0, positions.to(index), inverse.tensor, wide, slots, slots)
    inverse.equals(row_ids.to(index))


@pytest.mark.parametrize(("tiles", "experts", "threads"), [(1, 1, 32), (7, 33, 64), (70, 3, 1024), (64, 64, 128)])
def test_starts_of_many_tiles(kernels, tiles, experts, threads):
    counts = torch.randint(100, (tiles, experts), generator=torch.Generator().manual_seed(tiles))
    ours = Buffer([tiles, experts], torch.int32).set(counts)
    kernels("plan_starts", -(-experts // 32), threads, 4 * threads, ours.tensor, tiles, experts)
    ours.equals((counts.cumsum(0) - counts).int())


@pytest.mark.parametrize("row", TYPES)
def test_large_rows(fast_kernels, row):
    for offset in (0, 3):
        check_permute(fast_kernels, MANY_ROWS, row, offset)
        check_unpermute(fast_kernels, MANY_ROWS, row, "f32", offset)
        check_unpermute_backward(fast_kernels, MANY_ROWS, row, "f32", offset)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("row", TYPES)
def test_permute(kernels, shape, row, offset):
    check_permute(kernels, shape, row, offset)


def check_permute(kernels, shape, row, offset):
    _, _, row_ids, positions, x, _ = case(shape, TYPES[row])
    (tokens, top_k), width = positions.shape, x.shape[1]
    x, expected = at_offset(x, offset), ops.permute(x, row_ids, positions)
    for index in INDICES:
        rows = offset_buffer(expected.shape, x.dtype, offset)
        sizes = (int(index == torch.int64), len(row_ids), width * x.dtype.itemsize, tokens, max(top_k, 1))
        kernels("permute", 3, 64, 0, x, row_ids.to(index), rows.tensor, *sizes)
        rows.equals(expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("shape", ROWS[:-1])
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("weight", ["none", "f32", "same"])
def test_unpermute(kernels, shape, row, weight, offset):
    check_unpermute(kernels, shape, row, weight, offset)


def check_unpermute(kernels, shape, row, weight, offset):
    _, _, row_ids, positions, x, weights = case(shape, TYPES[row])
    (tokens, top_k), (slots, width) = positions.shape, (len(row_ids), x.shape[1])
    weight_type = row if weight == "same" else "f32"
    weights = None if weight == "none" else weights.to(TYPES[weight_type])
    rows = ops.permute(x, row_ids, positions)
    expected, rows = ops.unpermute(rows, positions, weights), at_offset(rows, offset)
    for index in INDICES:
        out = offset_buffer(expected.shape, x.dtype, offset)
        sizes = (int(index == torch.int64), tokens, top_k, slots, width)
        arguments = (rows, positions.to(index), 0 if weights is None else weights, out.tensor)
        kernels(f"unpermute_{row}_{weight_type}", 5, 64, 0, *arguments, *sizes)
        out.equals(expected)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", ROWS[:-1])
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("weight", ["f32", "same"])
def test_unpermute_backward(kernels, shape, row, weight, offset):
    check_unpermute_backward(kernels, shape, row, weight, offset)


def check_unpermute_backward(kernels, shape, row, weight, offset):
    _, _, row_ids, positions, x, weights = case(shape, TYPES[row])
    weight_type = row if weight == "same" else "f32"
    weights, rows = weights.to(TYPES[weight_type]), ops.permute(x, row_ids, positions)
    expected = raw.unpermute_backward(x, rows, positions, weights)
    x, rows = at_offset(x, offset), at_offset(rows, offset)
    slots, width = rows.shape
    for index in INDICES:
        grad_rows = offset_buffer(rows.shape, x.dtype, offset)
        grad_weights = Buffer(positions.shape, weights.dtype, 0)
        arguments = (x, rows, row_ids.to(index), weights, grad_rows.tensor, grad_weights.tensor)
        bits = 8 * index.itemsize
        sizes = (slots, width, slots, positions.shape[1])
        kernels(f"unpermute_backward_{row}_{weight_type}_i{bits}", 2, 64, 0, *arguments, *sizes)
        grad_rows.equals(expected[0])
        grad_weights.equals(expected[1])


@pytest.mark.parametrize("index", INDICES)
def test_values_out_of_range_are_unrouted(kernels, index):
    ids, counts = torch.tensor([0, 1, 2, 7, -5]), torch.tensor([[1], [0], [3]])
    starts, ends, first_rows = torch.zeros(1, 3, dtype=torch.int32), Buffer([3], torch.int64), Buffer([3], torch.int64)
    kernels("plan_segments", 1, 32, 256, counts, ends.tensor, first_rows.tensor, 3, 1)
    row_ids, positions = Buffer([5], index, 0xFF), Buffer([5], index)
    arguments = (ids, starts, ends.tensor, first_rows.tensor, row_ids.tensor, positions.tensor)
    wide = int(index == torch.int64)
    kernels("plan_place_i64", 1, 32, 12, *arguments, wide, 5, 3, 1)
    row_ids.equals(torch.tensor([0, 2, -1, -1, -1], dtype=index))
    positions.equals(torch.tensor([0, -1, 1, -1, -1], dtype=index))
    x, rows = torch.tensor([[1.0], [2.0]]), Buffer([4, 1], torch.float32)
    kernels("permute", 1, 32, 0, x, torch.tensor([1, 2, -2, 0], dtype=index), rows.tensor, wide, 4, 4, 2, 1)
    rows.equals(torch.tensor([[2.0], [0.0], [0.0], [1.0]]))


def test_more_than_2_to_31_elements(kernels):
    """The last rows of buffers of 2**31 elements and more, which only 64-bit indices reach."""
    tokens, top_k, width = (1 << 21) + 2, 2, 1024
    x, rows = sparse([tokens, width], torch.bfloat16), sparse([tokens, width], torch.bfloat16)
    x[-1] = torch.arange(width) / 8
    row_ids = torch.full([tokens], -1)
    row_ids[-1] = last = (tokens - 1) * top_k + 1
    blocks = -(-tokens // 4)  # of four rows
    kernels("permute", blocks, 32, 0, x, row_ids, rows, 1, tokens, 2 * width, tokens, top_k, first_block=blocks - 1)
    assert torch.equal(rows[-1], x[-1])
    assert not rows[-2].any()

    positions, weights = torch.full([tokens, top_k], -1), torch.zeros(tokens, top_k)
    positions[-1, 1], weights[-1, 1] = tokens - 1, 0.5
    out = sparse([tokens, width], torch.bfloat16)
    blocks = -(-tokens // 2)  # of two tokens
    sizes = (1, tokens, top_k, tokens, width)
    kernels("unpermute_bf16_f32", blocks, 32, 0, rows, positions, weights, out, *sizes, first_block=blocks - 1)
    assert torch.equal(out[-1], x[-1] / 2)

    grad_rows, grad_weights = sparse([tokens, width], torch.bfloat16), torch.zeros(tokens, top_k)
    sizes = (tokens, width, tokens * top_k, top_k)
    name = "unpermute_backward_bf16_f32_i64"
    kernels(name, tokens, 32, 0, x, rows, row_ids, weights, grad_rows, grad_weights, *sizes, first_block=tokens - 1)
    assert torch.equal(grad_rows[-1], x[-1] / 2)
    assert grad_weights.flatten()[last] > 0
