"""`evermoe checkpoints`: real checkpoints of a real session, from the command line."""

import json
from contextlib import closing

import pytest
import torch

from evermoe import Checkpoints, ElasticSampler, Membership, Session
from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find
from evermoe.checkpoint.owner import Owner, read_owner
from evermoe.checkpoint.retention import Retention
from evermoe.cli.main import main
from support.worker import SAMPLES, Model, dataset, wait_until_written


@pytest.fixture
def folder(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "memory").mkdir()
    membership = Membership(job="listed", memory_dir=str(tmp_path / "memory"))
    checkpoints = Checkpoints(tmp_path / "saved", interval=2, keep=2, keep_interval=4)
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), membership=membership, checkpoints=checkpoints)
    for step in session.steps(10):
        wait_until_written(session)
        with step:
            step.backward(model(dataset()[step.indices]))
    return tmp_path / "saved"


def names(folder):
    return sorted(path.name for path in find(folder).values())


def test_list_and_show(folder, capsys):
    assert main(["checkpoints", "list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 complete checkpoints of job listed" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [f"step-{step:08d}" for step in (4, 8, 10)]
    assert main(["checkpoints", "list", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in found] == [4, 8, 10]
    assert main(["checkpoints", "show", found[-1]["path"], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], len(shown["units"])) == (10, found[-1]["units"])
    assert main(["checkpoints", "show", found[-1]["path"]]) == 0
    assert "first.experts.1  units-0.safetensors" in capsys.readouterr().out


def test_verify_finds_a_flipped_bit(folder, capsys):
    assert main(["checkpoints", "verify", str(folder)]) == 0
    data = folder / "step-00000008" / "units-0.safetensors"
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    assert main(["checkpoints", "verify", str(folder / "step-00000004"), str(folder / "step-00000008")]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "step-00000004: " in told[-2] and told[-2].endswith("units are complete")
    assert "step-00000008: damaged: " in told[-1] and "expected digest" in told[-1]


def test_prune(folder, capsys):
    assert main(["checkpoints", "prune", str(folder), "--keep", "1", "--dry-run"]) == 0
    assert [line.rsplit("/", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "step-00000004",
        "step-00000008",
    ]
    assert names(folder) == ["step-00000004", "step-00000008", "step-00000010"]
    owner = Owner("next", read_owner(folder).layout)
    with closing(CheckpointFolder(folder, owner, "m")):
        assert main(["checkpoints", "prune", str(folder), "--keep", "1"]) == 2
    assert "job 'next' runs in" in capsys.readouterr().err
    assert main(["checkpoints", "prune", str(folder), "--keep", "1", "--every", "8"]) == 0
    assert names(folder) == ["step-00000008", "step-00000010"]
    assert main(["checkpoints", "prune", str(folder), "--keep", "0"]) == 2
    assert "--keep" in capsys.readouterr().err


def test_no_such_folder(tmp_path, capsys):
    for action in ("list", "verify", "prune"):
        assert main(["checkpoints", action, str(tmp_path / "none")]) == 2
        assert "none" in capsys.readouterr().err


def test_of_a_step_that_was_taken_again_the_newest_version_stays():
    first, again = 1 << 40 | 40, 2 << 40 | 40
    versions = [first, again, *(2 << 40 | step for step in (50, 60, 70, 80, 90))]
    assert Retention(2, 40).superseded(versions) == {first, *(2 << 40 | step for step in (50, 60, 70))}
    assert Retention(1).superseded(versions) == {*versions[:-1]}
