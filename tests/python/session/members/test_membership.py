"""The Lighthouse away, members that come late, units whose holders come back: the job waits, within its limits."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from support.harness import FEWEST, wait_until
from support.history import check_history, check_recovered
from support.worker import Fault


@pytest.mark.quick("the Lighthouse restarts, is unreachable or hangs")
def test_lighthouse_that_restarts_or_is_away_for_a_while_stops_nobody(start_job):
    """First nothing else happens; then a member dies while it is away."""
    job = start_job()
    job.open_gate(5)
    workers = job.start_all({"b": [Fault("vote", 14)]}, gated=True, steps=24)
    for each in workers:
        each.wait_for("gate", step=5)
    job.restart_lighthouse()
    job.open_gate(12)
    for each in workers:
        each.wait_for("gate", step=12)
    assert [len(each.events("recovered")) for each in workers] == [1, 1, 1]
    job.stop_lighthouse()
    job.open_gate(24)
    workers[0].wait_for("phase", phase="agree", count=2)
    job.restart_lighthouse()
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 2
    assert {each.events("done")[0]["pid"] for each in workers[::2]} == {each.pid for each in workers[::2]}


@pytest.mark.long
def test_whole_group_trains_on_without_a_lighthouse_and_says_so(start_job):
    """Nobody waits for it, looks for new members included; once it is back, a newcomer finds the group."""
    job = start_job(quorum_timeout=2.0, join_interval=1, rebalance_interval=7)
    job.open_gate(5)
    workers = job.start_all({}, gated=True, steps=200)
    for each in workers:
        each.wait_for("gate", step=5)
    job.stop_lighthouse()
    job.open_gate(100)
    for each in workers:
        each.wait_for("gate", step=100)
        wait_until(lambda each=each: "training continues without it" in each.log(), "the log says so")
    assert [len(each.events("phase")) for each in workers] == [len(workers[0].events("phase"))] * 3
    assert not any(each.events("connection_lost") for each in workers)
    job.restart_lighthouse()
    for each in workers:
        wait_until(lambda each=each: "answers again" in each.log(), "the log says so")
    workers.append(job.start("d", steps=200))
    job.take_in(workers[3], until=200)
    assert [each.join() for each in workers] == [0, 0, 0, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 4
    assert len({each.events("done")[0]["pid"] for each in workers[:3]} ^ {each.pid for each in workers[:3]}) == 0


@pytest.mark.long
def test_newcomers_that_are_more_than_the_members_wait_for_them(start_job):
    """The Lighthouse names those who ask when its join limit is over: a member in a long step must be among them."""
    job = start_job(1, join_timeout=4.0)
    job.open_gate(6)
    workers = [job.start("a", gated=True, steps=60)]
    workers[0].wait_for("gate", step=6)
    workers += job.start_all({}, "bcd", steps=60)
    for each in workers[1:]:
        wait_until(lambda each=each: "admit this one between two steps" in each.log(), "it waits to be taken in")
    job.open_gate(60)
    assert [each.join() for each in workers] == [0, 0, 0, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 4


@pytest.mark.long
def test_newcomer_joins_members_that_come_to_their_steps_far_apart(start_job):
    job = start_job(2, heartbeat_timeout=0.5, join_interval=1)
    job.open_gate(6)
    workers = [job.start("a", gated=True, steps=12), job.start("b", gated=True, steps=12, late=1.5)]
    workers[0].wait_for("gate", step=6)
    workers.append(job.start("c", steps=12))
    job.take_in(workers[2], until=12)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 3


@pytest.mark.long
def test_frozen_lighthouse_stops_nobody(start_job):
    """It takes questions and answers none: no connection fails."""
    job = start_job(2, join_interval=1)
    job.open_gate(5)
    workers = job.start_all({}, "ab", gated=True, steps=100)
    for each in workers:
        each.wait_for("gate", step=5)
    job.stop_lighthouse()
    with socket.create_server(("0.0.0.0", int(job.address.rsplit(":", 1)[1])), backlog=64):
        job.open_gate(100)
        assert [each.join(20) for each in workers] == [0, 0]
    check_history(workers)


@pytest.mark.quick("… and members are lost meanwhile")
def test_lighthouse_away_for_too_long_after_a_death_ends_the_job_and_keeps_its_memory(start_job):
    job = start_job(quorum_timeout=2.0)
    job.open_gate(5)
    workers = job.start_all({"c": [Fault("vote", 7)]}, gated=True, steps=20)
    for each in workers:
        each.wait_for("gate", step=5)
    job.stop_lighthouse()
    job.open_gate(20)
    assert [each.join(30) for each in workers] == [1, 1, -9]
    assert {each.events("failed")[0]["error"] for each in workers[:2]} == {"JoinTimeout"}
    assert "Check that the Lighthouse runs" in workers[0].events("failed")[0]["message"]
    job.restart_lighthouse()
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    for each in again:
        recovered = check_recovered(job.workers, each, 0)
        assert recovered["step"] >= 5
        assert recovered["steps_lost"] == 0


def test_missing_units_are_waited_for(start_job):
    job = start_job(replication=1, rejoin_timeout=30.0, **FEWEST)
    a, b, c = job.start_all({"b": [Fault("vote", 5)]})
    assert b.join() == -9
    for survivor in (a, c):
        survivor.wait_for("connection_lost")
    again = job.start("b")
    assert [each.join() for each in (a, c, again)] == [0, 0, 0]
    check_history(job.workers)
    for each in (a, c, again):
        recovered = check_recovered(job.workers, each)
        assert (recovered["step"], recovered["members"], recovered["steps_lost"]) == (5, 3, 0)
    assert a.events("done")[0]["pid"] == a.pid
    assert [len(each.events("connection_lost")) for each in (a, c)] == [1, 1], "one loss is one event"


def test_units_of_a_member_that_is_stopped_are_waited_for_longer(start_job):
    """It lives: those of a process that has ended would count as lost."""
    limit = 1.0
    job = start_job(replication=1, rejoin_timeout=limit, quorum_timeout=120.0, **FEWEST)
    a, b, c = job.start_all({"b": [Fault("vote", 5, "stop")]})
    for survivor in (a, c):
        lost = survivor.wait_for("connection_lost")
        wait_until(lambda since=lost["time"]: time.time() > since + 4 * limit, "the limit is over")
    assert f"their holders live: {b.name}-" in a.log()
    b.signal(signal.SIGCONT)
    assert [each.join() for each in (a, b, c)] == [0, 0, 0]
    check_history(job.workers, away="b")
    assert a.events("recovered")[-1]["steps_lost"] == 0


def test_worker_that_differs_from_the_job_is_refused_with_the_difference(start_job):
    """`comm/test_messages.py` has all differences."""
    job = start_job(2)
    job.open_gate(6)
    workers = job.start_all({}, "ab", gated=True, steps=30)
    workers[0].wait_for("gate", step=6)
    stranger = job.start("c", steps=30, optimizer="sgd")
    job.take_in(stranger, until=30)
    assert stranger.join() == 1
    assert stranger.events("failed")[0]["error"] == "ValueError"
    assert "this worker's model or optimizer differs from that of a-" in stranger.events("failed")[0]["message"]
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)


def test_settings_of_a_script_that_a_resumed_job_does_not_use_are_named(start_job):
    job = start_job(2)
    first = job.start_all({name: [Fault("vote", 5)] for name in "ab"}, "ab")
    assert [each.join() for each in first] == [-9, -9]
    again = job.start_all({}, "ab", lr=0.1)
    assert [each.join() for each in again] == [0, 0]
    check_history(job.workers)
    for each in again:
        assert "the optimizer's lr is 0.1 in this script, but 0.01 where job" in each.log()
