"""Checkpoints: visible completely or not at all, readable by anyone, and nothing damaged is taken for good."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evermoe
from evermoe import ElasticSampler, Session, load_weights
from evermoe.checkpoint import checkpoint
from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find
from evermoe.checkpoint.checkpoint_write import CheckpointWrite
from evermoe.checkpoint.manifest import MANIFEST_BYTES, read_manifest
from evermoe.checkpoint.owner import Owner
from evermoe.comm.group import Group
from evermoe.errors import CorruptCopy
from evermoe.events import Checkpoint, Recovered
from evermoe.state.training_state import TrainingState
from support import frozen_parts
from support.models import digests, everyone, make
from support.places import Stop
from support.worker import SAMPLES, Model, dataset, wait_until_written


def write(folder, state, step, generation=3):
    """As the only member of a job does from its start to its end."""
    opened = CheckpointFolder(folder, Owner("job", state.catalog.layout), "m")
    try:
        return CheckpointWrite(
            opened, state, names(state), generation << 40 | step, generation, Group()
        ).wait_published()
    finally:
        opened.close()


def names(state):
    return [unit.name for unit in state.catalog.units]


def test_written_and_read_again(tmp_path):
    _, _, state = make("adamw-fused", steps=2)
    path = write(tmp_path / "new" / "folder", state, 2)
    assert path.name == "step-00000002"
    found = find(tmp_path / "new" / "folder")
    assert found == {(3 << 40) | 2: path}
    _, _, other = make("adamw-fused")
    other.adopt(everyone(other), checkpoint.read(read_manifest(path), other, names(other)))
    assert digests(other) == digests(state)


def test_files_are_plain_safetensors_and_json(tmp_path):
    model, optimizer, state = make("adamw", steps=2)
    path = write(tmp_path, state, 2)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "units-0.safetensors"]
    tensors = load_file(path / "units-0.safetensors")
    assert torch.equal(tensors["embedding/weight"], model.embedding.weight)
    weights = model.moe.experts.weights
    assert torch.equal(tensors["moe.experts.1/weights"], weights[1])
    assert torch.equal(tensors["moe.experts.1/weights/exp_avg"], optimizer.state[weights]["exp_avg"][1])
    assert tensors["model/steps"].item() == 2
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], len(manifest["units"])) == (2, 2, len(state.catalog.units))


def test_files_of_frozen_units_are_links_to_those_of_the_checkpoint_before_the_newest(tmp_path, monkeypatch):
    """So the two newest share none, and a removed checkpoint takes no file away. What has changed is written."""
    model, optimizer = frozen_parts.make()
    state = TrainingState(model, optimizer)
    written = []
    for step in range(1, 9):
        if step == 6:
            model.write()
        if step == 8:
            monkeypatch.setattr(os, "link", refuse)
        path = write(tmp_path, state, step)
        assert sorted(file.name for file in path.iterdir()) == [
            "frozen-0.safetensors",
            "manifest.json",
            "units-0.safetensors",
        ]
        written.append((path / "frozen-0.safetensors").stat().st_ino)
        _, other = (again := frozen_parts.make()), TrainingState(*again)
        other.adopt(everyone(other), checkpoint.read(read_manifest(path), other, names(other)))
        assert digests(other) == digests(state)
    assert written[0] == written[2] == written[4] != written[1] == written[3]
    for at, why in ((5, "changed"), (6, "nothing older is equal"), (7, "links are refused")):
        assert written[at] not in written[at - 2 : at], why  # numbers of removed files may be given again
    assert len(load_file(path / "frozen-0.safetensors")) == frozen_parts.EXPERTS
    assert len(find(tmp_path)) == 2


def refuse(source, target):
    raise OSError(errno.EPERM, "no links")


def test_a_step_is_written_again_next_to_its_first_version(tmp_path):
    model, optimizer, state = make("sgd")
    first = write(tmp_path, state, 1)
    with torch.no_grad():
        model.scale += 1
    again = write(tmp_path, state, 1, generation=4)
    assert (first.name, again.name) == ("step-00000001", "step-00000001-2")
    assert find(tmp_path) == {3 << 40 | 1: first, 4 << 40 | 1: again}
    assert torch.equal(load_file(again / "units-0.safetensors")["model/scale"], model.scale)
    write(tmp_path, state, 2, generation=4)
    assert not first.exists()
    assert optimizer.param_groups


def test_a_stopped_writer_that_continues_replaces_and_removes_nothing(tmp_path):
    """Its members were left behind in generation 3; those of generation 4 have written the same step and later ones."""
    _, _, state = make("sgd")
    stopped = CheckpointFolder(tmp_path, Owner("job", state.catalog.layout), "stopped")
    stop = Stop(stopped)
    slow = CheckpointWrite(stopped, state, names(state), 3 << 40 | 1, 3, Group())
    stop.wait()
    others = [write(tmp_path, state, step, generation=4) for step in (1, 2)]
    stop.go_on()
    late = slow.wait_published()
    stopped.close()
    assert late.name == "step-00000001-2"
    assert find(tmp_path) == {3 << 40 | 1: late, 4 << 40 | 1: others[0], 4 << 40 | 2: others[1]}
    for path in (late, *others):
        checkpoint.read(read_manifest(path), state, names(state))
    last = write(tmp_path, state, 3, generation=4)
    assert list(find(tmp_path).values()) == [others[1], last]


def test_the_draft_of_a_stopped_writer_is_removed_by_its_successors(tmp_path):
    _, _, state = make("sgd")
    stopped, successor = (CheckpointFolder(tmp_path, Owner("job", state.catalog.layout), name) for name in "ab")
    draft = stopped.draft(3 << 40 | 1, 3, "first")
    stopped.create_draft(draft)
    assert successor.newest_generation() == 3
    stopped.sweep(3)
    assert draft.exists(), "its own members do not remove it"
    successor.sweep(4)
    assert not draft.exists()
    with pytest.raises(FileNotFoundError):
        stopped.publish(draft, 3 << 40 | 1, "")
    for each in (stopped, successor):
        each.close()


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_and_folders_have_the_modes_of_the_umask(tmp_path, mask):
    _, _, state = make("sgd")
    before = os.umask(mask)
    try:
        path = write(tmp_path / "new" / "saved", state, 1)
    finally:
        os.umask(before)
    made = [*(tmp_path / "new").rglob("*"), tmp_path / "new"]
    assert path in made and len(made) == 8
    assert {stat.S_IMODE(each.stat().st_mode) for each in made if each.is_dir()} == {0o777 & ~mask}
    assert {stat.S_IMODE(each.stat().st_mode) for each in made if each.is_file()} == {0o666 & ~mask}


def spoil(path, change):
    """A checkpoint whose manifest was written by other rules."""
    text = (path / "manifest.json").read_text()
    assert change(text) != text
    (path / "manifest.json").write_text(change(text))


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def as_link(path):
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


BAD = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "cannot be read: No such file"),
    "cut": (lambda path: spoil(path, lambda text: text[:-1]), "the text is no JSON"),
    "another format": (
        lambda path: spoil(path, lambda text: text.replace('"format":2', '"format":1')),
        "expected one of 2, 3, 5",
    ),
    "another step": (lambda path: spoil(path, lambda text: text.replace('"step":2', '"step":3')), "its checksum"),
    "units of no kind": (lambda path: (path / "manifest.json").write_text('{"format":2,"units":[]}'), "its checksum"),
    "infinite": (
        lambda path: (path / "manifest.json").write_text('{"format":Infinity}'),
        "expected a number, got Infinity",
    ),
    "deep": (lambda path: (path / "manifest.json").write_text('{"format":2,"x":' + "[" * 100_000), "manifest.json"),
    "large": (lambda path: os.truncate(path / "manifest.json", MANIFEST_BYTES + 1), f"at most {MANIFEST_BYTES} bytes"),
    "a pipe": (lambda path: as_pipe(path / "manifest.json"), "expected a plain file"),
    "a link": (lambda path: as_link(path / "manifest.json"), "symbolic links"),
    "a folder": (lambda path: [(path / "manifest.json").unlink(), (path / "manifest.json").mkdir()], "a plain file"),
    "a linked folder": (as_link, "is not a folder"),
    "another name": (lambda path: path.rename(path.with_name("step-00000009")), "is of step 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_passed_over_for_a_good_one_with_one_warning(tmp_path, case):
    _, _, state = make("sgd")
    good, bad = write(tmp_path, state, 1), write(tmp_path, state, 2)
    harm, message = BAD[case]
    harm(bad)
    with pytest.warns(UserWarning, match=f"a checkpoint is ignored: .*{message}") as told:
        assert find(tmp_path, state.catalog.layout) == {3 << 40 | 1: good}
    assert len(told) == 1


def test_a_copy_of_a_checkpoint_under_another_number_is_as_good(tmp_path):
    _, _, state = make("sgd")
    path = write(tmp_path, state, 1)
    for name in ("step-00000001-1", "step-000000001"):
        shutil.copytree(path, tmp_path / name)
    ((version, found),) = find(tmp_path).items()
    assert version == 3 << 40 | 1
    checkpoint.read(read_manifest(found), state, names(state))


def test_unfinished_folders_are_passed_over(tmp_path):
    _, _, state = make("sgd")
    assert find(tmp_path / "missing") == {}
    path = write(tmp_path, state, 1)
    shutil.copytree(path, tmp_path / "step-00000002.writing-0000000003-m")
    shutil.copytree(path, tmp_path / "step-00000003.removing-0")
    (tmp_path / "step-x").mkdir()
    assert list(find(tmp_path).values()) == [path]


@pytest.mark.parametrize("harm", [as_pipe, as_link, Path.unlink])
def test_units_are_read_from_plain_files_of_the_folder_alone(tmp_path, harm):
    _, _, state = make("sgd")
    path = write(tmp_path, state, 1)
    harm(path / "units-0.safetensors")
    with pytest.raises(CorruptCopy, match=r"units-0.safetensors cannot be read"):
        checkpoint.read(read_manifest(path), state, names(state))


def damage(path):
    """Changes the last byte, which is data of some tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(tmp_path, monkeypatch):
    """As when another member removes an old version between the two times that safetensors opens it."""
    _, _, state = make("sgd")
    path = write(tmp_path, state, 1)
    from_file = torch.UntypedStorage.from_file

    def removed_first(file, *arguments, **options):
        Path(os.readlink(file)).unlink()  # its descriptor in /proc
        return from_file(file, *arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed_first)
    assert len(checkpoint.read(read_manifest(path), state, names(state))) == len(names(state))


def test_checkpoint_of_another_model(tmp_path):
    _, _, state = make("sgd")
    _, _, other = make("sgd-momentum")
    path = write(tmp_path, state, 1)
    with pytest.raises(CorruptCopy, match="belongs to another model"):
        checkpoint.read(read_manifest(path), other, names(other))
    with pytest.raises(CorruptCopy, match="has no unit nothing"):
        checkpoint.read(read_manifest(path), state, ["nothing"])


def test_weights_alone_go_into_a_model_without_a_session(tmp_path):
    _, _, state = make("adamw")
    path = write(tmp_path, state, 1)
    model, _, other = make("adamw")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_weights(model, path)
    assert all(parameter.count_nonzero() for parameter in model.parameters() if parameter.dim() > 1)
    expected, found = (everyone_weights(each) for each in (state, other))
    assert expected == found
    file = path / "units-0.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")  # behind the header
    file.write_bytes(content[:start] + bytes(byte ^ 1 for byte in content[start:]))
    with pytest.raises(CorruptCopy, match="the bytes have"):
        load_weights(model, path)
    with pytest.raises(CorruptCopy, match="has no unit"):
        load_weights(torch.nn.Sequential(torch.nn.Linear(2, 2)), path)


def test_weights_of_another_type_are_not_converted_silently(tmp_path):
    _, _, state = make("adamw")
    path = write(tmp_path, state, 1)
    model = make("adamw")[0].bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CorruptCopy, match=r"as torch.bfloat16 \[.*\], found torch.float32 \["):
        load_weights(model, path)
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def everyone_weights(state):
    """The first piece of each unit but the loop's own: its weights."""
    return {
        unit.name: next(iter(unit.tensors(data).values())).tolist()
        for unit, data in ((u, read_unit(state, u)) for u in state.catalog.units if u.name != "session")
    }


def read_unit(state, unit):
    data = torch.empty(unit.nbytes, dtype=torch.uint8)
    state.read(unit.name, data)
    return data


# ---- as a session uses them


def run(tmp_path, job, until, interval=0):
    """Trains alone in this process; returns the session and its events."""
    model, events = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = Session(
        model,
        optimizer,
        ElasticSampler(SAMPLES, 4),
        membership=evermoe.Membership(job=job, memory_dir=str(tmp_path / "memory")),
        checkpoints=evermoe.Checkpoints(tmp_path / "saved", interval=interval),
        on_event=events.append,
    )
    for step in session.steps(until):
        wait_until_written(session)
        with step:
            step.backward(model(dataset()[step.indices]))
    return session, events


def recovered_steps(events):
    return [event.step for event in events if isinstance(event, Recovered)]


def test_session_writes_when_scheduled_and_at_the_end(tmp_path):
    (tmp_path / "memory").mkdir()
    _, events = run(tmp_path, "due", 7, interval=2)
    assert [event.step for event in events if isinstance(event, Checkpoint)] == [2, 4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == ["step-00000006", "step-00000007"]


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [damage, cut, Path.unlink])
def test_session_falls_back_to_the_older_checkpoint_and_names_what_is_wrong(tmp_path, harm):
    (tmp_path / "memory").mkdir()
    straight, _ = run(tmp_path, "first", 6, interval=3)
    harm(tmp_path / "saved" / "step-00000006" / "units-0.safetensors")
    with pytest.warns(UserWarning, match=r"a checkpoint is ignored: .*/step-00000006.*units-0.safetensors") as told:
        again, events = run(tmp_path, "second", 6)
    assert len([each for each in told if "is ignored" in str(each.message)]) == 1
    assert recovered_steps(events) == [3]
    assert digests(again._state) == digests(straight._state)


def test_session_says_when_no_checkpoint_is_left(tmp_path):
    (tmp_path / "memory").mkdir()
    run(tmp_path, "first", 2)
    damage(tmp_path / "saved" / "step-00000002" / "units-0.safetensors")
    with pytest.raises(Exception, match="cannot be used") as found:
        run(tmp_path, "second", 4)
    assert type(found.value).__name__ == "LostExperts"
