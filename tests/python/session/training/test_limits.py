"""A job of one process, waiting in vain, schedules and clipping, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest
import torch

import evermoe
from evermoe.errors import PeerLost
from support import worker
from support.harness import PATIENCE, as_json
from support.history import check_history, check_recovered
from support.optimizers import make_optimizer, make_scheduler
from support.worker import Fault, Model, Options, dataset


def losses(each):
    """Of each committed step."""
    return {event["step"]: event["loss"] for event in each.events("commit")}


def reference(steps=10, batch_size=12, optimizer="adamw", schedule=None, max_grad_norm=None):
    """The same training as a plain loop in this process: losses and the learning rate after each step."""
    model, data = Model(), dataset()
    optimizer = make_optimizer(optimizer, model)
    scheduler = make_scheduler(schedule, optimizer)
    sampler = evermoe.ElasticSampler(worker.SAMPLES, batch_size)
    found, rates = {}, {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(data[sampler.batch()])
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        sampler.advance()
        found[step], rates[step + 1] = loss.item(), optimizer.param_groups[0]["lr"]
    return found, rates


@pytest.mark.parametrize(
    ("optimizer", "norm", "batch_size", "fault"),
    [
        ("adamw", None, 12, None),
        ("adamw", None, 12, Fault("copy", 5)),
        ("sgd", 0.3, 12, None),
        ("sgd", 0.3, 12, Fault("copy", 5)),
        ("adamw", None, 1, Fault("vote", 5)),
    ],
    ids=["adamw", "adamw, killed", "sgd clipped", "sgd clipped, killed", "more members than samples, killed"],
)
@pytest.mark.few(2)
def test_losses_are_those_of_one_process(start_job, optimizer, norm, batch_size, fault):
    """Also where a member without a sample takes part with weight 0."""
    job = start_job(max_grad_norm=norm)
    workers = job.start_all({"b": [fault]} if fault else {}, optimizer=optimizer, batch_size=batch_size)
    assert [each.join() for each in workers] == [0, -9 if fault else 0, 0]
    check_history(workers)
    expected, _ = reference(optimizer=optimizer, max_grad_norm=norm, batch_size=batch_size)
    seen = losses(workers[0]) | losses(workers[2])
    # A step that is interrupted in its copies may be known to nobody.
    assert seen.keys() >= expected.keys() - ({4} if fault and fault.point == "copy" else set())
    for step, loss in seen.items():
        assert loss == pytest.approx(expected[step], abs=2e-4), step
    if norm is not None:
        unclipped, _ = reference(optimizer=optimizer)
        assert abs(expected[9] - unclipped[9]) > 0.01


@pytest.mark.parametrize("schedule", ["cosine", "warmup"])
def test_schedule_survives(start_job, schedule):
    job = start_job()
    job.open_gate(8)
    workers = job.start_all({"b": [Fault("update", 5)]}, gated=True, schedule=schedule, steps=20)
    workers[0].wait_for("gate", step=8)
    workers.append(job.start("d", schedule=schedule, steps=20))
    job.take_in(workers[3], until=20)
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    _, rates = reference(20, schedule=schedule)
    for each in workers:
        for event in each.events("copy"):
            if event["step"]:
                assert event["rates"] == [pytest.approx(rates[event["step"]], rel=1e-9)], (each.name, event)
    assert len(set(rates.values())) > 10


def test_alone_without_a_lighthouse_killed_and_started_again(start_job):
    job = start_job()
    job.open_gate(5)
    alone = {"lighthouse": None, "session": {"members": None}}
    killed = job.start("a", Fault("vote", 5), gated=True, **alone)
    killed.wait_for("gate", step=5)
    arenas = job.arenas()
    assert arenas
    for path in arenas:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    job.open_gate(10)
    assert killed.join() == -9
    again = job.start("a", **alone)
    assert again.join() == 0
    assert check_recovered([killed, again], again, 0)["step"] == 5
    assert list(job.memory.iterdir()) == []
    expected = reference()[0]
    del expected[4]  # taken by the first process, which did not live to see the next vote, and so not reported
    assert losses(killed) | losses(again) == pytest.approx(expected, abs=1e-5)
    check_history([killed, again])


def test_leaving_the_loop_early_keeps_the_memory_until_close(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    membership = evermoe.Membership(job=f"early{os.getpid()}", memory_dir=str(tmp_path))
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(worker.SAMPLES, 4), membership=membership)
    for step in session.steps(100):
        with step:
            step.backward(model(dataset()[step.indices]))
        if session.step == 3:
            assert list(tmp_path.glob("**/*.arena"))
            break
    assert session.step == 3
    assert list(tmp_path.glob("**/*.arena"))
    session.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    membership = evermoe.Membership(job=f"file{os.getpid()}", memory_dir=str(tmp_path / "file"))
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        evermoe.Session(model, optimizer, evermoe.ElasticSampler(4, 2), membership=membership)


def test_no_lighthouse(start_job):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    job = start_job(lighthouse=address, quorum_timeout=2)
    began = time.monotonic()
    lonely = job.start("a")
    assert lonely.join() == 1
    assert time.monotonic() - began < 8
    failed = lonely.events("failed")[0]
    assert failed["error"] == "JoinTimeout"
    assert address in failed["message"]
    assert "within 2 s" in failed["message"]


def test_members_say_who_was_refused_and_for_what_reason(start_job):
    """`comm/test_gathering.py` has all messages."""
    job = start_job(4, quorum_timeout=6)
    workers = job.start_all({}, "abc")
    for each in workers:
        each.wait_for("phase", phase="agree")  # the refused one ends at its first answer: who comes later sees nobody
    refused = job.start("d", steps=5, batch_size=24)
    assert [each.join(40) for each in [*workers, refused]] == [1] * 4
    for each in workers:
        failed = each.events("failed")[0]
        assert failed["error"] == "JoinTimeout"
        said = failed["message"]
        assert "3 of 4 members have joined (a-" in said
        assert "d-" in said
        assert "was refused: batch_size is 12 here, 24 on the other worker" in said
        assert "start 1 more, or set the number of members that exist (--members, EVERMOE_MEMBERS)" in said
        assert "Check that the Lighthouse" not in said


@pytest.mark.long
def test_script_run_by_a_new_interpreter(start_job):
    """A user's script: the interpreter ends without hanging on a thread, and prints nothing it should not."""
    job = start_job(2)
    command = [sys.executable, worker.__file__]
    running = []
    with contextlib.ExitStack() as stack:
        for name, faults in (("a", []), ("b", []), ("c", [Fault("vote", 5)])):
            fields = {**job.session, "node": name, "members": 3}
            options = Options(name, str(job.folder), job.address, fields, faults=faults)
            process = subprocess.Popen([*command, as_json(options)], stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        texts = [process.communicate(timeout=PATIENCE)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, -signal.SIGKILL], texts
    assert "Traceback" not in "".join(texts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_replicas_on_a_gpu_that_is_missing():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preset = evermoe.presets.Auto(replica_device="cuda:1")
    with pytest.raises(ValueError, match="replica_device is 'cuda:1', but this process has no such GPU"):
        evermoe.Session(model, optimizer, evermoe.ElasticSampler(4, 2), preset=preset)


@pytest.fixture
def session(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    membership = evermoe.Membership(job=f"misuse{os.getpid()}", memory_dir=str(tmp_path))
    made = evermoe.Session(model, optimizer, evermoe.ElasticSampler(4, 2), membership=membership)
    yield made
    made.close()


def test_step_without_backward(session):
    with pytest.raises(RuntimeError, match=r"step.backward\(loss\) was not called"):
        for step in session.steps(3):
            with step:
                pass


def test_step_without_with(session):
    with pytest.raises(RuntimeError, match="must be used as `with step:`"):
        for _ in session.steps(3):
            pass


def test_a_job_without_progress_ends_with_the_last_failure(tmp_path):
    model = torch.nn.Sequential(evermoe.MoE(8, 16, 4), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = evermoe.Session(
        model, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    with pytest.raises(PeerLost, match=r"20 recoveries in a row without a committed step at step 0.*no luck"):
        for step in session.steps(5):
            with step:
                session.group.drop("no luck")
                raise PeerLost("no luck")
    assert session.has_left
