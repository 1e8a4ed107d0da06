"""Persisted units: durable one by one, whole or not at all, and training never waits for the folder."""

import json
import os
import random
import resource
import shutil
import signal
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from evermoe import CorruptCopy, load_weights, persist, persisted
from evermoe._native import TripleBuffer, digest
from evermoe.errors import PersistFailed
from evermoe.persist import Persister
from evermoe.persisted import find_persisted, read_persisted
from evermoe.planning import recovery_plan
from evermoe.units import Piece, Unit
from harness import PATIENCE, SERVER
from test_units import make, read

PIECES = (Piece("weight", (3, 5), torch.float32), Piece("weight/exp_avg", (15,), torch.bfloat16))
UNITS = [Unit(name, PIECES, "moe", expert) for expert, name in enumerate("abc")] + [Unit(name, PIECES) for name in "xy"]
NBYTES = UNITS[0].nbytes


def content(unit, version):
    """The bytes of a unit at a version."""
    drawn = torch.Generator().manual_seed(ord(unit) * 1000 + version)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=drawn)


class Member:
    """A persister, and what it has told."""

    def __init__(self, folder, name="m", layout="L"):
        self.durable, self.skipped = [], []
        self.persister = Persister(
            folder,
            name,
            layout,
            units=UNITS,
            on_durable=lambda version, units: self.durable.append((version, units)),
            on_skipped=lambda version, units: self.skipped.append((version, units)),
        )

    def snapshot(self, version, units):
        for unit, view in self.persister.begin(version, dict.fromkeys(units, NBYTES)).items():
            view.copy_(content(unit, version))
        self.persister.commit()

    def persist(self, version, units):
        self.snapshot(version, units)
        self.persister.flush(PATIENCE)


@pytest.fixture
def join(tmp_path):
    members = []

    def start(*arguments, folder=tmp_path):
        members.append(Member(folder, *arguments))
        return members[-1]

    yield start
    for member in members:
        member.persister.close(PATIENCE)
        assert not member.persister._thread.is_alive()


def versions(folder, layout="L"):
    """Unit → its versions, newest first; all of them are read."""
    found = {}
    for each in find_persisted(folder, layout):
        assert torch.equal(read_persisted(each), content(each.unit, each.version))
        found.setdefault(each.unit, []).append(each.version)
    return found


# ---- files
def test_a_model_is_persisted_and_read_again(tmp_path):
    model, optimizer, state = make("adamw", steps=2)
    written = read(state)
    persister = Persister(tmp_path / "new" / "folder", "rank0", state.layout, units=state.units)
    views = persister.begin(3 << 40, {name: len(data) for name, data in written.items()})
    for name, view in views.items():
        state.read(name, view)
    persister.commit()
    persister.flush(PATIENCE)
    persister.close()
    assert persister.durable_version == 3 << 40
    found = find_persisted(tmp_path / "new" / "folder", state.layout)
    assert {each.unit: (each.version, each.digest) for each in found} == {
        name: (3 << 40, digest(data.numpy())) for name, data in written.items()
    }
    assert all(torch.equal(read_persisted(each), written[each.unit]) for each in found)
    tensors = load_file(found[0].file)
    assert torch.equal(tensors["moe.experts.1/weights"], model.moe.weights[1])
    assert torch.equal(tensors["moe.experts.1/weights/exp_avg"], optimizer.state[model.moe.weights]["exp_avg"][1])
    other, _, _ = make("adamw")
    load_weights(other, found[0].file.parent)  # a file with all units is a checkpoint to those who read
    assert torch.equal(other.moe.weights, model.moe.weights)


def test_each_unit_has_its_own_newest_version_in_any_members_file(tmp_path, join):
    one, two = join("one"), join("two")
    one.persist(4, ["a", "b"])
    two.persist(5, ["b"])
    one.persist(6, ["a"])
    assert versions(tmp_path) == {"a": [6, 4], "b": [5, 4]}
    assert (one.durable, two.durable) == ([(4, ["a", "b"]), (6, ["a"])], [(5, ["b"])])
    assert (one.persister.durable_version, two.persister.durable_version) == (6, 5)
    assert one.persister.error is None


def test_two_versions_of_each_unit_stay_and_a_file_as_long_as_one_unit_needs_it(tmp_path, join):
    member = join()
    for version, units in enumerate(["ab", "a", "a", "a", "b"], start=1):
        member.persist(version, list(units))
    # b needs the file of version 1, which has a as well.
    assert versions(tmp_path) == {"a": [4, 3, 1], "b": [5, 1]}
    member.persist(6, ["b"])
    member.persist(7, ["c"])  # what is older than needed goes with the next
    assert versions(tmp_path) == {"a": [4, 3], "b": [6, 5], "c": [7]}
    assert len(os.listdir(tmp_path)) == 5


def test_files_of_a_member_that_is_gone_are_pruned_by_the_others(tmp_path, join):
    gone, left = join("gone"), join("left")
    gone.persist(1, ["a"])
    for version in (2, 3):
        left.persist(version, ["a"])
    left.persist(4, ["b"])
    assert [name[-4:] for name in sorted(os.listdir(tmp_path))] == ["left"] * 3


def plan(folder):
    """The target when the folder is all that is left, and what is stale."""
    held = [(each.unit, each.version, each.digest, "persisted") for each in find_persisted(folder, "L")]
    units = sorted({unit for unit, _, _, _ in held})
    found = recovery_plan([(unit, NBYTES) for unit in units], [held], [[]], may_lag=[u for u in units if u in "abc"])
    return found.version, found.stale


def test_what_a_slow_member_would_complete_stays(tmp_path, join):
    quick, slow = join("quick"), join("slow")
    quick.persist(1, ["x", "a"])
    slow.persist(1, ["y"])
    for version in range(2, 8):
        quick.persist(version, ["x", "a"])
        assert plan(tmp_path) == (1, [])
    slow.persist(5, ["y"])
    assert plan(tmp_path) == (5, [])
    quick.persist(8, ["a"])
    assert versions(tmp_path) == {"x": [7, 6, 5], "a": [8, 7, 6, 5], "y": [5, 1]}
    assert plan(tmp_path) == (5, [])


def test_models_in_one_folder_do_not_meet(tmp_path, join):
    one, other = join("one", "L"), join("other", "M")
    one.persist(5, ["a"])
    for version in (6, 7, 8):
        other.persist(version, ["a"])
    other.persister.rewind(4)
    assert (versions(tmp_path, "L"), versions(tmp_path, "M")) == ({"a": [5]}, {})


def test_nothing_is_found_in_a_folder_that_is_not_there(tmp_path):
    assert find_persisted(tmp_path / "missing", "L") == []


# ---- damage
def damage_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_last_byte, r"expected digest [0-9a-f]{16}, the bytes have"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_damaged_bytes_are_refused_and_the_version_before_is_there(tmp_path, join, damage, message):
    member = join()
    member.persist(1, ["a"])
    member.persist(2, ["a"])
    newest, before = find_persisted(tmp_path, "L")
    damage(newest.file)
    with pytest.raises(CorruptCopy, match=message):
        read_persisted(newest)
    assert torch.equal(read_persisted(before), content("a", 1))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text.replace('"format": 1', '"format": 9'),
        lambda text: text.replace('"version": 2', '"version": 3'),
    ],
)
def test_a_damaged_manifest_is_passed_over(tmp_path, join, spoil):
    member = join()
    member.persist(1, ["a"])
    member.persist(2, ["a"])
    manifest = find_persisted(tmp_path, "L")[0].file.parent / "manifest.json"
    text = manifest.read_text()
    assert spoil(text) != text
    manifest.write_text(spoil(text))
    assert versions(tmp_path) == {"a": [1]}


# ---- killed
def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point):
    """From now on this process dies at `point`."""
    save_file, flush, rename = persist.save_file, persist.flush, os.rename

    def at_rename(source, target):
        if point == "before the manifest's name" and target.name == persisted.MANIFEST:
            kill()
        rename(source, target)
        if point == {persisted.MANIFEST: "after the manifest's name", persisted.DRAFT: "while pruning"}[target.name]:
            kill()

    if point == "before the data":
        persist.save_file = lambda *_: kill()
    if point == "within the data":
        persist.save_file = lambda tensors, path: (save_file(tensors, path), os.truncate(path, 100), kill())
    if point == "after the data":
        persist.flush = lambda path: kill() if path.name == persisted.DATA else flush(path)
    os.rename = at_rename


def die(folder, point):
    member = Member(folder, "killed")
    member.persist(1, ["a", "b"])
    member.persist(2, ["a"])
    arm(point)
    member.persist(3, ["a", "b"])
    member.persist(4, ["b"])


BEFORE = {"a": [2, 1], "b": [1]}


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("before the data", BEFORE),
        ("within the data", BEFORE),
        ("after the data", BEFORE),
        ("before the manifest's name", BEFORE),
        ("after the manifest's name", {"a": [3, 2, 1], "b": [3, 1]}),
        ("while pruning", {"a": [3, 2], "b": [4, 3]}),
    ],
)
def test_killed_at(tmp_path, join, point, expected):
    process = SERVER.Process(target=die, args=(tmp_path, point), daemon=True)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert versions(tmp_path) == expected
    # Whatever was left half done goes when all that it had is persisted anew by another member.
    heir = join("heir")
    for version in (5, 6):
        heir.persist(version, ["a", "b"])
    heir.persist(7, ["c"])
    assert versions(tmp_path) == {"a": [6, 5], "b": [6, 5], "c": [7]}
    assert len(os.listdir(tmp_path)) == 3


def test_a_member_that_comes_back_goes_on_after_what_it_left(tmp_path, join):
    first = join("same")
    first.persist(1, ["a"])
    first.persist(2, ["b"])
    first.persister.close()
    draft = tmp_path / "persisted-00000000000000000003-same"
    shutil.copytree(tmp_path / "persisted-00000000000000000002-same", draft)
    (draft / "manifest.json").rename(draft / "manifest.json.writing")
    again = join("same")
    assert not draft.exists()
    assert again.persister.durable_version == 2
    with pytest.raises(ValueError, match="version: 2 is not after 2, which is durable; rewind first"):
        again.persister.begin(2, {"a": NBYTES})
    again.persist(3, ["a"])
    assert versions(tmp_path) == {"a": [3, 1], "b": [2]}


# ---- a slow folder
class Slow:
    """Writing blocks until `go` is set."""

    def __init__(self, monkeypatch):
        self.entered, self.go, self.save_file = threading.Event(), threading.Event(), persist.save_file
        monkeypatch.setattr(persist, "save_file", self)

    def __call__(self, tensors, path):
        self.entered.set()
        assert self.go.wait(PATIENCE)
        self.save_file(tensors, path)


@pytest.fixture
def slow(monkeypatch):
    folder = Slow(monkeypatch)
    yield folder
    folder.go.set()


def test_the_writer_does_not_wait_and_the_newest_snapshot_goes_first(tmp_path, join, slow):
    member = join()
    member.snapshot(1, ["a", "b"])
    assert slow.entered.wait(PATIENCE)
    for version, unit in ((2, "a"), (3, "b"), (4, "c")):
        member.snapshot(version, [unit])
    assert member.skipped == [(2, ["a"])]  # 4 took its slot
    with pytest.raises(TimeoutError, match="persisting 1"):
        member.persister.flush(0)
    assert (versions(tmp_path), member.durable) == ({}, [])
    slow.go.set()
    member.persister.flush(PATIENCE)
    member.persister.close(PATIENCE)
    assert versions(tmp_path) == {"a": [1], "b": [1], "c": [4]}
    assert member.durable == [(1, ["a", "b"]), (4, ["c"])]
    assert member.skipped == [(2, ["a"]), (3, ["b"])]


def test_close_leaves_a_folder_that_hangs(tmp_path, join, slow):
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
    assert versions(tmp_path) == {"a": [1]}  # 2 was not begun


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


@pytest.mark.parametrize("kind", ["full", "gone"])
def test_a_folder_that_fails_is_told_once_and_training_goes_on(tmp_path, join, kind):
    folder = tmp_path / "folder"
    member = join(folder=folder)
    member.persist(1, ["a"])
    with full_disk() if kind == "full" else no_folder(folder):
        member.snapshot(2, ["a"])
        with pytest.raises(PersistFailed, match="version 2 was not persisted: ") as caught:
            member.persister.flush(PATIENCE)
        assert isinstance(caught.value.__cause__, Exception)
        with pytest.raises(PersistFailed):  # tries again
            member.persister.flush(PATIENCE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it was told
            member.snapshot(3, ["b"])
        with pytest.raises(PersistFailed, match="version 3 was not persisted: "):
            member.persister.flush(PATIENCE)
    assert versions(folder) == {"a": [1]}
    member.persist(4, ["b"])
    assert member.persister.error is None
    assert versions(folder) == {"a": [1], "b": [4]}
    member.persister.close(PATIENCE)
    assert member.durable == [(1, ["a"]), (4, ["b"])]
    assert member.skipped == [(2, ["a"]), (3, ["b"])]


def test_a_failure_is_warned_of_by_the_next_call(tmp_path, join, monkeypatch):
    member = join()
    failed = threading.Event()

    def fail(*_):
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(persist, "save_file", fail)
        member.snapshot(1, ["a"])
        assert failed.wait(PATIENCE)
        with member.persister._changed:
            assert member.persister._changed.wait_for(lambda: member.persister.error, PATIENCE)
        with pytest.warns(UserWarning, match="version 1 was not persisted: OSError: .*No space left") as told:
            member.persister.begin(2, {"a": NBYTES})
    assert (len(told), told[0].filename) == (1, __file__)
    member.persister.abandon()
    member.persist(3, ["a"])
    assert versions(tmp_path) == {"a": [3]}


def test_a_callback_that_fails_takes_nothing_back(tmp_path):
    persister = Persister(tmp_path, "m", "L", units=UNITS, on_durable=lambda *_: 1 / 0)
    persister.begin(1, {"a": NBYTES})["a"].copy_(content("a", 1))
    persister.commit()
    persister.flush(PATIENCE)
    with pytest.warns(UserWarning, match="version 1 is durable, but what comes after it failed: ZeroDivisionError"):
        persister.close(PATIENCE)
    assert (versions(tmp_path), persister.durable_version) == ({"a": [1]}, 1)


# ---- rewound
def test_what_is_newer_than_the_version_to_go_on_from_is_removed(tmp_path, join):
    one, two = join("one"), join("two")
    one.persist(1, ["a"])
    two.persist(2, ["b"])
    one.persist(3, ["a", "b"])
    two.persist(4, ["b"])
    one.persist(5, ["a"])
    for member in (one, two):
        member.persister.rewind(3)
    assert versions(tmp_path) == {"a": [3], "b": [3]}
    assert (one.persister.durable_version, two.persister.durable_version) == (3, None)
    one.persist(4, ["b"])
    two.persist(5, ["a"])
    assert versions(tmp_path) == {"a": [5, 3], "b": [4, 3]}


def test_a_snapshot_on_its_way_is_never_durable_after_a_rewind(tmp_path, join, slow):
    member = join()
    member.snapshot(2, ["a"])
    assert slow.entered.wait(PATIENCE)
    member.snapshot(3, ["b"])
    member.persister.begin(4, {"c": NBYTES})
    member.persister.rewind(1)
    with pytest.raises(ValueError, match="Commit: expected a slot that is being written"):
        member.persister.commit()
    member.snapshot(5, ["c"])
    slow.go.set()
    member.persister.flush(PATIENCE)
    assert versions(tmp_path) == {"c": [5]}
    assert (member.durable, member.skipped, len(os.listdir(tmp_path))) == ([(5, ["c"])], [], 1)


class Gate:
    """A lock that says when the test's own thread asks for it."""

    def __init__(self):
        self.lock, self.asked = threading.Lock(), threading.Event()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_a_rewind_waits_for_the_word_that_a_version_is_durable(tmp_path):
    order, named, gate = [], threading.Event(), Gate()

    def on_durable(version, units):
        named.set()
        assert gate.asked.wait(PATIENCE)
        order.append("durable")

    persister = Persister(tmp_path, "m", "L", units=UNITS, on_durable=on_durable)
    persister._gate = gate
    persister.begin(2, {"a": NBYTES})["a"].copy_(content("a", 2))
    persister.commit()
    assert named.wait(PATIENCE)
    persister.rewind(1)
    order.append("rewound")
    persister.close(PATIENCE)
    assert persister.error is None
    assert (order, versions(tmp_path), persister.durable_version) == (["durable", "rewound"], {}, None)


def test_files_of_a_member_that_is_gone_are_rewound_by_the_others(tmp_path, join):
    gone, left = join("gone"), join("left")
    gone.persist(1, ["a"])
    gone.persist(2, ["a"])
    left.persister.rewind(1)
    assert versions(tmp_path) == {"a": [1]}


def needed(version, units, files):
    """Whether fewer than two newer files have one of the units."""
    return any(sum(unit in files[newer] for newer in files if newer > version) < 2 for unit in units)


@pytest.mark.parametrize("seed", range(8))
def test_what_stays_whatever_happens(tmp_path, join, seed):
    draw = random.Random(seed)
    members = {name: join(name) for name in ("one", "two", "three")}
    files, version = {}, 0
    for _ in range(40):
        action = draw.random()
        if action < 0.1:
            version = draw.randint(max(0, version - 3), version)
            for member in members.values():
                member.persister.rewind(version)
            files = {at: units for at, units in files.items() if at <= version}
        elif action < 0.2:
            name = draw.choice(list(members))
            members[name].persister.close(PATIENCE)
            members[name] = join(name)
        else:
            version += 1
            files[version] = draw.sample("abc", draw.randint(1, 3))
            draw.choice(list(members.values())).persist(version, files[version])
            files = {at: units for at, units in files.items() if needed(at, units, files)}
        having = {unit: sorted((at for at in files if unit in files[at]), reverse=True) for unit in "abc"}
        assert versions(tmp_path) == {unit: found for unit, found in having.items() if found}


def test_members_persist_and_prune_at_the_same_time(tmp_path, join):
    members = [join(name) for name in ("one", "two", "three")]
    draw = random.Random(0)
    for version in range(1, 121):
        draw.choice(members).snapshot(version, draw.sample("abc", 2))
    newest = {}
    for member in members:
        member.persister.flush(PATIENCE)
        assert member.persister.error is None
        for version, units in member.durable:
            for unit in units:
                newest[unit] = max(version, newest.get(unit, 0))
    assert {unit: found[0] for unit, found in versions(tmp_path).items()} == newest


# ---- arguments and states
def test_errors_name_the_argument(tmp_path, join):
    persister = join().persister
    for units, message in (
        ({}, "units: expected one or more, got none"),
        ({"z": 1}, "units: z: expected a unit of this model, got 1 bytes"),
        ({"a": 1}, f"units: a: expected {NBYTES} bytes, got 1 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            persister.begin(1, units)
    for call in (persister.commit, persister.abandon):
        with pytest.raises(ValueError, match="expected a slot that is being written"):
            call()
    persister.begin(1, {"a": NBYTES})
    with pytest.raises(ValueError, match=r"Begin\(2\): expected no slot that is being written"):
        persister.begin(2, {"a": NBYTES})
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="member: expected a name that can be part of a file name"):
            Persister(tmp_path, name, "L", units=UNITS)


def test_the_manifest_is_plain_json(tmp_path, join):
    join("m").persist(7, ["b"])
    manifest = json.loads((tmp_path / "persisted-00000000000000000007-m" / "manifest.json").read_text())
    value = f"{digest(content('b', 7).numpy()):016x}"
    units = {"b": ["units.safetensors", value, ["weight", "weight/exp_avg"]]}
    assert manifest == {"format": 1, "version": 7, "layout": "L", "units": units}


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
