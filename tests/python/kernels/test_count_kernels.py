"""The kernels of histogram.cu and exchange.cu, built by a host compiler, against the CPU's integers and copies."""

import struct

import pytest
import torch

from evermoe import ops, planning
from evermoe.ops.dispatch import expert_histograms
from support.kernels import Buffer
from support.tokens import COUNTS, draw_split

TABLE_LAYERS = 64


def layers_table(layers, blocks):
    """The kernel's last argument, and the blocks of all layers together; `blocks` are those of each."""
    packed, end = b"", 0
    for ids, own in zip(layers, blocks, strict=True):
        end += own
        packed += struct.pack("<QQII", ids.data_ptr(), ids.numel(), end, ids.dtype == torch.int64)
    return packed.ljust(TABLE_LAYERS * 24, b"\0"), end


def count(kernels, layers, blocks, experts):
    counts = Buffer([len(layers), experts], torch.int64, 0)
    table, end = layers_table(layers, blocks)
    kernels("expert_histograms", end, 64, 4 * experts, counts, len(layers), experts, table, also=layers)
    return counts


@pytest.mark.parametrize("experts", [1, 5, 257, 4096, 12288])
def test_histograms(kernels, experts):
    random = torch.Generator().manual_seed(experts)
    sizes = [0, 1, 31, 64, 1031, 0, 700]
    types = [torch.int32, torch.int64]
    layers = [
        torch.randint(-1, experts, (size,), generator=random).to(types[layer % 2]) for layer, size in enumerate(sizes)
    ]
    layers.append(torch.full((300,), experts - 1))  # one expert gets all
    counts = count(kernels, layers, [0, 1, 1, 2, 3, 0, 1, 2], experts)
    counts.equals(torch.stack([ops.expert_histogram(ids, experts) for ids in layers]))


def test_as_many_layers_as_a_launch_takes(kernels):
    layers = [torch.arange(layer % 7, dtype=torch.int32) for layer in range(TABLE_LAYERS)]
    counts = count(kernels, layers, [layer % 7 > 0 for layer in range(TABLE_LAYERS)], 6)
    counts.equals(expert_histograms(layers, 6))


def test_ids_out_of_range_are_not_counted(kernels):
    ids = torch.tensor([0, 1, 2, 7, -5, 1 << 40, -(1 << 63)])
    count(kernels, [ids, ids.int()[:5]], [1, 1], 3).equals(torch.tensor([[1, 1, 1], [1, 1, 1]]))


def split_on_kernel(kernels, counts, replicas, rank, warps=2, at_once=1):
    """With claims for as many sources at once as named, if all ranks have room."""
    experts, ranks = counts.shape
    send, receive = Buffer([experts, ranks], torch.int64), Buffer([ranks, experts], torch.int64)
    claims = min(min(at_once, ranks) * (ranks + 1), ((48 << 10) - ranks * 36) // 16)
    shared = claims * 16 + ranks * 36
    kernels("split_tokens", experts, 32 * warps, shared, counts, replicas, send, receive, claims, experts, ranks, rank)
    return send, receive


def check_split(kernels, counts, replicas, rank, **launch):
    counts, replicas = torch.as_tensor(counts), torch.as_tensor(replicas)
    found = split_on_kernel(kernels, counts, replicas, rank, **launch)
    for ours, theirs in zip(found, planning.split_tokens(counts.numpy(), replicas.numpy(), rank), strict=True):
        ours.equals(torch.from_numpy(theirs))


def test_split_of_random_tokens(kernels):
    for seed in range(40):
        check_split(kernels, *draw_split(seed + 1000 * kernels.order), warps=1 + seed % 3, at_once=1 + seed % 5)


@pytest.mark.long
def test_split_of_many_random_tokens(fast_kernels):
    for seed in range(1500):
        check_split(
            fast_kernels, *draw_split(seed + 1500 * fast_kernels.order), warps=1 + seed % 8, at_once=1 + seed % 9
        )


def test_split_of_extremes(kernels):
    most = 1 << 61
    third = most // 3
    cases = [
        ([[most]], [[1]], 0),
        ([[0, most]], [[1], [0]], 0),
        ([[0, most - 1, 0]], [[1], [0], [0]], 1),
        ([[most // 2, 0]], [[1], [1]], 1),
        ([[third - 1, 0, 0]], [[1], [1], [1]], 0),
        ([[third - 5, 1, 3]], [[0], [2], [1]], 2),
        ([[(1 << 31) - 1, 5, 0, 1 << 20]], [[1 << 28], [3], [(1 << 28) + 7], [0]], 1),
        ([[1, 0, 1]], [[(1 << 58) + 3], [1 << 58], [1]], 0),
        ([[3, 4, 5]], [[(1 << 55) - 1], [1], [(1 << 55) + 11]], 2),
        ([[0, 0, 0]], [[0], [1], [0]], 1),
    ]
    for counts, replicas, rank in cases:
        check_split(kernels, counts, replicas, rank)


@pytest.mark.long
def test_split_over_as_many_ranks_as_fit(fast_kernels):
    ranks = (48 * 1024 - 16) // 52
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 100, (1, ranks), generator=random)
    replicas = (torch.rand(ranks, 1, generator=random) < 0.2).long()
    check_split(fast_kernels, counts, replicas, 7, warps=8)
    check_split(fast_kernels, counts[:, :300], torch.ones(300, 1, dtype=torch.int64), 299, warps=8)


@pytest.mark.parametrize("ranks", [1, 3, 64, 128])
def test_split_where_some_or_all_ranks_hold_the_expert(kernels, ranks):
    """Up to 32 claims a warp gives the odd tokens, above that the block does."""
    random = torch.Generator().manual_seed(ranks)
    counts = torch.randint(0, 1000, (2, ranks), generator=random)
    replicas = torch.stack([torch.rand(ranks, generator=random) < 0.3, torch.ones(ranks).bool()], 1).long()
    replicas[ranks // 2] = 2
    for rank, warps, at_once in [(0, 1, min(ranks, 64)), (ranks // 2, 3, 2), (ranks - 1, 8, 7)]:
        check_split(kernels, counts, replicas, rank, warps=warps, at_once=at_once)


def test_experts_that_cannot_be_split_send_nothing(kernels):
    counts = torch.tensor([[3, 1], [-1, 7], [1, 7], [1 << 61, 1], [1, 1], [-(1 << 63), -1], [6, 0]])
    replicas = torch.tensor([[1, 1, 0, 1, -5, 1, 1], [1, 1, 0, 1, 7, 1, 2]])
    send, receive = split_on_kernel(kernels, counts, replicas, 0)
    send.equals(torch.tensor([[2, 1], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [2, 4]]))
    receive.equals(torch.tensor([[2, 0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0, 0]]))


def regroup_on_kernel(kernels, rows, counts, inverse, threads=64):
    sources, experts = counts.shape
    starts = [Buffer([sources * experts + 1], torch.int64) for _ in range(2)]
    sizes = (sources, experts)
    kernels("regroup_starts", 1, threads, threads * 8, counts, *starts, *sizes)
    out = Buffer(rows.shape, rows.dtype)
    order = [*starts, out, len(rows), rows[:1].nbytes, sources, experts]
    if inverse:
        order[:2], order[5:] = order[1::-1], order[:4:-1]
    kernels("regroup", 3, 64, 0, rows, *order)
    return starts, out


@pytest.mark.parametrize("width", [1, 2, 3, 4, 20, 40])  # of int16: units of 2, 4, 8 and 16 bytes
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.few(29)
def test_regroup(kernels, width, counts):
    counts = torch.tensor(counts)
    flat, turned = counts.flatten(), counts.t().flatten()
    rows = torch.arange(int(counts.sum()) * width).short().view(-1, width)
    for inverse in (False, True):
        starts, out = regroup_on_kernel(kernels, rows, counts, inverse)
        starts[0].equals(torch.cat([flat.new_zeros(1), flat.cumsum(0)]))
        starts[1].equals(torch.cat([flat.new_zeros(1), turned.cumsum(0)]))
        out.equals(ops.regroup(rows, counts, inverse))


@pytest.mark.parametrize("width", [130, 136, 300])  # of int16: a warp or more takes a row
def test_regroup_of_long_rows(kernels, width):
    random = torch.Generator().manual_seed(width)
    counts = torch.randint(0, 4, (13, 17), generator=random) * (torch.rand(13, 17, generator=random) < 0.3)
    rows = torch.arange(int(counts.sum()) * width).short().view(-1, width)
    for inverse in (False, True):
        _, out = regroup_on_kernel(kernels, rows, counts, inverse)
        out.equals(ops.regroup(rows, counts, inverse))
    past = torch.tensor([[0, 2, -1], [0, 0, 3]])
    _, out = regroup_on_kernel(kernels, rows[:9], past, False)
    out.equals(torch.cat([rows[:5], rows[:4] * 0]))


def test_regroup_of_more_segments_than_threads(kernels):
    counts = torch.randint(0, 3, (19, 23), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(int(counts.sum()) * 3).short().view(-1, 3)
    _, out = regroup_on_kernel(kernels, rows, counts, False, threads=32)
    out.equals(ops.regroup(rows, counts))


def test_rows_past_the_counts_are_zeros(kernels):
    rows = torch.arange(1, 11).short().view(5, 2)
    _, out = regroup_on_kernel(kernels, rows, torch.tensor([[1, -2], [2, 0]]), False)
    out.equals(torch.cat([rows[:3], rows[:2] * 0]))
    _, out = regroup_on_kernel(kernels, rows, torch.tensor([[2, 2], [2, 2]]), False)
    out.equals(torch.cat([rows[:2], rows[4:], rows[:1] * 0, rows[2:3]]))  # row 5 does not exist
    _, out = regroup_on_kernel(kernels, rows, torch.zeros(0, 3, dtype=torch.int64), True)
    out.equals(rows * 0)
