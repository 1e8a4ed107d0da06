"""Objects of the script whose state the job keeps: the same on all members, after each loss, join and restart."""

import os
import signal

import pytest
import torch

import evermoe
from evermoe.errors import UnsupportedState
from evermoe.process.reports import EventFile
from evermoe.session.session_config import session_config
from support.flat_options import grouped
from support.habits import DATA, Model, adamw, mean_loss, run
from support.harness import PATIENCE, SERVER, wait_until

DIES_IN, MANY = 4, 100_000


class Notes:
    """Counts of a script between its steps."""

    def __init__(self):
        self.notes, self.joined_at = 0, None

    def state_dict(self):
        return {"notes": self.notes, "joined_at": self.joined_at}

    def load_state_dict(self, state):
        self.notes, self.joined_at = state["notes"], state["joined_at"]


def session_of(notes, gamma=0.9, **options):
    model = Model()
    optimizer, sampler = adamw(model), evermoe.ElasticSampler(len(DATA), 12)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    session = evermoe.Session(
        model, optimizer, sampler, scheduler=schedule, stateful={"notes": notes}, **grouped(options)
    )
    return model, session


def train(write, node, options):
    """Notes each step after its vote. b dies in a step; c joins with another schedule in its script, and all leave."""
    notes = Notes()
    gamma = 0.5 if node == "c" else 0.9
    model, session = session_of(notes, gamma, node=node, resume_settings="script", **options)
    for step in session.steps(MANY):
        with step:
            if node == "b" and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(mean_loss(model, DATA[step.indices]))
        if step.committed:
            lr = session.optimizer.param_groups[0]["lr"]
            write("committed", step=session.step, notes=notes.notes, members=session.group.size, lr=lr)
            notes.notes += 1
            if session.group.size == 2 and session.step > DIES_IN and notes.joined_at is None:
                notes.joined_at = session.step
            if notes.joined_at == session.step - 2:
                session.leave()


@pytest.fixture
def start(tmp_path):
    """`start(node, options)` starts a worker; its events so far by `events(node)`."""
    processes = []

    def begin(node, options):
        processes.append(SERVER.Process(target=run, args=(train, str(tmp_path), node, node, options)))
        processes[-1].start()
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.join()


def events(folder, node):
    return EventFile(folder / f"{node}.jsonl").read()


def test_changes_between_steps_survive_a_loss_a_join_and_a_restart(start, start_job, tmp_path):
    job = start_job(2, join_interval=1)
    options = job.session | {"lighthouse": job.address, "checkpoints": str(tmp_path / "checkpoints")}
    workers = [start(node, options) for node in "ab"]
    wait_until(lambda: workers[1].exitcode is not None, "b is dead")
    workers.append(start("c", options))
    for worker in workers:
        worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL, 0], (tmp_path / "a.log").read_text()
    first, joined = events(tmp_path, "a"), events(tmp_path, "c")
    assert [each["notes"] for each in first] == [each["step"] - 1 for each in first]
    assert [each["lr"] for each in first] == pytest.approx([1e-2 * 0.9 ** each["step"] for each in first])
    assert joined == first[-len(joined) :]
    assert len(joined) >= 3

    notes = Notes()
    model, session = session_of(notes, checkpoints=tmp_path / "checkpoints")
    for step in session.steps(first[-1]["step"] + 1):
        assert notes.state_dict() == {"notes": first[-1]["notes"], "joined_at": joined[0]["step"]}
        with step:
            step.backward(mean_loss(model, DATA[step.indices]))


@pytest.mark.parametrize("stateful", [{"notes": 3}, {3: Notes()}, [Notes()]], ids=["number", "key", "list"])
def test_what_has_no_state_is_refused_by_name(stateful):
    with pytest.raises(ValueError, match="expected stateful to "):
        session_config(stateful=stateful)


@pytest.mark.parametrize(
    ("state", "words"),
    [(object(), "the objects in stateful must be JSON"), ("x" * 20_000, r"the objects in stateful take \d+ bytes")],
    ids=["no JSON", "large"],
)
def test_states_that_do_not_fit_are_refused_before_the_first_step(tmp_path, state, words):
    notes = Notes()
    notes.notes = state
    with pytest.raises(UnsupportedState, match=words):
        session_of(notes, memory_dir=str(tmp_path))


def test_names_are_the_same_on_all_members():
    assert session_config(stateful={"best": Notes(), "run": Notes()}).shared()["stateful"] == "best, run"
    assert session_config(stateful={"run": Notes(), "best": Notes()}).shared()["stateful"] == "best, run"
