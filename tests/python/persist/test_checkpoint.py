"""Checkpoints: there whole or not at all, readable by anyone, and nothing damaged is taken for good."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evermoe import CorruptCopy, ElasticSampler, Session, load_weights
from evermoe.comm.group import Group
from evermoe.events import Checkpoint, Recovered
from evermoe.persist import checkpoint
from evermoe.persist.manifest import find, read_manifest
from support.models import digests, everyone, make
from support.worker import SAMPLES, Model, dataset


def write(folder, state, step):
    return checkpoint.write(folder, state, [unit.name for unit in state.catalog.units], (3 << 40) | step, step, Group())


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
    assert torch.equal(tensors["moe.experts.1/weights"], model.moe.weights[1])
    assert torch.equal(tensors["moe.experts.1/weights/exp_avg"], optimizer.state[model.moe.weights]["exp_avg"][1])
    assert tensors["model/steps"].item() == 2
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], len(manifest["units"])) == (1, 2, len(state.catalog.units))


def test_the_same_step_is_written_again(tmp_path):
    model, optimizer, state = make("sgd")
    write(tmp_path, state, 1)
    with torch.no_grad():
        model.scale += 1
    path = write(tmp_path, state, 1)
    tensors = load_file(path / "units-0.safetensors")
    assert torch.equal(tensors["model/scale"], model.scale)
    assert optimizer.param_groups


def test_unfinished_and_foreign_folders_are_passed_over(tmp_path):
    _, _, state = make("sgd")
    assert find(tmp_path / "missing") == {}
    path = write(tmp_path, state, 1)
    shutil.copytree(path, tmp_path / "step-00000002.writing")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "manifest.json").write_text("{")
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "manifest.json").write_text('{"format": 99, "units": {}, "version": 5}')
    assert list(find(tmp_path).values()) == [path]
    with pytest.raises(CorruptCopy, match="format 99, expected 1"):
        read_manifest(tmp_path / "step-00000005")


def damage(path):
    """Changes the last byte, which is data of some tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="torch's own error is told, and ends a recovery")
def test_a_file_that_goes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """As when another member removes an old version between the two times that safetensors opens it."""
    _, _, state = make("sgd")
    path = write(tmp_path, state, 1)

    from_file = torch.UntypedStorage.from_file

    def removed_first(file, *arguments, **options):
        Path(file).unlink()
        return from_file(file, *arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed_first)
    with pytest.raises(CorruptCopy, match="cannot be read"):
        checkpoint.read(read_manifest(path), state, names(state))


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


def run(tmp_path, job, until, **options):
    """Trains alone in this process; returns the session and its events."""
    model, events = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = Session(
        model,
        optimizer,
        ElasticSampler(SAMPLES, 4),
        on_event=events.append,
        job=job,
        memory_dir=str(tmp_path / "memory"),
        checkpoint_dir=tmp_path / "saved",
        **options,
    )
    for step in session.steps(until):
        with step:
            step.backward(model(dataset()[step.indices]))
    return session, events


def recovered_steps(events):
    return [event.step for event in events if isinstance(event, Recovered)]


def test_session_writes_when_due_and_at_the_end(tmp_path):
    (tmp_path / "memory").mkdir()
    _, events = run(tmp_path, "due", 7, checkpoint_every=2)
    assert [event.step for event in events if isinstance(event, Checkpoint)] == [2, 4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000006", "step-00000007"]


def test_session_falls_back_to_the_older_checkpoint(tmp_path):
    (tmp_path / "memory").mkdir()
    straight, _ = run(tmp_path, "first", 6, checkpoint_every=3)
    damage(tmp_path / "saved" / "step-00000006" / "units-0.safetensors")
    again, events = run(tmp_path, "second", 6)
    assert recovered_steps(events) == [3]
    assert digests(again._state) == digests(straight._state)


def test_session_says_when_no_checkpoint_is_left(tmp_path):
    (tmp_path / "memory").mkdir()
    run(tmp_path, "first", 2)
    damage(tmp_path / "saved" / "step-00000002" / "units-0.safetensors")
    with pytest.raises(Exception, match="cannot be used") as found:
        run(tmp_path, "second", 4)
    assert type(found.value).__name__ == "LostExperts"
