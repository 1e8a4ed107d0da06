"""`evermoe checkpoints` with URLs: on a real server, as a person types it."""

import json

import pytest

from evermoe.cli.main import main
from support.places import Spot, Writer, all_whole, write
from support.stores import contents

URL = "s3://bucket/run"


@pytest.fixture
def spot(s3):
    return Spot(URL)


def run(capsys, *arguments, code=0):
    assert main(["checkpoints", *map(str, arguments)]) == code
    told = capsys.readouterr()
    return (told.out + told.err).splitlines()


def test_checkpoints_at_a_url_are_listed_shown_and_verified(spot, capsys):
    paths = write(spot, 1, 2)
    head, *rows = run(capsys, "list", URL)
    assert head == f"{URL}: 2 complete checkpoints of job job"
    assert [row.split()[0] for row in rows] == [path.name for path in paths]
    listed = json.loads("\n".join(run(capsys, "list", URL, "--json")))
    assert [(each["path"], each["step"]) for each in listed] == [
        (str(path), step + 1) for step, path in enumerate(paths)
    ]
    assert run(capsys, "show", paths[1])[0] == f"{paths[1]}: step 2, generation 3"
    assert [line.rsplit(": ", 1)[0] for line in run(capsys, "verify", URL)] == [str(path) for path in paths]
    file = next(name for name in spot.files() if name.startswith(paths[1].name) and name.endswith("safetensors"))
    spot.write(file, spot.read(file)[:-1])
    intact, damaged = run(capsys, "verify", URL, code=1)
    assert "units are complete" in intact and damaged.startswith(f"{paths[1]}: damaged: ")


def test_a_unit_that_another_checkpoint_has_is_shown_with_that_ones_name(spot, capsys):
    writer = Writer(spot)
    first, second = (writer.write(step, None if step == 1 else contents(1)) for step in (1, 2))
    assert any(f"  {first.name}/0000-" in line for line in run(capsys, "show", second))
    shown = json.loads("\n".join(run(capsys, "show", second, "--json")))
    assert {unit["origin"] for unit in shown["units"].values()} == {first.name}


def test_checkpoints_are_copied_both_ways_and_once(spot, capsys, tmp_path):
    paths = write(spot, 1, 2)
    assert [line.split(": copied to ")[0] for line in run(capsys, "copy", URL, tmp_path / "here")] == list(
        map(str, paths)
    )
    assert all(": already in " in line for line in run(capsys, "copy", URL, tmp_path / "here"))
    assert len(run(capsys, "copy", tmp_path / "here" / "step-00000002", "s3://bucket/back")) == 1
    assert all_whole(Spot("s3://bucket/back")) == [2]


def test_checkpoints_at_a_url_are_pruned(spot, capsys):
    paths = write(spot, 1, 2)
    spot.write("step-00000003.0000000003-dead/begun.json", b"{}")
    assert run(capsys, "prune", "--keep", 1, "--dry-run", URL) == [f"would remove {paths[0]}"]
    (told,) = run(capsys, "prune", "--keep", 1, URL, code=2)
    assert "step-00000003.0000000003-dead is being written" in told and "--abandoned" in told
    assert run(capsys, "prune", "--keep", 1, "--abandoned", URL) == [f"removed {paths[0]}"]
    assert all_whole(spot) == [2]
    assert {name.split("/")[0] for name in spot.files() if name.endswith("safetensors")} == {paths[1].name}


def test_a_checkpoint_at_a_url_is_exported(spot, capsys, tmp_path):
    (path,) = write(spot, 1)
    run(capsys, "export", "--to", "dcp", path, tmp_path / "out")
    assert (tmp_path / "out" / ".metadata").exists()


def test_impossible_input_is_an_error_of_one_line(spot, capsys):
    for arguments, message in [
        (["list", "ftp://host/run"], "the scheme ftp:// is unknown"),
        (["show", f"{URL}/step-00000009"], "is not a manifest of a checkpoint: the file is missing"),
        (["verify", "s3://bucket/nothing"], "expected a checkpoint, found none"),
    ]:
        (told,) = run(capsys, *arguments, code=2)
        assert told.startswith("evermoe checkpoints: ") and message in told
