"""Members compute as soon as they have the weights: optimizer state that they lack comes before their vote."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault


def with_newcomer(start_job, faults, members="ab", newcomer="c", **session):
    """Members, of which `a` has these faults, and a newcomer that they take in after some steps."""
    job = start_job(len(members), join_interval=1, **session)
    job.open_gate(4)
    workers = job.start_all({"a": faults}, members, gated=True, steps=20)
    for each in workers:
        each.wait_for("gate", step=4)
    workers.append(job.start(newcomer, gated=True, steps=20))
    job.take_in(workers[-1], until=20)
    return job, workers


def names_between(worker, first, last):
    """Names of a worker's events from the first `first` on, up to the first `last` after it."""
    names = [event["event"] for event in worker.events()]
    begin = names.index(first)
    return names[begin : names.index(last, begin) + 1]


@pytest.mark.parametrize("session", [{}, {"preset": "gemini"}, {"shard_optimizer": True}], ids=str)
def test_a_newcomer_computes_before_its_optimizer_state_arrives(start_job, session):
    job, workers = with_newcomer(start_job, [Fault("late state", action="hang")], hang_timeout=60.0, **session)
    a, b, c = workers
    a.wait_for("fault", point="late state")
    first = c.wait_for("begin")["step"]
    c.wait_for("reduce", step=first)
    assert not c.events("update")
    job.wake()
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    recovered = c.events("recovered")[0]
    assert recovered["members"] == 3
    share = recovered["late_bytes"] / recovered["fetched_bytes"]
    assert 0.3 < share < 2 / 3, "two thirds of what other members train: copies come completely"
    assert [event["late_bytes"] for event in b.events("recovered")[1:]] == [0]
    assert c.events("verified")[0]["digests_mismatched"] == 0


@pytest.mark.parametrize("preset", ["auto", "gemini"])
def test_the_sender_is_killed_while_its_optimizer_state_is_awaited(start_job, preset):
    _, workers = with_newcomer(start_job, [Fault("late state", action="hang")], hang_timeout=60.0, preset=preset)
    a, b, c = workers
    a.wait_for("fault", point="late state")
    c.wait_for("reduce")
    a.process.kill()
    assert [each.join() for each in workers] == [-9, 0, 0]
    check_history(workers, undone=preset == "gemini")  # its snapshots may be a step behind
    for each in (b, c):
        assert check_recovered(workers, each)["steps_lost"] == 0
    first, second = c.events("recovered")
    assert (first["members"], second["members"]) == (3, 2)
    assert "update" not in names_between(c, "recovered", "connection_lost"), "no step was taken without the state"
    assert second["fetched_bytes"] > 0
    assert c.events("verified")[0]["digests_mismatched"] == 0


@pytest.mark.long
def test_a_sender_that_falls_silent_is_given_up(start_job):
    _, workers = with_newcomer(start_job, [Fault("late state", action="stop")], hang_timeout=3.0)
    a, b, c = workers
    assert [b.join(), c.join()] == [0, 0]
    a.process.kill()
    a.join()
    check_history(workers)
    assert c.events("recovered")[-1]["members"] == 2
    assert c.events("verified")[0]["digests_mismatched"] == 0


@pytest.mark.long
def test_state_that_takes_longer_than_a_collective_waits_is_waited_for(start_job):
    """The plan decides the number of units that `a` sends: two or more."""
    faults = [Fault("late state", action="slow", nth=each, seconds=1.5) for each in range(1, 9)]
    _, workers = with_newcomer(start_job, faults, "abc", "d", hang_timeout=2.0, preset="gemini")
    assert [each.join() for each in workers] == [0, 0, 0, 0]
    check_history(workers)
    assert [event["members"] for event in workers[3].events("recovered")] == [4]
    assert not any(each.events("connection_lost") for each in workers[1:])
    assert 1.5 * len(workers[0].events("fault")) > 2.0, "it took longer than the limit"


@pytest.mark.quick("bytes of a message are corrupted")
def test_state_that_arrives_damaged_is_refused(start_job):
    _, workers = with_newcomer(start_job, [Fault("late state", action="damage")])
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    c = workers[2]
    assert [event["members"] for event in c.events("recovered")] == [3, 3]
    assert "has arrived with other bytes than were sent" in c.events("connection_lost")[0]["reason"]
    assert "update" not in names_between(c, "recovered", "connection_lost")
    assert c.events("verified")[0]["digests_mismatched"] == 0
