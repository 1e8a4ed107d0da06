"""Checkpoints of islands: read by islands of any size and by plain sessions, with the same bits."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

import evermoe
from evermoe import CheckpointWeights, ElasticSampler, Membership, Session, load_weights
from evermoe._native import digest
from evermoe.errors import UnsupportedState
from evermoe.session.between_steps import prepare_export
from evermoe.session.session_config import session_config
from support.islands import size_of, start_island
from support.worker import SAMPLES, Fault, Model, dataset

STEPS = 2
"""Of each stage of a job."""
IN_ORDER = {None, "fsdp", "fsdp of three"}
"""Divisions whose positions have the rows of a tensor in their order."""


def load_complete(checkpoint):
    """The complete tensors by unit and name, in the order of the manifest: the rows of all positions together."""
    files = {key: each for file in checkpoint.glob("*.safetensors") for key, each in load_file(file).items()}
    found = {}
    for unit in json.loads((checkpoint / "manifest.json").read_text())["units"]:
        path = unit["name"].partition("@")[0]
        for name in unit["tensors"]:
            found.setdefault(path, {}).setdefault(name, []).append((unit["name"], files[f"{unit['name']}/{name}"]))
    return {path: {name: _joined(parts) for name, parts in tensors.items()} for path, tensors in found.items()}


def _joined(parts):
    in_order = [tensor for _, tensor in sorted(parts)]
    return torch.cat(in_order) if in_order[0].dim() else in_order[0]


def expected_digest(unit, complete):
    """Of a unit's bytes, cut from the complete tensors as FSDP2 cuts them."""
    path, _, place = unit.partition("@")
    position, _, size = place.partition("of")
    parts = [
        tensor.chunk(int(size))[int(position)] if place and tensor.dim() else tensor
        for tensor in complete[path].values()
    ]
    return digest(torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).numpy())


def members(way):
    """Processes of an island, or of a plain session."""
    return 1 if way is None else size_of(way)


def start(job, way, names, *, fault=None, session=None, **options):
    """Islands of these names, or plain members on the same nodes."""
    faults = [] if fault is None else [fault]
    if way is None:
        own = session or {}
        return [job.start(name, *faults, session={"node": f"node-{name}"} | own, **options) for name in names]
    places = [(position, each) for position in range(size_of(way)) for each in faults]
    return [
        each for name in names for each in start_island(job, name, *places, way=way, session=session or {}, **options)
    ]


@pytest.mark.parametrize(
    "stages",
    [
        [(1, None), (2, "fsdp"), (1, "fsdp of three"), (1, None)],
        [(1, "fsdp and tp"), (1, "hsdp"), (1, None), (1, "fsdp and tp")],
    ],
    ids=["by one dimension", "by two"],
)
def test_any_division_resumes_with_the_same_bits_and_losses(start_job, tmp_path, stages):
    """Of each stage, the number of islands, and how they are divided; None for a plain session."""
    folder, losses = tmp_path / "saved", {}
    for stage, (islands, way) in enumerate(stages):
        job = start_job(islands * members(way), checkpoints=str(folder))
        options = {"steps": (stage + 1) * STEPS, "digests": True}
        workers = start(job, way, "ab"[:islands], **options)
        assert [each.join() for each in workers] == [0] * len(workers)
        losses |= {event["step"]: event["loss"] for event in workers[0].events("commit")}
        for each in workers if stage else ():
            first = each.events("share")[0]
            assert first["step"] == stage * STEPS
            if {stages[stage - 1][1], way} <= IN_ORDER:
                complete = load_complete(folder / f"step-{stage * STEPS:08d}")
                assert first["digests"] == {unit: expected_digest(unit, complete) for unit in first["digests"]}
    alone = start_job(1).start("x", steps=len(stages) * STEPS)
    assert alone.join() == 0
    assert losses == {event["step"]: pytest.approx(event["loss"], rel=1e-5) for event in alone.events("commit")}


@pytest.mark.parametrize("interval", [3, 0])
@pytest.mark.parametrize(("before", "after"), [(None, "fsdp"), ("fsdp of three", None)])
def test_newer_memory_of_another_division_is_not_used(start_job, tmp_path, before, after, interval):
    """The job resumes from its checkpoint, or ends: it is not begun again behind its own progress."""
    saving = {"checkpoints": str(tmp_path / "saved"), "checkpoint_interval": interval} if interval else {}
    job = start_job(2 * members(before), **saving)
    killed = start(job, before, "ab", fault=Fault("forward", step=5))
    assert [each.join() for each in killed] == [-9] * len(killed)
    workers = start(job, after, "ab", session={"members": 2 * members(after)})
    assert [each.join() for each in workers] == [0 if interval else 1] * len(workers)
    if interval:
        assert {each.events("share")[0]["step"] for each in workers} == {3}
    else:
        assert "that another mesh has divided" in workers[0].log()


def test_the_complete_model_and_a_checkpoint_are_gathered_from_islands(start_job, tmp_path):
    job = start_job(4, checkpoints=str(tmp_path / "saved"))
    workers = start(job, "fsdp", "ab", steps=2, full={2: "out"})
    assert [each.join() for each in workers] == [0] * 4
    folders = [job.folder / "out.saved", tmp_path / "saved"]
    for folder in folders:
        plain = zeros()
        load_weights(plain, folder / "step-00000002")
        expected = plain.state_dict()
        torch.testing.assert_close(torch.load(job.folder / "out.0.pt"), expected, rtol=0, atol=0)
        torch.testing.assert_close(load_file(job.folder / "out" / "model.safetensors"), expected, rtol=0, atol=0)
    assert [torch.load(job.folder / f"out.{rank}.pt") for rank in (1, 2, 3)] == [{}] * 3
    with evermoe.deferred():
        model = Model()
    session = Session(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        ElasticSampler(SAMPLES, 4),
        weights=CheckpointWeights(folders[0] / "step-00000002"),
        membership=Membership(memory_dir=str(job.memory)),
    )
    for step in session.steps(1):
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
        with step as indices:
            step.backward(model(dataset()[indices]))


@pytest.mark.parametrize("way", ["fsdp", "fsdp of three"])
def test_a_model_loads_a_checkpoint_of_torch_before_its_session_begins(start_job, tmp_path, way):
    torch.manual_seed(7)
    model = zeros()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    job = start_job(size_of(way), checkpoints=str(tmp_path / "saved"), checkpoint_interval=0)
    workers = start(job, way, "a", steps=1, dcp=str(tmp_path / "dcp"), lr=0.0)
    assert [each.join() for each in workers] == [0] * len(workers)
    plain = zeros()
    load_weights(plain, tmp_path / "saved" / "step-00000001")
    parameters = dict(plain.named_parameters())
    torch.testing.assert_close(parameters, dict(model.named_parameters()), rtol=0, atol=0)


def test_saves_of_some_units_and_exports_from_a_session_are_refused_by_name():
    mesh = object.__new__(DeviceMesh)
    with pytest.raises(ValueError, match="preset pec and mesh"):
        session_config(preset="pec", checkpoints="saved", mesh=mesh)
    session = object.__new__(Session)
    session._config = session_config(mesh=mesh)
    with pytest.raises(UnsupportedState, match="export of a session with a mesh"):
        prepare_export(session, is_complete=True)


def zeros():
    """A model whose weights are all zero."""
    model = Model()
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.zero_()
    return model
