"""Persisting in the background: training never waits for the store, which may be slow, fail, or be rewound."""

import functools
import resource
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch

from evermoe._native import TripleBuffer, digest
from evermoe.checkpoint import folder, partial_bucket
from evermoe.checkpoint.folder import PERSISTED
from evermoe.checkpoint.manifest import Part
from evermoe.checkpoint.partial_store import open_partial
from evermoe.checkpoint.persister import Persister
from evermoe.errors import PersistFailed
from evermoe.state.version import version_of
from support.harness import PATIENCE
from support.persisting import NBYTES, UNITS, content, parts, versions
from support.places import make_spot


@pytest.fixture(params=["folder", pytest.param("shared_s3", id="s3"), pytest.param("azure", marks=pytest.mark.long)])
def persisted(request, monkeypatch):
    """A place of each kind."""
    return make_spot(request.param, request, monkeypatch).locate(PATIENCE) / PERSISTED


# ---- a slow place
WRITERS = ((folder, "write_tensors"), (partial_bucket, "save"))
"""Return the function that writes bytes, in a store of each kind."""


class Slow:
    """Writing blocks until `go` is set."""

    def __init__(self, monkeypatch):
        self.entered, self.go = threading.Event(), threading.Event()
        for module, name in WRITERS:
            monkeypatch.setattr(module, name, functools.partial(self._write, getattr(module, name)))

    def _write(self, write, *arguments):
        self.entered.set()
        assert self.go.wait(PATIENCE)
        return write(*arguments)


@pytest.fixture
def slow(monkeypatch):
    place = Slow(monkeypatch)
    yield place
    place.go.set()


def test_the_writer_does_not_wait_and_the_newest_snapshot_goes_first(persisted, join, slow):
    member = join()
    member.snapshot(1, ["a", "b"])
    assert slow.entered.wait(PATIENCE)
    for version, unit in ((2, "a"), (3, "b"), (4, "c")):
        member.snapshot(version, [unit])
    assert member.skipped == [(2, ["a"])]  # 4 took its slot
    with pytest.raises(TimeoutError, match="persisting 1"):
        member.persister.flush(0)
    assert (versions(persisted), member.durable) == ({}, [])
    slow.go.set()
    member.persister.flush(PATIENCE)
    member.persister.close(PATIENCE)
    assert versions(persisted) == {"a": [1], "b": [1], "c": [4]}
    assert member.durable == [(1, ["a", "b"]), (4, ["c"])]
    assert member.skipped == [(2, ["a"]), (3, ["b"])]


def test_all_buffers_can_be_read_but_the_one_that_is_written(join, slow):
    member = join()
    member.snapshot(1, ["a", "b"])
    assert slow.entered.wait(PATIENCE)
    member.snapshot(2, ["a"])
    member.persister.begin_snapshot(3, {"c": Part.all_of(NBYTES)})
    found = {(held.unit, held.version): held for held in member.persister.complete_units()}
    assert set(found) == {("a", 1), ("b", 1), ("a", 2)}
    for (unit, version), held in found.items():
        assert torch.equal(held.data, content(unit, version))
        assert held.digest == digest(held.data.numpy())


def test_buffers_do_not_keep_the_memory_of_a_first_snapshot_of_everything(join):
    member = join()
    for version, units in enumerate(["abcxy", "a", "b", "c"], 1):
        member.persist(version, list(units))
    assert all(len(slot.memory) < 3 * NBYTES for slot in member.persister._slots)


def test_what_waits_of_an_older_generation_never_appears(persisted, join, slow):
    """A member that was away has it, and the others may have gone on without it."""
    member = join()
    member.snapshot(version_of(1, 5), ["a"])
    assert slow.entered.wait(PATIENCE)
    member.snapshot(version_of(1, 6), ["b"])
    member.persister.rewind(version_of(2, 7), 3)
    assert member.skipped == [(version_of(1, 5), ["a"]), (version_of(1, 6), ["b"])]
    slow.go.set()
    member.persist(version_of(3, 8), ["c"])
    assert versions(persisted) == {"c": [version_of(3, 8)]}


def test_close_leaves_a_folder_that_hangs(persisted, join, slow):
    member = join()
    member.snapshot(1, ["a"])
    assert slow.entered.wait(PATIENCE)
    member.snapshot(2, ["a"])
    member.persister.close(timeout=0)
    for call in (lambda: member.snapshot(3, ["a"]), lambda: member.persister.flush(0)):
        with pytest.raises(ValueError, match="is closed"):
            call()
    slow.go.set()
    member.persister.close(PATIENCE)
    assert versions(persisted) == {"a": [1]}  # 2 was not begun


# ---- a folder that fails
@contextmanager
def full_disk():
    """No file may grow beyond 64 bytes: writing fails as on a full disk, by the system's word."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def no_folder(folder):
    moved = folder.with_name("moved")
    folder.rename(moved)
    yield
    moved.rename(folder)


@pytest.mark.parametrize("persisted", ["folder"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "gone"])
def test_a_folder_that_fails_is_one_warning_and_training_continues(tmp_path, join, kind):
    place = tmp_path / "folder"
    member = join(where=place)
    member.persist(1, ["a"])
    with full_disk() if kind == "full" else no_folder(place):
        member.snapshot(2, ["a"])
        with pytest.raises(PersistFailed, match="version 2 was not persisted: ") as caught:
            member.persister.flush(PATIENCE)
        assert isinstance(caught.value.__cause__, Exception)
        with pytest.raises(PersistFailed):  # tries again
            member.persister.flush(PATIENCE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it was said already
            member.snapshot(3, ["b"])
        with pytest.raises(PersistFailed, match="version 3 was not persisted: "):
            member.persister.flush(PATIENCE)
    assert versions(place) == {"a": [1]}
    member.persist(4, ["b"])
    assert member.persister.error is None
    assert versions(place) == {"a": [1], "b": [4]}
    member.persister.close(PATIENCE)
    assert member.durable == [(1, ["a"]), (4, ["b"])]
    assert member.skipped == [(2, ["a"]), (3, ["b"])]


def test_a_failure_is_warned_of_by_the_next_call(persisted, join, monkeypatch):
    member = join()
    failed = threading.Event()

    def fail(*_):
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        for module, name in WRITERS:
            patch.setattr(module, name, fail)
        member.snapshot(1, ["a"])
        assert failed.wait(PATIENCE)
        with member.persister._changed:
            assert member.persister._changed.wait_for(lambda: member.persister.error, PATIENCE)
        with pytest.warns(UserWarning, match="version 1 was not persisted: OSError: .*No space left") as told:
            member.persister.begin_snapshot(2, {"a": Part.all_of(NBYTES)})
    assert (len(told), told[0].filename) == (1, __file__)
    member.persister.abandon()
    member.persist(3, ["a"])
    assert versions(persisted) == {"a": [3]}


def test_a_callback_that_fails_takes_nothing_back(persisted):
    persister = Persister(open_partial(persisted, "L"), "m", units=UNITS, on_durable=lambda *_: 1 / 0)
    persister.begin_snapshot(1, {"a": Part.all_of(NBYTES)})["a"].copy_(content("a", 1))
    persister.commit()
    persister.flush(PATIENCE)
    with pytest.warns(UserWarning, match="version 1 is durable, but what comes after it failed: ZeroDivisionError"):
        persister.close(PATIENCE)
    assert (versions(persisted), persister.durable_version) == ({"a": [1]}, 1)


# ---- rewound
def test_versions_newer_than_the_one_to_resume_from_are_removed(persisted, join):
    one, two = join("one"), join("two")
    one.persist(1, ["a"])
    two.persist(2, ["b"])
    one.persist(3, ["a", "b"])
    two.persist(4, ["b"])
    one.persist(5, ["a"])
    for member in (one, two):
        member.persister.rewind(3)
    assert versions(persisted) == {"a": [3], "b": [3]}
    assert (one.persister.durable_version, two.persister.durable_version) == (3, None)
    one.persist(4, ["b"])
    two.persist(5, ["a"])
    assert versions(persisted) == {"a": [5, 3], "b": [4, 3]}


def test_a_snapshot_on_its_way_is_never_durable_after_a_rewind(persisted, join, slow):
    member = join()
    member.snapshot(2, ["a"])
    assert slow.entered.wait(PATIENCE)
    member.snapshot(3, ["b"])
    member.persister.begin_snapshot(4, {"c": Part.all_of(NBYTES)})
    member.persister.rewind(1)
    with pytest.raises(ValueError, match="Commit: expected a slot that is being written"):
        member.persister.commit()
    member.snapshot(5, ["c"])
    slow.go.set()
    member.persister.flush(PATIENCE)
    assert versions(persisted) == {"c": [5]}
    assert (member.durable, member.skipped, len(parts(persisted))) == ([(5, ["c"])], [], 1)


class Gate:
    """A lock that says when the test's own thread asks for it."""

    def __init__(self):
        self.lock, self.asked = threading.Lock(), threading.Event()

    def acquire(self, timeout=-1.0):
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        return self.lock.acquire(timeout=timeout)

    def release(self):
        self.lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


def test_a_rewind_waits_for_the_word_that_a_version_is_durable(persisted):
    order, named, gate = [], threading.Event(), Gate()

    def on_durable(version, units):
        named.set()
        assert gate.asked.wait(PATIENCE)
        order.append("durable")

    persister = Persister(open_partial(persisted, "L"), "m", units=UNITS, on_durable=on_durable)
    persister._gate = gate
    persister.begin_snapshot(2, {"a": Part.all_of(NBYTES)})["a"].copy_(content("a", 2))
    persister.commit()
    assert named.wait(PATIENCE)
    persister.rewind(1)
    order.append("rewound")
    persister.close(PATIENCE)
    assert persister.error is None
    assert (order, versions(persisted), persister.durable_version) == (["durable", "rewound"], {}, None)


def test_files_of_a_member_that_is_gone_are_rewound_by_the_others(persisted, join):
    gone, left = join("gone"), join("left")
    gone.persist(1, ["a"])
    gone.persist(2, ["a"])
    left.persister.rewind(1)
    assert versions(persisted) == {"a": [1]}


def test_a_member_that_was_left_behind_persists_nothing_more(persisted, join):
    asleep, awake = join("asleep"), join("awake")
    asleep.persister.rewind(0, generation=1)
    awake.persister.rewind(0, generation=2)
    awake.persist(2 << 40 | 3, ["a"])
    kept = versions(persisted)
    asleep.snapshot(1 << 40 | 4, ["b"])
    with pytest.raises(PersistFailed, match="not persisted: LeftBehind: members of generation 2 persist here, this "):
        asleep.persister.flush(PATIENCE)
    assert (versions(persisted), len(parts(persisted))) == (kept, 1)
    asleep.persister.rewind(2 << 40 | 3, generation=2)  # it is back
    asleep.persist(2 << 40 | 4, ["a"])
    assert versions(persisted)["a"][0] == 2 << 40 | 4


# ---- arguments and states
def test_errors_name_the_argument(persisted, join):
    persister = join().persister
    for units, message in (
        ({}, "units: expected one or more, got none"),
        ({"z": Part.all_of(1)}, "units: z: expected a unit of this model, got 1 bytes"),
        ({"a": Part.all_of(1)}, f"units: a: expected {NBYTES} bytes, got 1 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            persister.begin_snapshot(1, units)
    for call in (persister.commit, persister.abandon):
        with pytest.raises(ValueError, match="expected a slot that is being written"):
            call()
    persister.begin_snapshot(1, {"a": Part.all_of(NBYTES)})
    with pytest.raises(ValueError, match=r"Begin\(2\): expected no slot that is being written"):
        persister.begin_snapshot(2, {"a": Part.all_of(NBYTES)})
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="member: expected a name that can be part of a file name"):
            Persister(open_partial(persisted, "L"), name, units=UNITS)


def test_states_of_the_triple_buffer():
    buffer = TripleBuffer()
    for event in ("begin 3", "commit", "persist", "durable", "begin 4", "commit", "persist", "begin 5", "commit"):
        name, *version = event.split()
        getattr(buffer, name)(*map(int, version))
    assert buffer.slots == [("recovery", 3), ("persisting", 4), ("snapshot", 5)]
    assert (buffer.writing, buffer.persisting, buffer.recovery, buffer.next_to_persist) == (None, 1, 0, None)
    buffer.failed()
    assert buffer.next_to_persist == 2
    buffer.rewind(4)
    assert repr(buffer) == "TripleBuffer(recovery 3, snapshot 4, empty)"
    with pytest.raises(ValueError, match=r"Begin\(4\): expected a version after 4, the newest one; rewind first"):
        buffer.begin(4)
