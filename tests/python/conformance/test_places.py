"""The contract of every store of checkpoints, on real servers: one body for a folder and all object stores."""

from __future__ import annotations

import os
import time

import pytest
import torch

from evermoe import load_weights
from evermoe.checkpoint.attempts import Attempts, Cleaner
from evermoe.checkpoint.checkpoint_store import find, newest_verified, prune, stored
from evermoe.checkpoint.copying import copy
from evermoe.checkpoint.manifest import read_manifest, read_units
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.retention import Retention
from evermoe.checkpoint.verified_mark import MARK, mark_verified, verified_at
from evermoe.errors import CorruptCopy, FolderInUse, PersistFailed
from evermoe.process.run_claim import Run
from support.models import make
from support.object_servers import ADDRESS, GivenAddress
from support.places import Spot, Stop, Writer, all_whole, another_spot, forget, is_whole, make_spot, steps, write
from support.server_fixtures import SERVERS
from support.stores import contents, model

BUCKETS = [*SERVERS, pytest.param("given", marks=pytest.mark.long)]


@pytest.fixture
def given():
    if ADDRESS not in os.environ:
        pytest.skip(f"needs a place to write to: {ADDRESS}=gs://BUCKET/PATH, s3://... or az://...")
    return GivenAddress()


@pytest.fixture(params=["folder", *BUCKETS])
def spot(request, monkeypatch):
    """A place of each kind."""
    return make_spot(request.param, request, monkeypatch)


@pytest.fixture(params=BUCKETS)
def bucket(request, monkeypatch):
    """A place of each kind that is no folder."""
    return make_spot(request.param, request, monkeypatch)


def test_versions_are_read_as_they_were_written_and_the_two_newest_stay(spot):
    writer = Writer(spot)
    for step in range(1, 5):
        path = writer.write(step)
        assert find(spot.locate())[3 << 40 | step] == path
        assert all_whole(spot) == [step, step - 1][: min(step, 2)]
    writer.close()
    assert all_whole(spot) == [4, 3]


def test_those_of_some_steps_stay_for_ever(spot):
    writer = Writer(spot, retention=Retention(1, 2))
    for step in range(1, 6):
        writer.write(step)
    writer.close()
    assert all_whole(spot) == [5, 4, 2]


def test_a_later_process_finds_what_was_left_and_goes_on(spot):
    write(spot, 1, 2)
    later = Writer(spot, 4)
    assert later.store.newest_generation() == 3
    later.write(3)
    later.close()
    assert all_whole(spot) == [3, 2]


def test_a_step_is_written_again_next_to_its_first_version(spot):
    (first,) = write(spot, 1)
    (again,) = write(spot, 1, generation=4)
    assert find(spot.locate()) == {3 << 40 | 1: first, 4 << 40 | 1: again}
    write(spot, 2, generation=4)
    assert 3 << 40 | 1 not in find(spot.locate())


def test_a_changed_byte_of_a_unit_is_refused_and_the_version_before_is_there(spot):
    before, path = write(spot, 1, 2)
    files = [name for name in spot.files() if name.startswith(f"{path.name}/") and name.endswith(".safetensors")]
    assert files
    for name in files:
        data = bytearray(spot.read(name))
        spot.write(name, bytes([*data[:-1], data[-1] ^ 1]))
        assert not is_whole(path, 2), name
        spot.write(name, bytes(data))
        spot.remove(name)
        assert not is_whole(path, 2), name
        spot.write(name, bytes(data))
    assert is_whole(before, 1) and is_whole(path, 2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda text: text[:-1], "the text is no JSON"),
        (lambda text: text.replace(b'"format":2', b'"format":1'), "expected one of 2, 3, 5"),
        (lambda text: text.replace(b'"step":2', b'"step":3'), "its checksum"),
    ],
)
def test_a_bad_manifest_is_passed_over_with_one_warning(spot, harm, message):
    _, path = write(spot, 1, 2)
    spot.write(f"{path.name}/manifest.json", harm(spot.read(f"{path.name}/manifest.json")))
    forget()
    with pytest.warns(UserWarning, match=f"a checkpoint is ignored: .*{message}") as told:
        assert steps(spot) == [1]
    assert len(told) == 1


def test_checkpoints_of_another_model_are_refused(spot):
    (path,) = write(spot, 1)
    with pytest.warns(UserWarning, match="is ignored: .* belongs to another model"):
        assert find(spot.locate(), "another") == {}
    with pytest.raises(CorruptCopy, match="has no unit nothing"):
        list(read_units(read_manifest(path), ["nothing"]))
    from evermoe.checkpoint.checkpoint_store import open_store

    with pytest.raises(ValueError, match=r"trained another model or optimizer.*or another state_bytes"):
        open_store(spot.locate(), Owner("job", "another"), "m")


def test_weights_are_read_by_the_name_of_the_checkpoint(spot):
    (path,) = write(spot, 7)
    target, _, state = make("sgd-momentum")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    load_weights(target, str(path))
    found = dict(zip(("head",), (target.head.weight,), strict=True))
    data = contents(7)["embedding"]
    unit = state.catalog.by_name["embedding"]
    assert torch.equal(unit.tensors(data)["weight"], found["head"])


def test_another_job_that_starts_later_has_the_place(spot):
    writer = Writer(spot, job="first")
    writer.write(1)
    if not spot.is_bucket:
        writer.close()  # it holds a lock, and another job would be refused
    later = Writer(spot, 4, job="second")
    if spot.is_bucket:
        with pytest.raises(PersistFailed, match="now belongs to job 'second'"):
            writer.write(2)
    later.write(3)
    later.close()
    assert all_whole(spot) == [3, 1]


def test_another_run_of_the_same_job_that_starts_later_has_the_place(spot):
    """An object store has no locks: the previous run finds that before it publishes or removes anything."""
    one, two = (Run("job", nonce, "head:1", "host-7", 4711, 1e9) for nonce in ("one", "two"))
    writer = Writer(spot)
    writer.store.claim_for(one, 0.0)
    writer.write(1)
    assert writer.store.found() == one
    later = Writer(spot, 4, "n")
    if spot.is_bucket:
        later.store.claim_for(two, 0.0)
        with pytest.raises(PersistFailed, match="taken over by another run of job 'job', which process 4711 on host-7"):
            writer.write(2)
    else:
        with pytest.raises(FolderInUse, match=r"the checkpoint store .* is in use by another run of job 'job', which"):
            later.store.claim_for(two, 0.0)
        with pytest.raises(PersistFailed, match="is in use by another run"):
            later.write(2)
        writer.close()
    later.write(3)
    later.close()
    assert all_whole(spot) == [3, 1]


# ---- copies, and what a person removes


def test_a_copy_elsewhere_is_the_same_checkpoint(spot, tmp_path):
    write(spot, 1, 2)
    copied, back = tmp_path / "copied", another_spot(spot)
    for path in find(spot.locate()).values():
        assert copy(read_manifest(path), copied)
        assert copy(read_manifest(path), copied) is None
    assert all_whole(Spot(str(copied))) == [2, 1]
    for path in find(copied).values():
        copy(read_manifest(path), back.locate())
    assert all_whole(back) == [2, 1]
    write(back, 3, generation=4)
    assert all_whole(back) == [3, 2]


def test_a_copy_gets_the_mark_that_its_checkpoint_has_got_since(spot, tmp_path):
    (path,) = write(spot, 1)
    manifest, copied = read_manifest(path), tmp_path / "copied"
    made = copy(manifest, copied)
    assert verified_at(made, manifest.version) is None
    mark_verified(path, manifest.version, 7)
    assert copy(manifest, copied) is None
    assert copy(manifest, copied) is None, "with the mark, too"
    assert verified_at(made, manifest.version) == 7


def test_a_damaged_checkpoint_is_not_copied(spot, tmp_path):
    (path,) = write(spot, 1)
    name = next(name for name in spot.files() if name.endswith(".safetensors"))
    data = spot.read(name)
    spot.write(name, bytes([*data[:-1], data[-1] ^ 1]))
    other = another_spot(spot)
    for to in (tmp_path / "copied", other.locate()):
        with pytest.raises(CorruptCopy):
            copy(read_manifest(path), to)
        assert find(to) == {}
    assert not [name for name in other.files() if name.endswith(".safetensors")]


def test_what_is_pruned_goes_with_its_files(spot):
    writer = Writer(spot, retention=Retention(9))
    for step in range(1, 5):
        writer.write(step)
    writer.close()
    gone = list(prune(spot.locate(), Retention(1, 3)))
    assert len(gone) == 2
    assert all_whole(spot) == [4, 3]
    left = {name.split("/")[0] for name in spot.files() if name.endswith(".safetensors")}
    assert left == {path.name for path in find(spot.locate()).values()}


def test_a_list_has_the_size_of_all_files(spot):
    (path,) = write(spot, 1)
    ((found),) = stored(spot.locate())
    files = {name: size for name, size in spot.files().items() if name.startswith(path.name)}
    assert found.nbytes == sum(size for name, size in files.items() if not name.endswith("begun.json"))
    assert (found.step, found.units) == (1, len(model().catalog.units))


def test_the_newest_verified_checkpoint_stays_and_is_copied_as_verified(spot, tmp_path):
    writer = Writer(spot, retention=Retention(1))
    paths = {1: writer.write(1)}
    mark_verified(paths[1], 3 << 40 | 1, 9)
    for step in (2, 3):
        paths[step] = writer.write(step)
    assert [(each.step, each.verified_at) for each in stored(spot.locate())] == [(1, 9), (3, None)]
    assert newest_verified(spot.locate()) == (3 << 40 | 1, paths[1])
    assert copy(read_manifest(paths[1]), tmp_path / "copied") is not None
    assert [each.verified_at for each in stored(tmp_path / "copied")] == [9]
    writer.store.awaited = {3 << 40 | 3}
    paths[4] = writer.write(4)
    assert all_whole(spot) == [4, 3, 1]
    mark_verified(paths[3], 3 << 40 | 3, 10)
    writer.store.remove_superseded(paths[3], 3 << 40 | 3)
    assert all_whole(spot) == [4, 3]
    writer.close()
    assert list(prune(spot.locate(), Retention(1))) == []
    spot.write(f"{paths[3].name}/{MARK}", b'{"version": 7, "step": 10}')  # of another version
    assert list(prune(spot.locate(), Retention(1))) == [paths[3]]
    assert newest_verified(spot.locate()) is None


# ---- what only an object store has


def test_what_has_not_changed_is_not_written_again_and_stays_as_long_as_it_is_used(bucket):
    writer = Writer(bucket)
    units = contents(1)
    first = writer.write(1)
    changed = next(name for name, data in units.items() if data.any())
    for step in range(2, 6):
        units = units | {changed: contents(step)[changed]}
        path = writer.write(step, units)
        new = [name for name in bucket.files() if name.startswith(path.name) and name.endswith(".safetensors")]
        assert len(new) == 1, new
        found = dict(read_units(read_manifest(path), list(units)))
        assert found.keys() == units.keys()
    files = [name for name in bucket.files() if name.endswith(".safetensors")]
    of_first = [name for name in files if name.startswith(first.name)]
    assert first not in find(bucket.locate()).values()
    assert (len(of_first), len(files)) == (len(units) - 1, len(units) - 1 + 2)
    writer.write(6)
    writer.write(7)
    files = [name for name in bucket.files() if name.endswith(".safetensors")]
    assert {name.split("/")[0] for name in files} == {path.name for path in find(bucket.locate()).values()}
    assert all_whole(bucket) == [7, 6]


def test_a_stopped_writer_that_goes_on_finds_its_attempt_given_up(bucket):
    stopped = Writer(bucket)
    stop = Stop(stopped.store)
    slow = stopped.begin(1)
    stop.wait()
    successor = Writer(bucket, 4)
    successor.store._sweep(4)
    successor.write(1)
    successor.write(2)
    stop.go_on()
    with pytest.raises(PersistFailed, match="was given up by members that continued without this one"):
        slow.wait_published()
    assert sorted(find(bucket.locate())) == [4 << 40 | 1, 4 << 40 | 2]
    assert all_whole(bucket) == [2, 1]


def test_a_writer_that_begins_too_late_adds_a_checkpoint_and_removes_none(bucket):
    stopped, successor = Writer(bucket), Writer(bucket, 4)
    others = [successor.write(step) for step in (1, 2)]
    late = stopped.write(1)
    assert find(bucket.locate()) == {3 << 40 | 1: late, 4 << 40 | 1: others[0], 4 << 40 | 2: others[1]}
    successor.write(3)
    assert sorted(find(bucket.locate())) == [4 << 40 | 2, 4 << 40 | 3]


def test_two_writers_of_one_step_both_have_a_whole_checkpoint(bucket):
    one, other = Writer(bucket, member="one"), Writer(bucket, member="other")
    writes = [one.begin(1), other.begin(1)]
    paths = [write.wait_published() for write in writes]
    assert paths[0] != paths[1]
    assert all(is_whole(path, 1) for path in find(bucket.locate()).values())
    one.write(2)
    other.write(3)
    assert all_whole(bucket) == [3, 2]


def test_a_checkpoint_is_not_published_when_what_it_shares_has_gone(bucket):
    """Its base was removed by a person after it was read, so its attempt was begun too late to keep the files."""
    writer = Writer(bucket)
    writer.write(1)
    stop = Stop(writer.store)
    write = writer.begin(2, contents(1))
    stop.wait()
    (path,) = find(bucket.locate()).values()
    bucket.write(f"{path.name}/manifest.json", b"")
    stop.go_on()
    with pytest.raises(PersistFailed, match="unchanged units this one shares was removed"):
        write.wait_published()
    assert steps(bucket) == []
    writer.write(3)
    assert all_whole(bucket) == [3]


def test_files_stay_while_an_attempt_is_undecided(bucket):
    writer = Writer(bucket, retention=Retention(9))
    old = writer.write(1)
    writer.write(2)
    other = Writer(bucket, member="other")
    stop = Stop(other.store)
    write = other.begin(3)
    stop.wait()
    with pytest.raises(ValueError, match=r"is being written.*--abandoned"):
        list(prune(bucket.locate(), Retention(1)))
    assert len(list(prune(bucket.locate(), Retention(1), abandoned=True))) == 1
    assert not [name for name in bucket.files() if name.startswith(old.name) and "safetensors" in name]
    stop.go_on()
    with pytest.raises(PersistFailed, match="was given up"):
        write.wait_published()


def test_empty_manifests_go_after_a_week(bucket):
    first, *_ = write(bucket, 1, 2, 3)
    place = bucket.locate().place
    assert bucket.files()[f"{first.name}/manifest.json"] == 0
    for days, is_left in ((6, True), (8, False)):
        assert Cleaner(Attempts(place)).remove_files(now=time.time() + days * 86400)
        assert (first.name in place.names()) == is_left
    assert all_whole(bucket) == [3, 2]


def test_a_folder_of_files_that_was_uploaded_is_a_checkpoint(bucket, tmp_path):
    """As `aws s3 cp --recursive` does it; files of many units are read in parts."""
    local = Spot(str(tmp_path / "local"))
    (path,) = write(local, 1)
    for name in local.files():
        if name.startswith(path.name):
            bucket.write(name, local.read(name))
    assert all_whole(bucket) == [1]
