"""Transfers of a recovery: each rank gets what the plan says, in rounds of bounded size."""

from __future__ import annotations

import random

import pytest
import torch

from evermoe.comm.group import Group
from evermoe.recovery import fetch
from evermoe.recovery.fetch import Fetch, Transfer
from support.ranks import run_ranks

SIZES = {"a": 3, "b": 0, "c": 5, "d": 4}
TRANSFERS = [
    Transfer("a", 0, 0, "snapshot"),
    Transfer("a", 0, 2, "active"),
    Transfer("b", 1, 0, "active"),
    Transfer("c", 1, 2, "replayed"),
    Transfer("c", 1, 0, "replayed"),
    Transfer("d", 2, 0, "active"),
    Transfer("d", 2, 1, "active"),
]


def bytes_of(transfer):
    """Different for each unit and each source."""
    return torch.arange(SIZES[transfer.unit], dtype=torch.uint8) + 16 * ord(transfer.unit) % 97 + 50 * transfer.source


def all_fetched(group, round_bytes):
    fetch.ROUND_BYTES = round_bytes
    read = []

    def copy(transfer, out):
        read.append((transfer.unit, transfer.source))
        out.copy_(bytes_of(transfer))

    found = Fetch(group, SIZES, copy)
    local = found.local(TRANSFERS)
    remote = found.remote(TRANSFERS)
    assert {source for _, source in read} <= {group.rank}
    return local, remote


@pytest.mark.parametrize("round_bytes", [1, 8, 1 << 20])
def test_every_rank_gets_its_units(tmp_path, round_bytes):
    for rank, (local, remote) in enumerate(run_ranks(tmp_path, 3, all_fetched, round_bytes)):
        expected = {t.unit: bytes_of(t).tolist() for t in TRANSFERS if t.destination == rank}
        assert {unit: data.tolist() for unit, data in (local | remote).items()} == expected
        assert list(local) == (["a"] if rank == 0 else [])


def test_rounds_as_documented():
    sizes = {f"{number}": 100 << 20 for number in range(5)}
    ends = [(0, 1), (0, 2), (0, 3), (2, 1), (3, 2)]
    transfers = [Transfer(f"{number}", *each, "active") for number, each in enumerate(ends)]
    rounds = Fetch(Group(), sizes, lambda transfer, out: None)._rounds(transfers)
    assert [[int(each.unit) for each in part] for part in rounds] == [[0, 1, 3, 4], [2]]


@pytest.mark.parametrize("round_bytes", [1, 8, 20, 1000])
def test_no_rank_sends_or_receives_more_than_a_round_holds(monkeypatch, round_bytes):
    monkeypatch.setattr(fetch, "ROUND_BYTES", round_bytes)
    draw = random.Random(round_bytes)
    sizes = {f"u{number}": draw.randint(0, 12) for number in range(200)}
    transfers = [Transfer(unit, *draw.sample(range(6), 2), "active") for unit in sizes]
    rounds = Fetch(Group(), sizes, lambda transfer, out: None)._rounds(transfers)
    assert sorted(each for part in rounds for each in part) == sorted(transfers)
    for part in rounds:
        for end in ("source", "destination"):
            for rank in range(6):
                own = [sizes[each.unit] for each in part if getattr(each, end) == rank]
                assert sum(own) <= round_bytes or sum(size > 0 for size in own) == 1
    busiest = max(
        sum(sizes[each.unit] for each in transfers if getattr(each, end) == rank)
        for end in ("source", "destination")
        for rank in range(6)
    )
    assert len(rounds) <= 1 + 4 * busiest / round_bytes, "not one rank after the other"
