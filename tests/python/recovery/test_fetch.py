"""Transfers of a recovery: each rank gets what the plan says, in rounds of bounded size."""

from __future__ import annotations

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


@pytest.mark.parametrize(("round_bytes", "rounds"), [(1, [1] * 6), (8, [3, 1, 2]), (100, [6])])
def test_rounds_are_bounded(monkeypatch, round_bytes, rounds):
    monkeypatch.setattr(fetch, "ROUND_BYTES", round_bytes)
    found = Fetch(Group(), SIZES, lambda transfer, out: None)
    assert [len(part) for part in found._rounds(TRANSFERS[1:])] == rounds
