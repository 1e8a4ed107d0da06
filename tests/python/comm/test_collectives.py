"""Collectives of the group and the reduction of gradients, on real connections."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from evermoe.comm import mesh
from evermoe.comm.collectives import ExpertReducer, Slice, sum_flat
from evermoe.comm.gather import share_json
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from support.ranks import run_threads


def collectives(group):
    rank, size = group.rank, group.size
    own = torch.arange(3.0) + 10 * rank
    gathered = group.all_gather(own)
    texts = group.all_gather_bytes(b"x" * rank)
    empty = group.all_gather_bytes(b"")
    # rank r sends r + d + 1 rows to rank d, each with the number 100 r + d
    send = [rank + d + 1 for d in range(size)]
    receive = [s + rank + 1 for s in range(size)]
    rows = torch.cat([torch.full((n, 2), 100.0 * rank + d) for d, n in enumerate(send)])
    arrived = group.all_to_all(rows, send, receive)
    nothing = group.all_to_all(rows[:0], [0] * size, [0] * size)
    # two messages to each other rank, in order, and a view into a larger tensor
    others = [r for r in range(size) if r != rank]
    boxes = torch.zeros(size, 2, dtype=torch.uint8)
    sends = [(torch.tensor([10 * rank + i], dtype=torch.uint8), d) for d in others for i in range(2)]
    receives = [(boxes[s, i : i + 1], s) for s in others for i in range(2)]
    group.exchange(sends, receives)
    group.exchange([], [])
    shared = share_json(group, {"rank": rank, "ü": [(None, 0.1)] * 1000 * rank}, 1)
    return {
        "shared": shared,
        "sum": group.all_reduce(own.clone()),
        "gathered": gathered,
        "lengths": [len(text) for text in texts + empty],
        "arrived": arrived,
        "nothing": nothing,
        "boxes": boxes,
    }


def test_collectives(tmp_path):
    size = 3
    for rank, found in enumerate(run_threads(tmp_path, size, collectives)):
        everyone = torch.stack([torch.arange(3.0) + 10 * r for r in range(size)])
        assert torch.equal(found["gathered"], everyone)
        assert torch.equal(found["sum"], everyone.sum(0))
        assert found["shared"] == {"rank": 1, "ü": [[None, 0.1]] * 1000}
        assert found["lengths"] == [0, 1, 2, 0, 0, 0]
        expected = [torch.full((s + rank + 1, 2), 100.0 * s + rank) for s in range(size)]
        assert torch.equal(found["arrived"], torch.cat(expected))
        assert found["nothing"].shape == (0, 2)
        assert found["boxes"].tolist() == [[10 * s, 10 * s + 1] if s != rank else [0, 0] for s in range(size)]


def test_a_group_of_one_needs_no_network():
    group = Group()
    rows = torch.randn(4, 2)
    assert torch.equal(group.all_reduce(rows.clone()), rows)
    assert torch.equal(group.all_gather(rows), rows[None])
    assert group.all_gather_bytes(b"abc") == [b"abc"]
    assert torch.equal(group.all_to_all(rows, [4], [4]), rows)
    group.exchange([], [])


@pytest.mark.parametrize(("send", "receive"), [([3], [4]), ([4, 0], [4]), ([4], [2, 2])])
def test_wrong_counts(send, receive):
    with pytest.raises(ValueError, match="all_to_all among 1 member: expected 1 counts each way"):
        Group().all_to_all(torch.randn(4, 2), send, receive)


def reduce_strided(group, elements):
    memory = torch.arange(2.0 * elements).view(2, -1)
    group.all_reduce(memory[:, ::2])
    with pytest.raises(ValueError, match="expected a contiguous tensor on the CPU"):
        group.exchange([(memory[:, ::2], 1 - group.rank)], [])
    return memory


@pytest.mark.parametrize("elements", [8, 60_000])
def test_strided_tensors_are_summed_without_their_gaps_and_exchanged_by_none(tmp_path, elements):
    expected = torch.arange(2.0 * elements).view(2, -1)
    expected[:, ::2] *= 2
    for found in run_threads(tmp_path, 2, reduce_strided, elements):
        assert torch.equal(found, expected)


def drop_and_try(group):
    """Rank 1 drops the group: the others get an error at once, and no rank can use the group any more."""
    if group.rank == 1:
        group.drop("for the test")
        group.drop("a second time")
    messages = []
    calls = [
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.all_gather(torch.ones(1)),
        lambda: group.all_gather_bytes(b"x"),
        lambda: group.all_to_all(torch.ones(3), [1, 1, 1], [1, 1, 1]),
        lambda: group.exchange([(torch.ones(1), 0)], []),
    ]
    for call in calls:
        with pytest.raises(PeerLost) as found:
            call()
        messages.append(str(found.value))
    group.all_reduce = lambda tensor: tensor  # the harness's farewell
    return messages


def test_a_dropped_group_raises_peer_lost_everywhere(tmp_path):
    results = run_threads(tmp_path, 3, drop_and_try)
    assert all("among 3 members failed: " in message for messages in results for message in messages)
    assert all(message.endswith("for the test") for message in results[1])


def wait_for_a_slow_peer(group, place):
    """Members connect within a shorter time than they wait for each other afterwards."""
    store = dist.FileStore(place, group.size)
    group.rebuild(store, group.rank, group.size, torch.device("cpu"), timedelta(seconds=20))
    box = torch.zeros(1)
    if group.rank == 1:
        time.sleep(1.5)
    group.exchange([(torch.ones(1), 0)] if group.rank == 1 else [], [] if group.rank == 1 else [(box, 1)])
    if group.rank == 1:
        time.sleep(1.5)
    group.all_reduce(torch.ones(1))
    return box


def test_a_slow_member_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "CONNECT_SECONDS", 1.0)
    assert run_threads(tmp_path, 2, wait_for_a_slow_peer, str(tmp_path / "second"))[0].item() == 1


def meet_in_different_collectives(group, place):
    group.rebuild(dist.FileStore(place, group.size), group.rank, group.size, torch.device("cpu"), timedelta(seconds=2))
    calls = [
        lambda: group.all_reduce(torch.ones(6, dtype=torch.float64)),
        lambda: group.all_gather(torch.ones(100, dtype=torch.int64)),
        lambda: group.all_to_all(torch.ones(27), [9, 9, 9], [9, 9, 9]),
    ]
    with pytest.raises(PeerLost):
        calls[group.rank]()
    group.all_reduce = lambda tensor: tensor  # the harness's farewell


def test_members_in_different_collectives_wait_until_the_time_limit(tmp_path):
    """They must not take each other's messages for their own."""
    run_threads(tmp_path, 3, meet_in_different_collectives, str(tmp_path / "second"))


def reduce_and_gather(group, values):
    mine = values[group.rank]
    return group.all_reduce(mine.clone()), group.all_gather(mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_sums_are_those_in_the_order_of_ranks_on_all_members(tmp_path, dtype):
    """Around the sizes at which each member sums alone, or one part of several."""
    small, part = mesh.SMALL_BYTES // dtype.itemsize, mesh.PART_BYTES // dtype.itemsize
    for n in (0, 1, small, small + 1, 3 * part - 1, 3 * part + 1, 7 * part):
        generator = torch.Generator().manual_seed(n)
        values = [(100 * torch.randn(n, generator=generator)).to(dtype) for _ in range(3)]
        wide = [each.float() if dtype == torch.bfloat16 else each for each in values]
        total = (wide[0] + wide[1] + wide[2]).to(dtype)
        for reduced, gathered in run_threads(tmp_path, 3, reduce_and_gather, values):
            assert torch.equal(gathered, torch.stack(values))
            assert torch.equal(reduced, total)


def reduce_in_place(group, columns):
    table = torch.full((3, columns), float(group.rank), requires_grad=True)
    group.all_reduce(table[:, 1:])
    return table.detach()


@pytest.mark.parametrize("columns", [4, 1 << 14])
def test_a_part_of_a_tensor_is_summed_in_place(tmp_path, columns):
    for table in run_threads(tmp_path, 2, reduce_in_place, columns):
        assert bool((table[:, 1:] == 1).all())
        assert table[0, 0].item() in (0, 1)


# ---- gradients of experts

LENGTHS = [10, 2]
"""The second layer's experts have fewer elements than hosts."""


def matrices(seed, ranks):
    """Draw two layers of 6 and 3 experts; each expert has a host, and a rank may host none of a layer."""
    random = np.random.default_rng(seed)
    found = []
    for experts in (6, 3):
        matrix = random.integers(0, 3, (ranks, experts)) * random.integers(0, 2, (ranks, experts))
        matrix[random.integers(0, ranks, experts), np.arange(experts)] += 1
        found.append(matrix)
    return found


def gradient(layer, rank, expert):
    generator = torch.Generator().manual_seed(100 * layer + 10 * rank + expert)
    return torch.randn(LENGTHS[layer], generator=generator)


def reduce_experts(group, placed, dtype, bucket_bytes):
    hosted = [np.flatnonzero(matrix[group.rank]).tolist() for matrix in placed]
    gradients = []
    for layer, experts in enumerate(hosted):
        rows = [gradient(layer, group.rank, e) for e in experts]
        gradients.append(torch.stack(rows).to(dtype) if rows else torch.empty(0, LENGTHS[layer], dtype=dtype))
    ExpertReducer(placed, LENGTHS, group.rank, bucket_bytes).reduce(gradients, group)
    return gradients


@pytest.mark.parametrize(
    ("ranks", "drawn"), [(2, [(0, 1 << 20)]), (3, [(1, 1 << 20)]), (4, [(2, 28), (3, 28), (3, 1)])], ids=["2", "3", "4"]
)
def test_expert_gradients_are_summed_in_rank_order(tmp_path, ranks, drawn):
    cases = [(matrices(seed, ranks), dtype, n) for seed, n in drawn for dtype in (torch.float32, torch.bfloat16)]
    for placed, dtype, n in cases:
        results = run_threads(tmp_path, ranks, reduce_experts, placed, dtype, n)
        for layer, matrix in enumerate(placed):
            for e in range(matrix.shape[1]):
                hosts = np.flatnonzero(matrix[:, e]).tolist()
                total = torch.zeros(LENGTHS[layer])
                for rank in hosts:
                    total += gradient(layer, rank, e).to(dtype).float()
                for rank in hosts:
                    row = results[rank][layer][int(np.count_nonzero(matrix[rank, :e]))]
                    assert torch.equal(row, total.to(dtype)), (layer, e, rank)


def test_example_of_the_documentation():
    """Expert 0 of 10 elements, hosted by ranks 1, 2 and 4; the view of rank 2."""
    reducer = ExpertReducer([np.array([[0], [1], [1], [0], [2]])], [10], 2)
    (only,) = reducer._rounds
    assert only.mine == [(Slice(0, 0, 3, 6), [1, 2, 4])]
    assert only.theirs == [[], [Slice(0, 0, 0, 3)], [], [], [Slice(0, 0, 6, 10)]]


def test_rows_with_the_same_hosts_are_one_part():
    """Two ranks with all of six experts, and one with the third alone."""
    matrix = np.array([[1] * 6, [1] * 6, [0, 0, 1, 0, 0, 0]])
    (only,) = ExpertReducer([matrix], [6], 0)._rounds
    assert only.pairs == [[], [Slice(0, 0, 0, 6, 2), Slice(0, 3, 0, 6, 3)], []]
    assert only.mine == [(Slice(0, 2, 0, 2), [0, 1, 2])]
    assert only.theirs == [[], [Slice(0, 2, 2, 4)], [Slice(0, 2, 4, 6)]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("elements", [1, 7, 12])
def test_a_round_takes_at_most_a_bucket_from_each_rank(seed, elements):
    placed = matrices(seed, 4)
    reducers = [ExpertReducer(placed, LENGTHS, rank, 4 * elements) for rank in range(4)]
    assert len({len(reducer._rounds) for reducer in reducers}) == 1
    covered = [np.zeros((layer, experts), int) for layer, experts in zip(LENGTHS, (6, 3), strict=True)]
    for rounds in zip(*(reducer._rounds for reducer in reducers), strict=True):
        for each in rounds:
            parts = [part for part, _ in each.mine] + [part for some in (*each.theirs, *each.pairs) for part in some]
            assert sum(part.elements for part in parts) <= elements
    for rank, reducer in enumerate(reducers):
        shards = [each for only in reducer._rounds for each in only.mine]
        pairs = [(part, other) for only in reducer._rounds for other, parts in enumerate(only.pairs) for part in parts]
        for part, hosts in [*shards, *((part, sorted((rank, other))) for part, other in pairs)]:
            for row in range(part.row, part.row + part.rows):
                expert = np.flatnonzero(placed[part.layer][rank])[row]
                assert hosts == np.flatnonzero(placed[part.layer][:, expert]).tolist()
                covered[part.layer][part.start : part.stop, expert] += 1
    for layer, found in enumerate(covered):
        hosts = (placed[layer] > 0).sum(0)
        assert (found == np.where(hosts == 2, 2, hosts > 1)).all(), "by both of two hosts, or by one of more"


# ---- other gradients


def sum_halves(group, dtype):
    """Values of which a sum in 16 bits would lose the small ones, at any place of an uneven length."""
    flat = torch.full((7,), 1.0 if group.rank else torch.tensor(2.0) / torch.finfo(dtype).eps, dtype=dtype)
    sum_flat(flat, group)
    return flat


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_float32(tmp_path, dtype):
    for found in run_threads(tmp_path, 3, sum_halves, dtype):
        assert found.dtype == dtype
        assert (found == 2.0 / torch.finfo(dtype).eps + 2.0).all()


def count_expert_bytes(group, dtype):
    nbytes, all_to_all = [], group.all_to_all
    group.all_to_all = lambda rows, *counts: nbytes.append(rows.nbytes) or all_to_all(rows, *counts)
    reduce_experts(group, [np.ones((2, 3), np.int64), np.ones((2, 1), np.int64)], dtype, 1 << 20)
    return sum(nbytes)


def test_halves_of_experts_travel_with_16_bits(tmp_path):
    wide, half = (sum(run_threads(tmp_path, 2, count_expert_bytes, t)) for t in (torch.float32, torch.bfloat16))
    assert wide == 2 * half > 0


def count_exchanges(group, hosts):
    exchanges, all_to_all = [], group.all_to_all
    group.all_to_all = lambda *call: exchanges.append(1) or all_to_all(*call)
    matrix = np.zeros((3, 3), np.int64)
    for expert, ranks in enumerate(hosts):
        matrix[ranks, expert] = 1
    reduce_experts(group, [matrix, np.eye(3, dtype=np.int64)], torch.float32, 1 << 20)
    return len(exchanges)


@pytest.mark.parametrize(
    ("hosts", "exchanges"), [(([0], [1], [2]), 0), (([0, 1], [1, 2], [0, 2]), 1), (([0, 1], [2], [0, 1, 2]), 2)]
)
def test_gradients_of_two_hosts_travel_once(tmp_path, hosts, exchanges):
    assert run_threads(tmp_path, 3, count_exchanges, hosts) == [exchanges] * 3


def sum_changed(group):
    gradients, all_to_all = [torch.full((1, 4), group.rank + 1.0)], group.all_to_all

    def exchange(*call):
        found = all_to_all(*call)
        gradients[0].data.mul_(10)  # as a script may while backward computes other gradients
        return found

    group.all_to_all = exchange
    [[(_, total)]] = ExpertReducer([np.ones((2, 1), np.int64)], [4], group.rank).sums(gradients, group)
    return total.flatten().tolist()


def test_both_hosts_sum_what_was_sent(tmp_path):
    assert run_threads(tmp_path, 2, sum_changed) == [[3.0] * 4] * 2


class Ops(TorchDispatchMode):
    """Counts ops that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Zeros(Group):
    """Four ranks, of which the others bring zeros."""

    def __init__(self):
        super().__init__()
        self.size, self.is_alone = 4, False

    def all_to_all(self, rows, send_counts, receive_counts):
        return rows.new_zeros(sum(receive_counts))


def ops_of_sums(experts):
    pairs = list(combinations(range(4), 2))
    matrix = np.zeros((4, experts), np.int64)
    for expert in range(experts):
        matrix[list(pairs[expert % len(pairs)]), expert] = 1
    gradients = torch.ones(int(matrix[0].sum()), 10, dtype=torch.bfloat16)
    with Ops() as ops:
        ExpertReducer([matrix], [10], 0).reduce([gradients], Zeros())
    return ops.count


def test_launches_do_not_grow_with_the_number_of_experts():
    assert ops_of_sums(6) == ops_of_sums(96)
