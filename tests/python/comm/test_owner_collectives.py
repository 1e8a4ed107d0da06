"""Tensors with one owner each, which sums their gradients and sends their weights, on real gloo."""

from __future__ import annotations

import torch

from evermoe.comm import owner_collectives
from evermoe.comm.group import Group
from evermoe.comm.owner_collectives import reduce_to_owners, send_from_owners
from support.ranks import run_threads

SIZE = 3
SHAPES = [[(3, 5), (7,)], [], [(), (2, 3, 4), (0,), (40,)]]
"""Shapes of the tensors of each owner: several, none, and an empty one."""
BUCKETS = [1, 100, 1 << 20]
"""Bytes of a bucket."""


def drawn(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for shapes in SHAPES]


def reduced(group):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensors_R = drawn(group.rank, dtype)
        reduce_to_owners(tensors_R, group)
        found.append(tensors_R)
    return found


def test_gradients_are_summed_at_their_owners_in_rank_order(tmp_path, monkeypatch):
    for nbytes in BUCKETS:
        monkeypatch.setattr(owner_collectives, "BUCKET_BYTES", nbytes)
        for rank, by_dtype in enumerate(run_threads(tmp_path, SIZE, reduced)):
            for dtype, tensors_R in zip((torch.float32, torch.bfloat16, torch.float64), by_dtype, strict=True):
                check_sums(rank, dtype, tensors_R)


def check_sums(rank, dtype, tensors_R):
    everyone = [drawn(r, dtype) for r in range(SIZE)]
    for owner, tensors in enumerate(tensors_R):
        for place, found in enumerate(tensors):
            wide = torch.promote_types(dtype, torch.float32)
            total = everyone[0][owner][place].to(wide)
            for r in range(1, SIZE):
                total = total + everyone[r][owner][place]
            expected = total.to(dtype) if owner == rank else everyone[rank][owner][place]
            assert torch.equal(found, expected)


def sent(group):
    """Weights of several types, one of them not contiguous."""
    numbers = drawn(group.rank, torch.float32)
    tensors_R = [
        [numbers[0][0].t(), numbers[0][1].bfloat16()],
        [torch.full((5,), group.rank, dtype=torch.int64), torch.tensor([group.rank == 1])],
        numbers[2],
    ]
    before = [tensor._version for tensor in tensors_R[group.rank]]
    send_from_owners(tensors_R, group)
    assert before == [tensor._version for tensor in tensors_R[group.rank]], (
        "replicas follow what steps alone have written"
    )
    return tensors_R


def test_weights_are_sent_bit_for_bit(tmp_path, monkeypatch):
    expected = [drawn(rank, torch.float32) for rank in range(SIZE)]
    for nbytes in BUCKETS:
        monkeypatch.setattr(owner_collectives, "BUCKET_BYTES", nbytes)
        for found in run_threads(tmp_path, SIZE, sent):
            assert torch.equal(found[0][0], expected[0][0][0].t())
            assert torch.equal(found[0][1], expected[0][0][1].bfloat16())
            assert (found[1][0].tolist(), found[1][1].item()) == ([1] * 5, True)
            assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2][2], strict=True))


def kept(group):
    tensors_R = [[torch.ones(2)]] if group.size == 1 else [[], []]
    reduce_to_owners(tensors_R, group)
    send_from_owners(tensors_R, group)
    return tensors_R


def test_a_single_rank_and_no_tensors(tmp_path):
    assert torch.equal(kept(Group())[0][0], torch.ones(2))
    assert run_threads(tmp_path, 2, kept) == [[[], []]] * 2


def test_a_bucket_takes_about_the_same_size_from_each_owner(monkeypatch):
    flat_R = [[torch.arange(3)], [torch.arange(1)]]
    monkeypatch.setattr(owner_collectives, "BUCKET_BYTES", 2 * 2 * 8)
    pieces = [[[piece.tolist() for piece in each] for each in pieces] for pieces in owner_collectives._rounds(flat_R)]
    assert pieces == [[[[0, 1]], [[0]]], [[[2]], []]]
