"""Shared memory that a spare reserves: it becomes that of arenas, or goes back."""

import os
import re
import shutil
import uuid
from pathlib import Path

import pytest

from evermoe._native import Arena
from evermoe.copies.snapshot.spare_room import SpareRoom, release_all

MEBIBYTE = 1 << 20


@pytest.fixture
def folder(tmp_path):
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    made = root / f"evermoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield made / "node"
    shutil.rmtree(made, ignore_errors=True)


def blocks(path):
    return os.stat(path).st_blocks * 512


def mapped(path):
    """Bytes of a file that are in this process's page tables."""
    maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    mine = [each for each in maps if each.split("\n", 1)[0].split()[4:5] == [str(os.stat(path).st_ino)]]
    assert mine
    return sum(1024 * int(re.search(r"^Rss: +(\d+) kB$", each, re.MULTILINE)[1]) for each in mine)


@pytest.mark.parametrize("reserves", [True, False])
@pytest.mark.parametrize("part", [0.5, 1.0, 2.0], ids=["too small", "as large", "too large"])
def test_an_arena_has_the_room_that_was_reserved(folder, part, reserves):
    """It equals a new one: without versions, and with all its space once that is reserved."""
    units = [("dense", 2 * MEBIBYTE), ("expert", MEBIBYTE)]
    other = Arena.create(str(folder / "new"), "{}", units)
    room = SpareRoom(folder, "me")
    room.reserve_files([round(part * os.path.getsize(folder / "new"))])
    arena = Arena.create(str(folder / "in-room"), "{}", units, reserves=reserves, room=room.take_file(6 * MEBIBYTE))
    assert room.nbytes == 0
    assert os.path.getsize(arena.path) == os.path.getsize(other.path)
    if not reserves:
        assert blocks(arena.path) >= min(part, 1.0) * os.path.getsize(arena.path) - MEBIBYTE
        assert mapped(arena.path) < MEBIBYTE, "its page faults come with the reservation"
        while not arena.reserve(MEBIBYTE):
            pass
    assert blocks(arena.path) == blocks(other.path)
    both, one = mapped(other.path), mapped(arena.path)
    assert one == both if reserves else both / 2 <= one < both / 2 + MEBIBYTE
    assert arena.versions() == []
    index = arena.begin(7)
    arena.buffer(index)[-MEBIBYTE:] = 1
    arena.commit(index)
    assert Arena.open(arena.path).versions() == [(index, 7)]
    while not arena.reserve(MEBIBYTE):  # those of the second buffer come before its version
        pass
    assert mapped(arena.path) == both
    assert [path.name for path in sorted(folder.iterdir())] == ["in-room", "new"]


def test_the_room_that_fits_best_is_taken_and_the_rest_goes_back(folder):
    room = SpareRoom(folder, "me")
    room.reserve_files([MEBIBYTE, 3 * MEBIBYTE, 2 * MEBIBYTE])
    taken = [room.take_file(nbytes) for nbytes in (2 * MEBIBYTE - 1, 9 * MEBIBYTE)]
    assert [path.stat().st_size for path in taken] == [2 * MEBIBYTE, 3 * MEBIBYTE]
    room.release()
    assert sorted(folder.iterdir()) == sorted(taken)
    assert room.take_file(1) is None


def test_another_member_of_the_node_may_take_it_back(folder):
    room = SpareRoom(folder, "me")
    room.reserve_files([MEBIBYTE])
    assert release_all(folder)
    assert not release_all(folder)
    assert room.take_file(MEBIBYTE) is None


def test_what_trainers_of_the_node_have_stays_free_for_them_once_more(folder, monkeypatch, caplog):
    Arena.create(str(folder / "1.arena"), "{}", [("dense", 2 * MEBIBYTE)])
    room = SpareRoom(folder, "me")
    for free, reserved in ((4 * MEBIBYTE, 0), (8 * MEBIBYTE, MEBIBYTE)):
        monkeypatch.setattr("evermoe.copies.snapshot.spare_room.free_bytes", lambda _, free=free: free)
        room.reserve_files([MEBIBYTE])
        assert room.nbytes == reserved
    assert "this spare reserves no memory: it would need 1048576 bytes" in caplog.text
