"""Members that are lost: what is left of them, and the hook that asks for others in their place."""

from __future__ import annotations

import functools
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evermoe.comm.gather import gather_json
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.vote import Ballot
from evermoe.config.membership import Membership
from evermoe.errors import LEFT_CODE
from evermoe.session.lost_members import REMEMBERED, LostMembers
from support.harness import FEWEST, PATIENCE, wait_until
from support.history import check_history, check_recovered
from support.hooks import NOTE, WAIT, calls, given, write
from support.ranks import run_threads
from support.worker import EVERYTHING, Fault

STEPS = 24


def start(start_job, names, faults=(), hook=NOTE, at=8, **session):
    """Members that are held at a step, and the folder in which their hook notes its calls."""
    job = start_job(len(names), **session)
    job.session["on_lost"] = hook.format(folder=job.folder) if isinstance(hook, str) else hook(job.folder)
    job.open_gate(at)
    workers = job.start_all(dict(faults), names, gated=True, steps=STEPS)
    return job, workers


def wait_for_calls(job, count):
    return wait_until(lambda: len(calls(job.folder)) >= count and calls(job.folder), f"{count} calls")


def of_pid(workers, pid):
    return next(each for each in workers if each.pid == pid)


def test_what_comes_in_a_lost_members_place_gets_its_units_from_peers(start_job):
    job, (a, b, c) = start(start_job, "abc", {"b": [Fault("forward", 6)]}, domain="zone-1", **FEWEST)
    (call,) = wait_for_calls(job, 1)
    for each in (a, c):
        each.wait_for("gate", step=8)
    d = job.start("d", steps=STEPS)
    job.take_in(d, until=STEPS)
    assert [each.join() for each in (a, b, c, d)] == [0, -9, 0, 0]
    told = given(job.folder, call)
    (gone,) = a.events("member_lost")
    assert told == {name: gone[name] for name in told}
    assert (
        call.key == f"{told['member']}-1" == f"{b.events('joined')[0]['member']}-{b.events('joined')[0]['generation']}"
    )
    about = {
        name: told[name] for name in ("job", "node", "domain", "role", "kind", "step", "members", "wanted", "attempt")
    }
    assert about == {
        "job": job.name,
        "node": "b",
        "domain": "zone-1",
        "role": "train",
        "kind": "process",
        "step": 6,
        "members": 2,
        "wanted": 3,
        "attempt": 1,
    }
    assert calls(job.folder) == [call], "once in the job"
    assert call.pid == min((a, c), key=lambda each: each.events("joined", generation=told["generation"])[0]["rank"]).pid
    assert [event["members"] for event in a.events("recovered")] == [3, 2, 3]
    arrived = d.events("recovered")[0]
    assert (arrived["sources"]["peer"] > 0, arrived["sources"]["local memory"], arrived["tier"]) == (True, 0, "peers")
    check_history([a, b, c, d])
    check_recovered([a, b, c, d], a)


@pytest.mark.long
def test_a_caller_that_dies_while_it_calls_is_followed_by_another_and_training_waits_for_none(start_job):
    job, workers = start(start_job, "abcd", {"b": [Fault("forward", 6)]}, NOTE + WAIT, at=12, replication=3)
    (call,) = wait_for_calls(job, 1)
    caller = of_pid(workers, call.pid)
    caller.wait_for("commit", step=10)  # while the command still runs
    caller.process.kill()
    job.open_gate(16)
    first, again = wait_for_calls(job, 2)
    assert (again.key, again.attempt, first.attempt) == (call.key, 2, 1)
    others = [each for each in workers if each not in (caller, workers[1])]
    assert again.pid in [each.pid for each in others]
    (job.folder / "go").touch()
    _, _, last = wait_for_calls(job, 3)
    assert (last.key.startswith(caller.events("joined")[0]["member"]), last.attempt, last.pid) == (True, 1, again.pid)
    job.open_gate(EVERYTHING)
    assert [each.join() for each in others] == [0, 0]
    assert len(calls(job.folder)) == 3
    check_history(workers)


@pytest.mark.long
def test_a_caller_that_dies_after_the_vote_that_followed_its_call_is_not_followed(start_job):
    job, workers = start(start_job, "abc", {"b": [Fault("forward", 6)]}, at=12)
    (call,) = wait_for_calls(job, 1)
    caller = of_pid(workers, call.pid)
    wait_until(lambda: f"on_lost was called for {call.key}" in caller.log(), "the call is over")
    job.open_gate(16)
    caller.wait_for("commit", step=14)
    caller.process.kill()
    job.open_gate(20)
    _, other = wait_for_calls(job, 2)
    assert other.key.startswith(caller.events("joined")[0]["member"])
    job.open_gate(EVERYTHING)
    (survivor,) = (each for each in workers if each not in (caller, workers[1]))
    assert survivor.join() == 0
    assert len(calls(job.folder)) == 2


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (NOTE + "exit 3", "the command ended with 3"),
        (lambda folder: functools.partial(write, folder / "calls"), "LookupError: no machines left"),
    ],
    ids=["command", "function"],
)
@pytest.mark.few(1)
def test_a_hook_that_fails_costs_a_warning(start_job, hook, why):
    job, (a, b, c) = start(start_job, "abc", {"b": [Fault("vote", 6)]}, hook)
    (call,) = wait_for_calls(job, 1)
    caller = of_pid((a, c), call.pid)
    wait_until(lambda: f"on_lost failed for {call.key} and is not called again for it: {why}" in caller.log(), why)
    job.open_gate(EVERYTHING)
    assert [each.join() for each in (a, b, c)] == [0, -9, 0]
    assert calls(job.folder) == [call]
    check_history([a, b, c])


def test_leaving_on_notice_and_being_stopped_are_distinguished(start_job):
    job, (a, b, c) = start(
        start_job, "abc", {"c": [Fault("forward", 12, "stop")]}, heartbeat_timeout=1.0, replication=3
    )
    for each in (a, b, c):
        each.wait_for("gate", step=8)
    b.signal(signal.SIGTERM)
    job.open_gate(16)
    assert b.join() == LEFT_CODE
    found = wait_for_calls(job, 2)
    assert [(each.kind, given(job.folder, each)["node"]) for each in found] == [("left", "b"), ("hung", "c")]
    c.process.kill()
    job.open_gate(EVERYTHING)
    assert a.join() == 0
    assert [event["failure"] for event in a.events("recovered")] == ["", "left", "hung"]


def test_state_that_a_process_leaves_is_found_on_its_host_and_the_rest_in_the_checkpoint(start_job, tmp_path):
    session = {"checkpoints": str(tmp_path / "saved"), "checkpoint_interval": 4, "rejoin_timeout": 0.0, **FEWEST}
    job, (a, b, c) = start(start_job, "abc", **session)
    for each in (a, b, c):
        each.wait_for("gate", step=8)
    spare = job.start("d", session={"role": "spare", "node": "b"}, gated=True, steps=STEPS)
    wait_until(lambda: "is a spare" in spare.log() and spare.has_met_members(), "it stands by")
    b.process.kill()
    job.open_gate(12)
    found = spare.wait_for("recovered")
    assert (found["failure"], found["sources"]["local memory"] > 0) == ("process", True)
    for each in (a, c, spare):
        each.wait_for("gate", step=12)
    for each in (c, spare):
        each.process.kill()
    job.open_gate(EVERYTHING)
    found = a.wait_for("recovered", members=1)
    assert (found["failure"], found["tier"], bool(found["lost_units"])) == ("storage", "store", True)
    assert a.join() == 0


def call_in_generations(group, lighthouse, folder, alone):
    """Member "c" is lost, and "b" freezes before it hears that "a" has called; then "d" is alone, and meets "b" again.

    Args:
        group: a, d, b and c.
        lighthouse: its address.
        folder: where groups meet.
        alone: generation in which "d" is alone.

    Returns:
        The nodes for which this member has called.
    """
    found, cpu = [], torch.device("cpu")
    options, identity = Membership(lighthouse=lighthouse), Identity("job", "layout")
    node = "adbc"[group.rank]
    membership = MembershipManager(options, lighthouse=lighthouse, identity=identity, node=node, device=cpu)
    about = {"node": node, "domain": "", "role": "train", "probe_address": membership.reach.address}
    everyone = gather_json(group, [membership.id, about])
    lost = LostMembers(membership, lambda gone: found.append(gone.node), group.size, lambda event: None)

    def meet(generation, *ranks):
        if group.rank in ranks:
            store = dist.FileStore(f"{folder}/{generation}", len(ranks))
            place = ranks.index(group.rank), len(ranks)
            membership.trainer_group.rebuild(store, *place, cpu, timedelta(seconds=PATIENCE))
            membership.members, membership.generation = dict(everyone[rank] for rank in ranks), generation
            lost.note(0, "a reason")

    meet(1, 0, 1, 2, 3)
    meet(2, 0, 1, 2)
    if node == "a":
        wait_until(lambda: lost.reported, "the call is over")
    sums = group.all_reduce(torch.tensor([lost.reported if node == "a" else 0.0]))
    if node in "ad":
        lost.tallied(Ballot(votes=1.0, reported=float(sums)))
    meet(alone, 1)
    meet(alone + 1, 1, 2)
    lost.close()
    membership.close()
    return found


@pytest.mark.parametrize("forgets", [False, True])
def test_a_loss_that_was_called_for_is_remembered_for_some_generations(tmp_path, forgets):
    server, address = start_local_lighthouse(heartbeat_timeout=2.0, join_timeout=1.0)
    try:
        alone = 1 + REMEMBERED + forgets
        a, d, b, c = run_threads(tmp_path, 4, call_in_generations, address, str(tmp_path), alone)
    finally:
        server.shutdown()
    assert (a, b, c) == (["c"], [], [])
    assert sorted(d) == (["a", "b", "c"] if forgets else ["a", "b"])
