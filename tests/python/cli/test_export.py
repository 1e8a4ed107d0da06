"""`evermoe export` of a session's checkpoint: what the other libraries load has the session's weights."""

import pytest
import torch
from torch.distributed import checkpoint as dcp

import evermoe as package
from evermoe.checkpoint.manifest import read_manifest, read_units
from support.commands import evermoe
from support.hub import elastic
from support.worker import dataset

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a checkpoint, and the model as it was then."""
    folder = tmp_path_factory.mktemp("trained")
    model, data = elastic("gpt-oss"), dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = package.ElasticSampler(len(data), 12)
    for step in package.Session(model, optimizer, sampler, checkpoints=folder / "checkpoints").steps(2):
        with step:
            step.backward(model(data[step.indices]))
    model.model.config.save_pretrained(folder / "config")
    return folder, model.model


def test_to_transformers(tmp_path, trained):
    folder, model = trained
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    where = [str(checkpoint), str(tmp_path / "out")]
    done = evermoe(
        "export", "--to", "hf", "--config", str(folder / "config"), "--prefix", "model", *where, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert f"has step 2 of {checkpoint}" in done.stdout
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    again = evermoe(
        "export", "--to", "hf", "--config", str(folder / "config"), "--prefix", "model", *where, folder=tmp_path
    )
    assert again.returncode == 2 and "expected an empty folder" in again.stderr
    for flags, message in [
        ([], "expected --config FOLDER"),
        (["--config", str(folder / "config")], "has no unit"),
    ]:
        wrong = evermoe("export", "--to", "hf", *flags, str(checkpoint), str(tmp_path / "other"), folder=tmp_path)
        assert wrong.returncode == 2 and message in wrong.stderr, wrong.stderr
    assert evermoe("export", "--to", "dcp", str(folder), str(tmp_path / "other"), folder=tmp_path).returncode == 2


def test_to_dcp(tmp_path, trained):
    folder, _ = trained
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    done = evermoe("export", "--to", "dcp", str(checkpoint), str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(checkpoint)
    units = dict(read_units(manifest, list(manifest.units)))
    expected = {f"{unit}/{key}": tensor for unit, tensors in units.items() for key, tensor in tensors.items()}
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
