"""A checkpoint of several members: all learn of it, and none waits too long for another's disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find
from evermoe.checkpoint.checkpoint_write import CheckpointWrite
from evermoe.checkpoint.owner import Owner
from evermoe.errors import PeerLost, PersistFailed
from support.models import make
from support.ranks import members, run_threads

LIMIT = 10.0
SHORT = 1.0


def begin(group, place, attempt, change=lambda folder: None):
    """Each of two members writes every second unit."""
    state = make("sgd")[2]
    folder = CheckpointFolder(Path(place), Owner("job", state.catalog.layout), f"m{group.rank}")
    change(folder)
    mine = [unit.name for unit in state.catalog.units][group.rank :: 2]
    return CheckpointWrite(folder, state, mine, 1 << 40 | 3, 1, group, attempt)


def refuse(folder):
    def write(*_):
        raise OSError(28, "No space left on device")

    folder.write = write


def write_two(group, folder, place):
    """The second one is refused by rank 1's disk."""
    found, _ = members(group, folder, LIMIT)
    path = begin(found, place, "first").wait_published()
    with pytest.raises(PersistFailed) as refused:
        begin(found, place, "second", refuse if found.rank else lambda folder: None).wait_published()
    return str(path), str(refused.value)


def test_all_members_know_what_became_of_it(tmp_path):
    (tmp_path / "couriers").mkdir()
    place = tmp_path / "saved"
    ranks = run_threads(tmp_path, 2, write_two, str(tmp_path / "couriers"), str(place))
    assert ranks == [(str(place / "step-00000003"), "rank 1: [Errno 28] No space left on device")] * 2
    assert list(find(place).values()) == [place / "step-00000003"]


def hold_up(group, folder, place):
    """Rank 1's disk takes longer than rank 0 waits."""
    found, _ = members(group, folder, SHORT)
    may_write = threading.Event()

    def hold(folder):
        write = folder.write
        folder.write = lambda *of: may_write.wait(LIMIT) and write(*of)

    write = begin(found, place, "late", hold if found.rank else lambda folder: None)
    if found.rank == 0:
        with pytest.raises(PeerLost):
            write.wait_published()
    group.all_reduce(torch.zeros(1))  # rank 0 has given up
    may_write.set()
    if found.rank == 1:
        with pytest.raises(PeerLost):
            write.wait_published()
    group.all_reduce(torch.zeros(1))
    return found.timed_out, found.broken


def test_a_member_whose_disk_hangs_is_waited_for_as_long_as_in_a_collective(tmp_path):
    (tmp_path / "couriers").mkdir()
    first, second = run_threads(tmp_path, 2, hold_up, str(tmp_path / "couriers"), str(tmp_path / "saved"))
    assert first == (True, "a checkpoint has stopped: a member is silent, or its disk is")
    assert not second[0]
    assert find(tmp_path / "saved") == {}
