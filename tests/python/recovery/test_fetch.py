"""Transfers of a recovery: each rank gets what the plan says, in messages of bounded size."""

from __future__ import annotations

import time

import pytest
import torch

from evermoe._native import digest
from evermoe.errors import PeerLost
from evermoe.recovery import fetch
from evermoe.recovery.fetch import Fetch, Transfer, in_turn
from support.harness import PATIENCE
from support.ranks import connected, members, run_threads

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
    return (
        torch.arange(SIZES[transfer.unit], dtype=torch.uint8) + 16 * ord(transfer.unit[0]) % 97 + 50 * transfer.source
    )


def all_fetched(group):
    group.transport = connected(group, PATIENCE)
    read = []

    def copy(transfer, out):
        read.append((transfer.unit, transfer.source))
        out.copy_(bytes_of(transfer))

    found = Fetch(group, lambda transfer: SIZES[transfer.unit], copy)
    local = found.local(TRANSFERS)
    remote = found.remote(TRANSFERS)
    assert {source for _, source in read} <= {group.rank}
    assert found.digests() == {unit: digest(data.numpy()) for unit, data in (local | remote).items()}
    return local, remote


@pytest.mark.parametrize(("sending_bytes", "message_bytes"), [(1, 2), (8, 1), (1 << 20, 1 << 20)])
def test_every_rank_gets_its_units(tmp_path, monkeypatch, sending_bytes, message_bytes):
    monkeypatch.setattr(fetch, "SENDING_BYTES", sending_bytes)
    monkeypatch.setattr(fetch, "MESSAGE_BYTES", message_bytes)
    for rank, (local, remote) in enumerate(run_threads(tmp_path, 3, all_fetched)):
        expected = {t.unit: bytes_of(t).tolist() for t in TRANSFERS if t.destination == rank}
        assert {unit: data.tolist() for unit, data in (local | remote).items()} == expected
        assert list(local) == (["a"] if rank == 0 else [])


def one_cannot_read(group, folder):
    """Rank 0 cannot read what it has promised to rank 1; rank 2 has nothing to do."""
    group, _ = members(group, folder, PATIENCE)

    def read(transfer, out):
        raise RuntimeError("it cannot be read")

    with pytest.raises(RuntimeError if group.rank == 0 else PeerLost) as raised:
        Fetch(group, lambda transfer: 5, read).remote([Transfer("c", 0, 1, "active")])
    return str(raised.value), group.broken is not None


def test_a_rank_that_cannot_read_ends_the_wait_of_all(tmp_path):
    first, *others = run_threads(tmp_path, 3, one_cannot_read, str(tmp_path))
    assert first == ("it cannot be read", True)
    assert all("failed" in reason or "cannot send" in reason for reason, _ in others), others
    assert all(is_broken for _, is_broken in others)


def one_is_silent(group, folder):
    """Rank 1 waits for what rank 0 never sends, as rank 0 never comes."""
    mine, _ = members(group, folder, 0.5)
    if mine.rank == 1:
        with pytest.raises(PeerLost):
            Fetch(mine, lambda transfer: 5, copy_slowly).remote([Transfer("c", 0, 1, "active")])
    group.all_reduce(torch.zeros(1))  # rank 0 lives until then
    return mine.broken or ""


def test_a_silent_rank_is_given_up_after_the_limit(tmp_path):
    _, second = run_threads(tmp_path, 2, one_is_silent, str(tmp_path))
    assert "timed out" in second.lower()


def copy_slowly(transfer, out):
    time.sleep(0.2)
    out.copy_(bytes_of(transfer))


def one_is_slow(group, folder):
    """Rank 0 needs longer for what it sends to rank 1 than a collective waits; rank 2 has nothing to do."""
    mine, _ = members(group, folder, 1.0)
    transfers = [Transfer(f"unit {number}", 0, 1, "active") for number in range(12)]
    found = Fetch(mine, lambda transfer: 4, copy_slowly).remote(transfers)
    mine.all_reduce(torch.zeros(1))
    return len(found)


def test_a_fetch_may_take_longer_than_a_collective_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SENDING_BYTES", 1)
    for number in range(12):
        monkeypatch.setitem(SIZES, f"unit {number}", 4)
    assert run_threads(tmp_path, 3, one_is_slow, str(tmp_path)) == [0, 12, 0]


def test_destinations_take_turns_as_documented():
    transfers = [Transfer(str(number), 0, rank, "active") for number, rank in enumerate([1, 1, 1, 2, 3, 3])]
    assert [each.destination for each in in_turn(transfers)] == [1, 2, 3, 1, 3, 1]
    assert [each.unit for each in in_turn(transfers) if each.destination == 1] == ["0", "1", "2"]


def one_cannot_read_its_own(group, folder):
    """Rank 1 cannot read its own copy while rank 0 sends it something."""
    mine, _ = members(group, folder, PATIENCE)

    def meanwhile():
        if mine.rank == 1:
            raise RuntimeError("it cannot be read")

    with pytest.raises(RuntimeError if mine.rank == 1 else PeerLost) as raised:
        Fetch(mine, lambda transfer: 5, copy_slowly).remote([Transfer("c", 0, 1, "active")], meanwhile)
    return str(raised.value), mine.broken is not None


def test_a_rank_that_cannot_read_what_it_has_ends_the_wait_of_all(tmp_path):
    others, own = run_threads(tmp_path, 2, one_cannot_read_its_own, str(tmp_path))
    assert own == ("it cannot be read", True)
    assert others[1], others


def lend_some(group):
    """Rank 0 lends `c`, and not all of `d`; it has both for itself and for rank 1."""
    group.transport = connected(group, PATIENCE)
    lent = {"c": bytes_of(Transfer("c", 0, 0, "replayed")), "d": torch.zeros(1, dtype=torch.uint8)}
    read = []

    def copy(transfer, out):
        read.append(transfer.unit)
        out.copy_(bytes_of(transfer))

    transfers = [Transfer(unit, 0, rank, "replayed") for unit in lent for rank in (0, 1)]
    found = Fetch(group, lambda transfer: SIZES[transfer.unit], copy, lambda transfer: lent[transfer.unit])
    local = found.local(transfers)
    remote = found.remote(transfers)
    assert found.digests() == {unit: digest(data.numpy()) for unit, data in (local | remote).items()}
    assert group.rank == 1 or local["c"] is lent["c"], "nothing is copied"
    return read, {unit: data.tolist() for unit, data in (local | remote).items()}


def test_memory_that_is_lent_is_not_read(tmp_path):
    expected = {unit: bytes_of(Transfer(unit, 0, 0, "replayed")).tolist() for unit in "cd"}
    assert run_threads(tmp_path, 2, lend_some) == [(["d", "d"], expected), ([], expected)]
