"""Members that leave on notice: their step is completed, the others repeat none, and nothing goes with them."""

import json
import os
import signal
import sys

import pytest
import torch

import evermoe
from evermoe.checkpoint.checkpoint_folder import find
from evermoe.comm.lighthouse import start_local_lighthouse
from support.harness import PATIENCE, wait_until
from support.history import check_history
from support.worker import Fault

STEPS = 30
GATE = 6


def check_left(workers, leaving, code=143):
    """Exit codes are right, and no step was undone or repeated by those who stay."""
    assert [each.join() for each in leaving] == [code] * len(leaving)
    staying = [each for each in workers if each not in leaving]
    assert [each.join() for each in staying] == [0] * len(staying)
    check_history(workers)
    for each in staying:
        recovered = each.events("recovered")[1]
        assert (recovered["steps_lost"], recovered["stale"], recovered["members"]) == (0, {}, len(staying))
        assert recovered["step"] == leaving[0].events("commit")[-1]["step"] + 1
        reduced = [event["step"] for event in each.events("reduce")]
        assert reduced == sorted(set(reduced))  # no gradient was computed twice


@pytest.mark.parametrize(("name", "number", "code"), [("a", signal.SIGTERM, 143), ("b", signal.SIGUSR1, 75)])
@pytest.mark.quick("a worker gets SIGTERM: its node will be removed")
def test_member_leaves_on_notice(start_job, name, number, code):
    job = start_job()
    job.open_gate(GATE)
    workers = job.start_all({}, steps=STEPS, gated=True)
    for each in workers:
        each.wait_for("gate", step=GATE)
    leaving = workers["abc".index(name)]
    leaving.signal(number)
    wait_until(lambda: f"{number.name}: this process leaves" in leaving.log(), "it has heard the first")
    leaving.signal(number)  # from a scheduler, and from the launcher that it has told, too
    job.open_gate(STEPS)
    check_left(workers, [leaving], code)
    assert leaving.events("commit")[-1]["step"] == GATE


@pytest.mark.long
def test_experts_without_a_copy_go_to_a_checkpoint_first(start_job, tmp_path):
    job = start_job(replication=1, checkpoints=str(tmp_path / "saved"))
    job.open_gate(GATE)
    workers = job.start_all({}, steps=STEPS, gated=True)
    for each in workers:
        each.wait_for("gate", step=GATE)
    workers[1].signal(signal.SIGTERM)
    job.open_gate(STEPS)
    check_left(workers, [workers[1]])


@pytest.mark.quick("a worker gets SIGUSR1 or SIGUSR2 before a time limit")
def test_all_members_leave(start_job, tmp_path):
    """As at the end of an allocation: the state is in a checkpoint, and the job resumes where it was."""
    saved = tmp_path / "saved"
    job = start_job(checkpoints=str(saved))
    job.open_gate(GATE)
    workers = job.start_all({}, steps=STEPS, gated=True)
    for each in workers:
        each.wait_for("gate", step=GATE)
        each.signal(signal.SIGTERM)
    job.open_gate(STEPS)
    assert [each.join() for each in workers] == [143] * 3
    reached = {each.events("commit")[-1]["step"] + 1 for each in workers}
    assert reached == {GATE + 1}
    assert [version % 2**40 for version in find(saved)] == [GATE + 1]
    for name in "abc":
        job.lose_node(name)
    again = job.start_all({}, steps=STEPS)
    assert [each.join() for each in again] == [0, 0, 0]
    assert again[0].events("recovered")[0]["step"] == GATE + 1
    check_history([*workers, *again])


def test_members_that_all_leave_say_that_nothing_is_saved(start_job):
    job = start_job(2)
    job.open_gate(GATE)
    workers = job.start_all({}, "ab", steps=STEPS, gated=True)
    for each in workers:
        each.wait_for("gate", step=GATE)
        each.signal(signal.SIGTERM)
    job.open_gate(STEPS)
    assert [each.join() for each in workers] == [143] * 2
    warning = f"2 of 2 members leave the job after step {GATE + 1}, and no checkpoint is written, as there is no"
    assert sum(each.log().count(warning) for each in workers) == 1


def test_member_that_hangs_leaves_in_time_all_the_same(start_job):
    job = start_job(drain_timeout=1.0, hang_timeout=30.0)
    workers = a, b, c = job.start_all({"b": [Fault("forward", GATE, "hang")]}, steps=STEPS)
    b.wait_for("fault")
    b.signal(signal.SIGTERM)
    assert b.join() == 143
    assert [each.join() for each in (a, c)] == [0, 0]
    check_history(workers)


def test_member_that_waits_for_others_ends_at_once(start_job):
    job = start_job(2, quorum_timeout=300.0, drain_timeout=2 * PATIENCE)
    alone = job.start("a", steps=STEPS)
    wait_until(lambda: alone.events("protocol", said={"event": "waited"}), "it waits for others")
    alone.signal(signal.SIGTERM)
    assert alone.join() == 143
    assert "no step was completed" not in alone.log()


def test_a_signal_that_comes_while_the_lighthouse_is_asked_is_not_lost(tmp_path, monkeypatch):
    """torchft decodes the answer by Python's `json`, and drops an exception of the signal's handler."""
    server, address = start_local_lighthouse(heartbeat_timeout=1.0, join_timeout=1)
    loads, signalled = json.loads, []

    def loads_signalled(*args, **options):
        if sys._getframe(1).f_code.co_name == "request_quorum" and not signalled:
            signalled.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return loads(*args, **options)

    layer = evermoe.MoE(8, 16, 4, top_k=1)
    session = evermoe.Session(
        layer,
        torch.optim.AdamW(layer.parameters(), fused=True),
        evermoe.ElasticSampler(8, 4),
        membership=evermoe.Membership(
            lighthouse=address, job="asked", members=2, quorum_timeout=PATIENCE, memory_dir=str(tmp_path)
        ),
    )
    monkeypatch.setattr(json, "loads", loads_signalled)
    with pytest.raises(SystemExit) as ended:
        next(session.steps(1))
    assert signalled
    assert ended.value.code == 143
    server.shutdown()
