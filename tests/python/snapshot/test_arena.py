"""Arenas: a killed process leaves its last complete version, and nothing wrong is taken for complete."""

import os
import random
import resource
import stat

import numpy as np
import pytest

from evermoe import _native
from evermoe._native import Arena, CopyEngine
from evermoe.errors import CaptureCancelled, CorruptCopy
from support import disks

UNITS = [("dense", 1000), ("empty", 0), ("layers.0.experts.1", 300_000)]


@pytest.fixture
def path(tmp_path):
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    name = f"{folder}/evermoe-test-{os.getpid()}-{random.randrange(1 << 40):x}/job/rank0"
    yield name
    for made in (name, name + ".new"):
        if os.path.exists(made):
            os.unlink(made)
    for parent in (os.path.dirname(name), os.path.dirname(os.path.dirname(name))):
        if os.path.isdir(parent):
            os.rmdir(parent)


def fill(arena, index, value):
    """Write each unit with bytes that depend on the value and the unit."""
    buffer = arena.buffer(index)
    for position, (_, offset, nbytes) in enumerate(arena.units()):
        buffer[offset : offset + nbytes] = (value * 31 + position) % 251


def holds(arena, index, value):
    buffer = arena.buffer(index)
    return all(
        (buffer[offset : offset + nbytes] == (value * 31 + position) % 251).all()
        for position, (_, offset, nbytes) in enumerate(arena.units())
    )


def write(arena, version):
    index = arena.begin(version)
    fill(arena, index, version)
    arena.commit(index)
    return index


def test_two_versions_newest_first(path):
    arena = Arena.create(path, '{"job": "ü"}', UNITS)
    assert arena.versions() == []
    for version in (1, 2, (3 << 40) | 9):
        write(arena, version)
    assert [version for _, version in arena.versions()] == [(3 << 40) | 9, 2]
    again = Arena.open(path)
    assert (again.meta, again.path, again.versions()) == ('{"job": "ü"}', path, arena.versions())
    assert again.units() == arena.units()
    for index, version in again.versions():
        assert holds(again, index, version)
        assert again.verify(index) == []


def test_units_are_aligned_and_apart(path):
    arena = Arena.create(path, "", UNITS)
    end = 8 * len(UNITS)
    for (name, offset, nbytes), (expected_name, expected_bytes) in zip(arena.units(), UNITS, strict=True):
        assert (name, nbytes) == (expected_name, expected_bytes)
        assert offset % 64 == 0
        assert offset >= end
        end = offset + nbytes
    buffer = arena.buffer(0)
    assert buffer.shape == (arena.payload_bytes,)
    assert arena.payload_bytes >= end
    assert buffer.ctypes.data % 64 == 0
    assert buffer.flags.writeable
    assert buffer.dtype == np.uint8


def test_modes_are_private(path):
    Arena.create(path, "", UNITS)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert os.listdir(os.path.dirname(path)) == ["rank0"]


def test_digests_are_those_of_the_bytes(path):
    arena = Arena.create(path, "", UNITS)
    index = arena.begin(1)
    fill(arena, index, 1)
    digests = arena.commit(index)
    expected = [_native.digest(arena.buffer(index)[at : at + nbytes]) for _, at, nbytes in arena.units()]
    assert digests == expected == arena.digests(index)
    assert digests[1] == 0x2D06800538D394C2  # xxh3-64 of nothing


def test_a_buffer_outlives_the_arena_and_the_file(path):
    arena = Arena.create(path, "", UNITS)
    buffer = arena.buffer(write(arena, 7))
    arena.unlink()
    arena.unlink()
    assert not os.path.exists(path)
    del arena
    assert buffer[64] == 7 * 31


def test_begin_hides_the_older_version_only(path):
    arena = Arena.create(path, "", UNITS)
    first, second = write(arena, 1), write(arena, 2)
    assert arena.begin(3) == first
    assert arena.versions() == [(second, 2)]
    assert arena.begin(3) == first, "a buffer without a version is taken before one with"


def test_a_flipped_bit_is_found(path):
    arena = Arena.create(path, "", UNITS)
    index = write(arena, 1)
    _, offset, nbytes = arena.units()[2]
    arena.buffer(index)[offset + nbytes - 1] ^= 4
    assert arena.verify(index) == ["layers.0.experts.1"]


def test_a_received_payload_is_checked_before_it_is_shown(path):
    sender = Arena.create(path, "", UNITS)
    payload = sender.buffer(write(sender, 5)).copy()
    sender.unlink()
    receiver = Arena.create(path, "", UNITS)
    index = receiver.begin(5)
    receiver.buffer(index)[:] = payload
    receiver.buffer(index)[receiver.units()[0][1]] ^= 1
    with pytest.raises(CorruptCopy, match=r"1 of 3 received units do not match their digests: dense"):
        receiver.commit_received(index)
    assert receiver.versions() == []
    receiver.buffer(index)[:] = payload
    receiver.commit_received(index)
    assert receiver.versions() == [(index, 5)]
    assert holds(receiver, index, 5)


def test_an_existing_path_is_never_replaced(path):
    write(Arena.create(path, "first", UNITS), 1)
    with pytest.raises(FileExistsError, match="the file exists; open it, or unlink it first"):
        Arena.create(path, "second", UNITS)
    assert Arena.open(path).meta == "first"


def test_what_a_killed_create_left_is_replaced(path):
    os.makedirs(os.path.dirname(path), mode=0o700)
    with open(path + ".new", "wb") as file:
        file.write(b"half an arena")
    Arena.create(path, "", UNITS)
    assert os.listdir(os.path.dirname(path)) == ["rank0"]


def test_wrong_files_are_not_opened(path):
    with pytest.raises(FileNotFoundError, match="opening the arena"):
        Arena.open(path)
    Arena.create(path, "meta", UNITS)
    with open(path, "rb") as file:
        intact = file.read()
    for wrong, message in [
        (b"", "empty"),
        (intact[:100], "at least 192 bytes"),
        (b"X" + intact[1:], "EVMARENA"),
        (intact[:8] + b"\x09" + intact[9:], "format"),
        (intact[:-1], "bytes, the file has"),
        (intact[:200] + b"?" + intact[201:], "checksum"),
    ]:
        with open(path, "wb") as file:
            file.write(wrong)
        with pytest.raises(CorruptCopy, match=message):
            Arena.open(path)


def test_wrong_calls_are_value_errors(path):
    arena = Arena.create(path, "", UNITS)
    for call in (arena.buffer, arena.commit, arena.commit_received, arena.digests, arena.verify):
        with pytest.raises(ValueError, match="index: expected 0 or 1, got 2"):
            call(2)
    for call in (arena.commit, arena.commit_received):
        with pytest.raises(ValueError, match="call begin first"):
            call(0)
    for call in (arena.digests, arena.verify):
        with pytest.raises(ValueError, match="no complete version"):
            call(0)
    with pytest.raises(ValueError, match="occurs twice"):
        Arena.create(path + "2", "", [("a", 1), ("a", 1)])
    with pytest.raises(ValueError, match="contiguous"):
        _native.digest(np.zeros(8, np.uint8)[::2])


def test_too_little_space_is_an_error_and_leaves_nothing(path):
    with pytest.raises(OSError, match=r"needs \d+ bytes, but \d+ are free; use a smaller arena"):
        Arena.create(path, "", [("huge", 1 << 46)])
    assert os.listdir(os.path.dirname(path)) == []


def test_a_refused_reservation_is_an_error_and_leaves_nothing(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"it needs \d+ bytes"):
            Arena.create(path, "", [("large", 1 << 22)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_tmpfs_is_an_error_and_no_sigbus(small_disk, reserves):
    Arena.create(small_disk / "fits", "", [("unit", 300_000)])
    with pytest.raises(OSError, match="are free") as caught:
        Arena.create(small_disk / "too-much", "", [("unit", 300_000)], reserves=reserves)
    assert caught.value.errno == 28
    assert os.listdir(small_disk) == ["fits"]


def test_space_is_reserved_later_in_steps(path):
    arena = Arena.create(path, "", [("unit", 1 << 20)], reserves=False)
    assert os.stat(path).st_size == arena.mapped_bytes
    assert os.stat(path).st_blocks * 512 < 1 << 16
    assert not arena.reserve(1 << 20)
    assert 1 << 20 <= os.stat(path).st_blocks * 512 < 3 << 19
    assert arena.reserve(1 << 62)
    assert os.stat(path).st_blocks * 512 >= arena.mapped_bytes
    assert arena.reserve(1)
    index = arena.begin(3)
    arena.buffer(index)[:] = 5
    arena.commit(index)
    assert Arena.open(path).versions() == [(index, 3)]
    assert not arena.reserve(1 << 12), "the other buffer, which comes next, is not ready"
    assert arena.reserve(1 << 62)
    assert arena.begin(4) != index


def test_space_that_is_gone_before_it_is_reserved_may_come_back(small_disk):
    arena = Arena.create(small_disk / "arena", "", [("unit", 300_000)], reserves=False)
    disks.fill(small_disk)
    with pytest.raises(OSError, match="are free") as caught:
        arena.reserve(1 << 20)
    assert caught.value.errno == 28
    disks.free(small_disk)
    assert arena.reserve(1 << 20)


def test_a_capture_reserves_what_it_writes(small_disk):
    engine, data = CopyEngine(), np.ones(300_000, np.uint8)
    arena = Arena.create(small_disk / "arena", "", [("unit", data.nbytes)], reserves=False)
    engine.open()
    disks.fill(small_disk)
    capture = engine.capture(arena, 1, [[(data.ctypes.data, data.nbytes)]], data)
    with pytest.raises(CaptureCancelled, match="reserving the arena"):
        capture.wait(timeout=60)
    assert arena.versions() == []
    disks.free(small_disk)
    assert engine.capture(arena, 2, [[(data.ctypes.data, data.nbytes)]], data).wait(timeout=60) == arena.payload_bytes
    assert [version for _, version in arena.versions()] == [2]
    engine.shutdown()
