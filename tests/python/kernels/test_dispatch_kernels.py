"""The kernels of rows.cu, bit by bit against the CPU ops."""

import pytest
import torch

from evermoe import ops
from support.kernels import Buffer, sparse

raw = torch.ops.evermoe
# tokens, choices, experts, columns, ranks
SHAPES = [(1, 1, 1, 1, 1), (7, 3, 5, 13, 2), (31, 2, 64, 257, 3), (64, 2, 4, 64, 4), (700, 2, 3, 8, 5)]
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


def at_offset(tensor, offset):
    """Return a copy that starts this number of elements past an aligned address."""
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("index", INDICES)
def test_invert_positions(kernels, shape, index):
    _, _, row_ids, positions, _, _ = case(shape)
    slots, inverse = len(row_ids), Buffer(row_ids.shape, index, 0xFF)
    kernels("invert_positions", 2, 32, 0, positions.to(index), inverse, int(index == torch.int64), slots, slots)
    inverse.equals(row_ids.to(index))


@pytest.mark.parametrize("row", TYPES)
@pytest.mark.long
def test_large_rows(fast_kernels, row):
    for offset in (0, 3):
        check_permute(fast_kernels, MANY_ROWS, row, offset)
        check_unpermute(fast_kernels, MANY_ROWS, row, "f32", offset)
        check_unpermute_backward(fast_kernels, MANY_ROWS, row, "f32", offset)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.few(53)
def test_permute(kernels, shape, row, offset):
    check_permute(kernels, shape, row, offset)


def check_permute(kernels, shape, row, offset):
    _, _, row_ids, positions, x, _ = case(shape, TYPES[row])
    (tokens, top_k), width = positions.shape, x.shape[1]
    x, expected = at_offset(x, offset), ops.permute(x, row_ids, positions)
    for index in INDICES:
        sizes = (len(row_ids), width * x.dtype.itemsize, tokens, top_k)
        for other in INDICES:
            rows = offset_buffer(expected.shape, x.dtype, offset)
            wide = int(index == torch.int64), int(other == torch.int64)
            kernels("permute", 3, 64, 0, x, row_ids.to(index), positions.to(other), rows.tensor, *wide, *sizes)
            rows.equals(expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("shape", ROWS[:-1])
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("weight", ["none", "f32", "same"])
@pytest.mark.few(101)
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
@pytest.mark.few(47)
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
        grad_weights = Buffer(positions.shape, weights.dtype)
        arguments = (x, rows, positions.to(index), row_ids.to(index), weights, grad_rows.tensor, grad_weights.tensor)
        bits = 8 * index.itemsize
        sizes = (slots, width, slots, positions.shape[1])
        kernels(f"unpermute_backward_{row}_{weight_type}_i{bits}", 2, 64, 0, *arguments, *sizes)
        grad_rows.equals(expected[0])
        grad_weights.equals(expected[1])


@pytest.mark.parametrize("index", INDICES)
def test_values_out_of_range_are_unrouted(kernels, index):
    wide = int(index == torch.int64)
    x, rows = torch.tensor([[1.0], [2.0]]), Buffer([4, 1], torch.float32)
    row_ids, positions = torch.tensor([1, 2, -2, 0], dtype=index), torch.tensor([3, 0], dtype=index)
    kernels("permute", 1, 32, 0, x, row_ids, positions, rows.tensor, wide, wide, 4, 4, 2, 1)
    rows.equals(torch.tensor([[2.0], [0.0], [0.0], [1.0]]))


def test_more_than_2_to_31_elements(kernels):
    """The last rows of buffers of 2**31 elements and more, which only 64-bit indices reach."""
    tokens, top_k, width = (1 << 21) + 2, 2, 1024
    x, rows = sparse([tokens, width], torch.bfloat16), sparse([tokens, width], torch.bfloat16)
    x[-1] = torch.arange(width) / 8
    row_ids = torch.full([tokens], -1)
    row_ids[-1] = last = (tokens - 1) * top_k + 1
    positions, weights = torch.full([tokens, top_k], -1), torch.zeros(tokens, top_k)
    positions[-1, 1], weights[-1, 1] = tokens - 1, 0.5
    sizes = (1, 1, tokens, 2 * width, tokens, top_k)
    kernels("permute", tokens, 32, 0, x, row_ids, positions, rows, *sizes, first_block=tokens - 1)
    assert torch.equal(rows[-1], x[-1])
    assert not rows[-2].any()

    out = sparse([tokens, width], torch.bfloat16)
    blocks = -(-tokens // 2)  # of two tokens
    sizes = (1, tokens, top_k, tokens, width)
    kernels("unpermute_bf16_f32", blocks, 32, 0, rows, positions, weights, out, *sizes, first_block=blocks - 1)
    assert torch.equal(out[-1], x[-1] / 2)

    grad_rows, grad_weights = sparse([tokens, width], torch.bfloat16), torch.zeros(tokens, top_k)
    sizes = (tokens, width, tokens * top_k, top_k)
    name = "unpermute_backward_bf16_f32_i64"
    arguments, blocks = (x, rows, positions, row_ids, weights, grad_rows, grad_weights), tokens * top_k
    kernels(name, blocks, 32, 0, *arguments, *sizes, first_block=blocks - 1)
    assert torch.equal(grad_rows[-1], x[-1] / 2)
    assert grad_weights.flatten()[last] > 0
