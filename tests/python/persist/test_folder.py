"""The folder of persisted units: each unit of its own version, and what stays of older ones."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from evermoe import load_weights
from evermoe._native import digest
from evermoe.checkpoint.folder import find_persisted, read_persisted, sweep
from evermoe.checkpoint.manifest import Part
from evermoe.checkpoint.partial_store import open_partial
from evermoe.checkpoint.persister import Persister
from evermoe.planning.recovery import recovery_plan
from support.harness import PATIENCE
from support.models import make, read
from support.persisting import NBYTES, content, versions


def test_a_model_is_persisted_and_read_again(tmp_path):
    model, optimizer, state = make("adamw", steps=2)
    written = read(state)
    store = open_partial(tmp_path / "new" / "folder", state.catalog.layout)
    persister = Persister(store, "rank0", units=state.catalog.units)
    views = persister.begin_snapshot(3 << 40, {name: Part.all_of(len(data)) for name, data in written.items()})
    for name, view in views.items():
        state.read(name, view)
    persister.commit()
    persister.flush(PATIENCE)
    persister.close()
    assert persister.durable_version == 3 << 40
    found = find_persisted(tmp_path / "new" / "folder", state.catalog.layout)
    assert {each.unit: (each.version, each.digest) for each in found} == {
        name: (3 << 40, digest(data.numpy())) for name, data in written.items()
    }
    assert all(torch.equal(read_persisted(each), written[each.unit]) for each in found)
    tensors = load_file(found[0].file)
    weights = model.moe.experts.weights
    assert torch.equal(tensors["moe.experts.1/weights"], weights[1])
    assert torch.equal(tensors["moe.experts.1/weights/exp_avg"], optimizer.state[weights]["exp_avg"][1])
    other, _, _ = make("adamw")
    load_weights(other, found[0].file.parent)  # a file with all units is a checkpoint to those who read
    assert torch.equal(other.moe.experts.weights, model.moe.experts.weights)


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
    both = ("quick", "slow")
    quick, slow = (join(name) for name in both)
    quick.persist(1, ["x", "a"], members=both)
    slow.persist(1, ["y"], members=both)
    for version in range(2, 8):
        quick.persist(version, ["x", "a"], members=both)
        assert plan(tmp_path) == (1, [])
    slow.persist(5, ["y"], members=both)
    assert plan(tmp_path) == (5, [])
    quick.persist(8, ["a"], members=["quick"])
    assert versions(tmp_path) == {"x": [7, 6, 5], "a": [8, 7, 6, 5], "y": [5, 1]}
    assert plan(tmp_path) == (5, [])


def test_models_in_one_folder_do_not_meet(tmp_path, join):
    one, other = join("one", "L"), join("other", "M")
    one.persist(5, ["a"])
    for version in (6, 7, 8):
        other.persist(version, ["a"])
    other.persister.rewind(4)
    assert (versions(tmp_path, "L"), versions(tmp_path, "M")) == ({"a": [5]}, {})


def test_nothing_is_found_in_a_missing_folder(tmp_path):
    assert find_persisted(tmp_path / "missing", "L") == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text.replace('"format":2', '"format":9'),
        lambda text: text.replace('"version":2', '"version":3'),
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
    with pytest.warns(UserWarning, match="saved units are ignored: .*manifest.json is not a manifest") as told:
        assert versions(tmp_path) == {"a": [1]}
    assert len(told) == 1


def test_a_member_that_comes_back_continues_after_its_last_save(tmp_path, join):
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
        again.persister.begin_snapshot(2, {"a": Part.all_of(NBYTES)})
    again.persist(3, ["a"])
    assert versions(tmp_path) == {"a": [3, 1], "b": [2]}


def test_the_manifest_is_plain_json(tmp_path, join):
    join("m").persist(7, ["b"])
    manifest = json.loads((tmp_path / "persisted-00000000000000000007-m" / "manifest.json").read_text())
    value = f"{digest(content('b', 7).numpy()):016x}"
    tensors = ["weight", "weight/exp_avg"]
    units = [{"name": "b", "file": "units.safetensors", "digest": value, "tensors": tensors}]
    assert len(manifest.pop("checksum")) == 16
    assert manifest == {"format": 2, "version": 7, "step": 7, "layout": "L", "units": units}


def test_what_a_member_that_is_gone_left_half_done_is_removed(tmp_path, join):
    left = join("left")
    left.persist(1, ["a"])
    for version in (2, 3):
        half = tmp_path / f"persisted-{version:020d}-gone"
        half.mkdir()
        (half / ".tmpAbCdEf").touch()
    live = tmp_path / f"persisted-{3:020d}-live"
    live.mkdir()
    sweep(tmp_path, ["left", "live"])
    assert sorted(path.name[-4:] for path in tmp_path.iterdir()) == ["left", "live"]
    assert versions(tmp_path) == {"a": [1]}


def needed(version, units, files):
    """Whether fewer than two newer files have one of the units."""
    return any(sum(unit in files[newer] for newer in files if newer > version) < 2 for unit in units)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.full
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


def test_folders_and_files_of_others_are_left(tmp_path, join):
    member = join()
    member.persist(1, ["a"])
    (folder,) = tmp_path.glob("persisted-*")
    (folder / "notes").mkdir()
    (tmp_path / folder.name.replace("-m", "-x")).write_text("no folder")
    shutil.copytree(folder, tmp_path / folder.name.replace("-m", "-dead"))
    (tmp_path / folder.name.replace("-m", "-dead") / "manifest.json").unlink()
    sweep(tmp_path, ["m"])
    for version in (2, 3, 4):
        member.persist(version, ["a"])
    assert versions(tmp_path) == {"a": [4, 3]}
    assert (folder / "notes").is_dir()
