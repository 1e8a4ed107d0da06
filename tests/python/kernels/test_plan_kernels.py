"""The kernels of plan.cu, bit by bit against the CPU op, and against a plain sort where the op refuses the counts."""

import pytest
import torch

from evermoe import ops
from support.kernels import Buffer

INDICES = [torch.int32, torch.int64]
WARP = 32
# slots, experts, ranks, slots of a tile, warps, tables
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (21, 5, 2, 4, 1, 1),
    (62, 64, 3, 17, 4, 3),
    (700, 3, 5, 600, 2, 2),
    (700, 3, 5, 1, 1, 1),
    (701, 300, 128, 256, 4, 4),
    (1400, 7, 64, 1400, 4, 4),
    (640, 4096, 2, 512, 4, 2),
    (640, 33, 300, 96, 3, 1),
]
LARGE = (24_004, 96, 9, 4096, 16, 16)


def draw(slots, experts, ranks, seed=0):
    """Ids, of which some are -1 and one expert has a fifth, and counts that add up to them."""
    random = torch.Generator().manual_seed(slots + seed)
    ids = torch.randint(-1, experts, (slots,), generator=random)
    ids[torch.rand(slots, generator=random) < 0.2] = experts // 2
    counts = torch.zeros(experts, ranks, dtype=torch.int64)
    routed = ids[ids >= 0]
    to = torch.randint(ranks, (len(routed),), generator=random)
    return ids, counts.index_put_((routed, to), torch.ones_like(to), accumulate=True)


def sorted_plan(ids, counts):
    """Row ids and positions for any counts: rows that no slot takes, and slots that get no row, are -1."""
    experts, ranks = counts.shape
    counts = [[min(max(count, 0), 1 << 40) for count in row] for row in counts.tolist()]
    rows, first = {}, 0
    for rank in range(ranks):
        for expert in range(experts):
            begin = sum(counts[expert][:rank])
            for occurrence in range(begin, begin + min(counts[expert][rank], len(ids))):
                rows[expert, occurrence] = first + occurrence - begin
            first += counts[expert][rank]
    row_ids, positions, seen = torch.full_like(ids, -1), torch.full_like(ids, -1), [0] * experts
    for slot, expert in enumerate(ids.tolist()):
        if not 0 <= expert < experts:
            continue
        row = rows.get((expert, seen[expert]), len(ids))
        seen[expert] += 1
        if row < len(ids):
            row_ids[row], positions[slot] = slot, row
    return row_ids, positions


def plan_on_kernels(kernels, ids, counts, index, tile, warps, tables):
    """Row ids and positions as buffers, after checks of what the first launch has written."""
    (experts, ranks), slots = counts.shape, len(ids)
    tiles, bits, wide = -(-slots // tile), 8 * ids.itemsize, int(index == torch.int64)
    tile_counts, begins = Buffer([tiles, experts], torch.int32), Buffer([experts, ranks + 1], torch.int32)
    first_rows = Buffer([ranks, experts + 1], torch.int32)
    row_ids, positions = Buffer([slots], index), Buffer([slots], index)
    segments = (begins.tensor, first_rows.tensor)
    blocks = tiles + -(-(experts + ranks) // warps)
    arguments = (ids, counts, tile_counts, *segments, row_ids, wide, tile, tiles, slots, experts, ranks)
    kernels(f"plan_count_i{bits}", blocks, WARP * warps, 4 * experts, *arguments)
    row_ids.equals(torch.full([slots], -1, dtype=index))
    known = torch.where((ids >= 0) & (ids < experts), ids, -1)
    per_tile = torch.stack([ops.expert_histogram(part, experts) for part in known.split(tile)])
    tile_counts.equals(per_tile.int())
    # Small counts: sums of others stop, which the rows show.
    if counts.numel() and counts.min() >= 0 and counts.double().sum() <= slots:
        begins.equals(torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int())
        first_rows.equals(torch.nn.functional.pad(counts.t().cumsum(1), (1, 0)).int())
    arguments = (ids, tile_counts, *segments, row_ids, positions, wide, tile, tables, slots, experts, ranks)
    kernels(f"plan_place_i{bits}", tiles, WARP * warps, 4 * (tables * experts + ranks + 1), *arguments)
    return row_ids, positions


def check_plan(kernels, shape, ids_type, index):
    slots, experts, ranks, *launch = shape
    ids, counts = draw(slots, experts, ranks)
    expected = ops.dispatch_plan(ids.view(-1, 1), counts)
    ours = plan_on_kernels(kernels, ids.to(ids_type), counts, index, *launch)
    for buffer, theirs in zip(ours, expected, strict=True):
        buffer.equals(theirs.flatten().to(index))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids_type", INDICES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.few(29)
def test_plan(kernels, shape, ids_type, index):
    check_plan(kernels, shape, ids_type, index)


@pytest.mark.parametrize("ids_type", INDICES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.long
def test_large_plan(fast_kernels, ids_type, index):
    check_plan(fast_kernels, LARGE, ids_type, index)


@pytest.mark.long
def test_plan_of_many_sizes(fast_kernels):
    random = torch.Generator().manual_seed(fast_kernels.order)
    sizes = {"slots": 900, "experts": 40, "ranks": 20, "tile": 300, "warps": 6}
    for _ in range(100):
        slots, experts, ranks, tile, warps = (
            int(torch.randint(1, most, (), generator=random)) for most in sizes.values()
        )
        tables = int(torch.randint(1, warps + 1, (), generator=random))
        check_plan(fast_kernels, (slots, experts, ranks, tile, warps, tables), torch.int32, torch.int32)


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 0], [0, 0], [3, 2]],  # more than there are
        [[0, 1], [1, 0], [0, 1]],  # fewer
        [[0, 0], [0, 0], [0, 0]],
        [[2, -5], [-1, 3], [-(1 << 63), 1]],
        [[1, 1], [1 << 62, 1 << 62], [1, 1]],  # rows past the buffer
        [[(1 << 63) - 1, 1], [(1 << 63) - 1, 1], [(1 << 63) - 1, 1]],
        [[(1 << 32) + 1, 1], [1 << 32, 0], [1, 0]],  # not as 32 bits
        [[], [], []],  # no ranks
    ],
)
@pytest.mark.parametrize("index", INDICES)
def test_ids_and_counts_out_of_range(kernels, index, counts):
    ids = torch.tensor([2, 0, -1, 1, 3, 2, -(1 << 63), 1 << 32, 2, 1, 0, -7])
    counts = torch.tensor(counts, dtype=torch.int64).view(3, -1)
    expected = sorted_plan(ids, counts)
    for typed in (ids, ids.clamp(-9, 9).int()):
        for tile, warps, tables in [(5, 3, 2), (12, 1, 1), (4, 2, 2)]:
            ours = plan_on_kernels(kernels, typed, counts, index, tile, warps, tables)
            for buffer, theirs in zip(ours, expected, strict=True):
                buffer.equals(theirs.to(index))


def test_the_plain_sort_is_the_op():
    ids, counts = draw(200, 7, 5)
    for ours, theirs in zip(sorted_plan(ids, counts), ops.dispatch_plan(ids.view(-1, 1), counts), strict=True):
        assert torch.equal(ours, theirs.flatten().long())
