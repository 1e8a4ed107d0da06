"""Checkpoints that a script asks for: in the session's place, below it, and elsewhere."""

import itertools
import time

import pytest
import torch

from evermoe import Checkpoints, ElasticSampler, Membership, Session, load_weights
from evermoe.errors import PersistFailed
from evermoe.events import Checkpoint
from support.between import scenario
from support.worker import SAMPLES, Fault, Model, dataset


def train(folder, until, after, **options):
    """Train alone, and call `after(session)` after each step; returns the model and the session's events."""
    torch.manual_seed(0)
    model, events = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    sampler = ElasticSampler(SAMPLES, 4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    membership = Membership(memory_dir=str(memory))
    session = Session(
        model, optimizer, sampler, membership=membership, scheduler=schedule, on_event=events.append, **options
    )
    for step in session.steps(until):
        with step as indices:
            step.backward(model(dataset()[indices]))
        after(session)
    return model, events


def weights_of(path):
    model = Model()
    load_weights(model, path)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("where", [None, "best", "elsewhere/deep"])
def test_a_checkpoint_is_complete_when_save_returns(tmp_path, where):
    home, found = tmp_path / "home", {}
    target = tmp_path / where if where and "/" in where else where

    def save(session):
        if session.step in (1, 2, 3):
            path = session.save(target)
            saved = weights_of(path)
            assert all(map(torch.equal, saved, session.model.parameters())), "the weights of this very step"
            assert session.save(target) == path, "the same state once"
            found[session.step] = path

    _, events = train(tmp_path, 4, save, checkpoints=home)
    folder = {None: home, "best": home / "best"}.get(where, tmp_path / str(where))
    assert found == {step: str(folder / f"step-{step:08d}") for step in (1, 2, 3)}
    kept = sorted(path.name for path in folder.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in ((3, 4) if where is None else (1, 2, 3))]
    assert [event.step for event in events if isinstance(event, Checkpoint)] == [1, 2, 3, 4]


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_checkpoints_are_kept_as_the_script_says(tmp_path, keep):
    train(tmp_path, 5, lambda session: session.step != 3 and session.save("best", keep=keep), checkpoints=tmp_path)
    kept = sorted(path.name for path in (tmp_path / "best").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (4, 5)[-keep:]]
    assert all(len(weights_of(tmp_path / "best" / name)) for name in kept)


@pytest.mark.parametrize(("where", "keep"), [("best", 0), (None, 1), ("best", 1.5)])
def test_a_wrong_number_to_keep_is_refused(tmp_path, where, keep):
    with pytest.raises(ValueError, match="keep"):
        train(tmp_path, 1, lambda session: session.save(where, keep=keep), checkpoints=tmp_path)


def test_checkpoints_are_written_by_time(tmp_path):
    options = Checkpoints(tmp_path / "home", time_interval=0.3, keep=9)
    begun = []
    _, events = train(
        tmp_path, 20, lambda session: begun.append(time.monotonic()) or time.sleep(0.06), checkpoints=options
    )
    steps = [event.step for event in events if isinstance(event, Checkpoint)]
    assert 2 <= len(steps) < 20 and steps[-1] == 20
    times = [begun[step - 1] for step in steps[:-1]]
    assert all(later - earlier > 0.25 for earlier, later in itertools.pairwise(times))


def test_members_begin_a_checkpoint_by_the_clock_of_any_of_them(start_job, tmp_path):
    job = start_job(2, checkpoints=str(tmp_path / "home"), checkpoint_time_interval=3600.0)
    members = job.start_all({}, "ab", steps=6, **scenario("overdue"))
    assert [each.join() for each in members] == [0, 0]
    for each in members:
        assert [event["step"] for event in each.events("checkpoint")] == [4, 6]


def test_a_session_resumes_from_what_was_saved(tmp_path):
    steps, rates = [], []
    train(tmp_path, 3, lambda session: session.step == 2 and session.save(tmp_path / "kept"))

    def note(session):
        steps.append(session.step)
        rates.append(session.learning_rate)

    train(tmp_path, 4, note, checkpoints=tmp_path / "kept")
    assert steps == [3, 4]
    assert rates == [1e-3 / 8, 1e-3 / 16], "the next step's"


@pytest.mark.parametrize(
    ("where", "home", "problem"),
    [
        (None, None, "this session has no place for checkpoints; give a path or a URL"),
        ("best", None, "'best' names a folder below the session's checkpoints"),
        ("save-1", "home", "the session itself uses the name 'save-1'"),
        ("step-1", "home", "the session itself uses the name 'step-1'"),
        ("a b", "home", "expected the name of a checkpoint to be a name of 1 to 100 letters"),
    ],
)
def test_a_checkpoint_without_a_place_is_refused(tmp_path, where, home, problem):
    options = {} if home is None else {"checkpoints": tmp_path / home}
    with pytest.raises(ValueError, match=problem):
        train(tmp_path, 1, lambda session: session.save(where), **options)


def test_training_continues_after_a_checkpoint_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()

    def save(session):
        with pytest.raises(PersistFailed, match="file cannot be written to"):
            session.save(tmp_path / "file")

    assert len(train(tmp_path, 2, save)[1])


def test_a_death_while_a_checkpoint_is_written_leaves_none(start_job, tmp_path):
    job = start_job(2)
    a, b = job.start_all({"b": [Fault("saving", 3)]}, "ab", steps=5, **scenario("checkpoint"))
    assert [a.join(), b.join()] == [0, -9]
    first, second = a.events("saved")
    assert (first["step"], first["path"], second["step"]) == (3, None, 4)
    saved = sorted(path.name for path in tmp_path.rglob("kept/step-*"))
    assert saved == ["step-00000004"] and second["path"].endswith("kept/step-00000004")
