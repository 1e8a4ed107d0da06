"""The complete model from a session: keys and bits of a model that holds all experts, and never half of a folder."""

import pytest
import torch
from torch import nn

import evermoe
from evermoe.checkpoint import weight_folder
from evermoe.checkpoint.folder_weights import SafetensorsFiles
from evermoe.errors import PersistFailed, UnsupportedState
from evermoe.state.unit import weight_tensors
from support.harness import FEWEST
from support.history import check_history
from support.models import Tied
from support.worker import Fault, make_model


def read(folder):
    files = SafetensorsFiles(folder)
    return {key: files.tensor(key).clone() for key in files.keys()}  # noqa: SIM118


def same(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


@torch.no_grad()
def take_over(model, held_R):
    """Gives a model what ranks hold of it."""
    targets = weight_tensors(model)
    assert targets.keys() == {unit for held in held_R for unit in held}
    for held in held_R:
        for unit, tensors in held.items():
            for key, tensor in tensors.items():
                targets[unit][key].copy_(tensor)


CASES = [
    ("", {"shard_optimizer": True}, {"deferred": True}),
    pytest.param("gpt-oss", FEWEST, {}, marks=pytest.mark.long),
    pytest.param("mixtral", FEWEST | {"shard_optimizer": True}, {"deferred": True}, marks=pytest.mark.long),
    pytest.param("deepseek-v3", {}, {"dtype": "bfloat16", "optimizer": "evermoe"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "session", "options"), CASES)
def test_three_workers_then_two_give_what_they_hold_together(start_job, tmp_path, name, session, options):
    job = start_job(3, checkpoints=str(tmp_path / "checkpoints"), **session)
    options = {"model": name, "steps": 6, "full": {4: "four", 6: "six"}} | options
    workers = job.start_all({"c": [Fault("reduce", 4)]}, **options)
    assert [each.join(80) for each in workers] == [0, 0, -9]
    check_history(workers)
    for place, ranks in (("four", 3), ("six", 2)):
        model = make_model(name).to(getattr(torch, options.get("dtype", "float32")))
        take_over(model, [torch.load(job.folder / f"{place}.{rank}.held") for rank in range(ranks)])
        expected = model.state_dict()
        same(torch.load(job.folder / f"{place}.0.pt"), expected)
        assert [torch.load(job.folder / f"{place}.{rank}.pt") for rank in range(1, ranks)] == [{}] * (ranks - 1)
        written = read(job.folder / place)
        same({key: written[key] for key in expected}, expected)
        if name:
            import transformers

            model.model.save_pretrained(job.folder / f"{place}.expected")
            same(read(job.folder / f"{place}.hub"), read(job.folder / f"{place}.expected"))
            transformers.AutoModelForCausalLM.from_pretrained(job.folder / f"{place}.hub")
    evermoe.load_weights(model, max((tmp_path / "checkpoints").glob("step-*")))
    same(model.state_dict(), expected)
    assert not list(job.folder.glob("*.writing-*"))


@pytest.mark.parametrize("victim", ["a", "b"])
def test_member_that_dies_leaves_no_half_folder_and_the_call_can_be_repeated(start_job, victim):
    """In the middle of the experts: rank 0, which writes, or one that sends."""
    job = start_job(3, **FEWEST)
    fault = Fault("full exchange", 2, nth=3)
    survivors = [name for name in "abc" if name != victim]
    workers = job.start_all({victim: [fault]}, steps=4, full={2: "full", 3: "full"})
    exits = {each.name: each.join() for each in workers}
    assert exits == {victim: -9} | dict.fromkeys(survivors, 0)
    check_history(workers)
    for each in workers:
        assert [event["step"] for event in each.events("full")] == ([] if each.name == victim else [3])
    (state,) = filter(None, (torch.load(path) for path in sorted(job.folder.glob("full.*.pt"))))
    same({key: read(job.folder / "full")[key] for key in state}, state)
    assert state.keys() == make_model("").state_dict().keys()


class Hooked(nn.Module):
    """Around a model with MoE layers, with a state dict of its own."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_state_dict_post_hook(lambda *_: None)

    def forward(self, tokens):
        return self.model(tokens)


def alone(model, visit, path):
    """A session of one member, which calls `visit(session)` between two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = evermoe.Session(
        model, optimizer, evermoe.ElasticSampler(24, 6), membership=evermoe.Membership(memory_dir=str(path))
    )
    with pytest.raises(RuntimeError, match="has no weights yet"):
        session.full_state_dict()
    for step in session.steps(2):
        with step:
            step.backward(model(step.indices % 12))
        if session.step == 1:
            visit(session)
    with pytest.raises(RuntimeError, match="has left its job"):
        session.full_state_dict()


def test_tied_weights_files_of_a_size_and_folders_that_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_folder, "SHARD_BYTES", 500)
    model, folder = Tied(), tmp_path / "full"
    (tmp_path / "full.writing-dead").mkdir()

    def visit(session):
        expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        state = session.full_state_dict()
        same(state, expected)
        assert state["head.weight"] is state["embedding.weight"]
        session.full_state_dict(folder)
        same({key: read(folder)[key] for key in expected}, expected)
        assert len(list(folder.glob("*.safetensors"))) > 1 and not list(tmp_path.glob("*.writing-*"))
        with torch.no_grad():
            model.scale.zero_()
        assert state["scale"].any(), "of its own memory"
        with pytest.raises(PersistFailed, match="expected an empty folder"):
            session.full_state_dict(folder)
        (tmp_path / "file").touch()
        with pytest.raises(PersistFailed, match="rank 0: "):
            session.full_state_dict(tmp_path / "file" / "full")

    alone(model, visit, tmp_path)


def test_a_state_dict_of_another_making_is_refused(tmp_path):
    def visit(session):
        with pytest.raises(UnsupportedState, match=r"the model \(Hooked\) has MoE layers and changes its state"):
            session.full_state_dict()

    alone(Hooked(Tied()), visit, tmp_path)
