"""After a join, a death or a rebalance only missing units are sent, and training continues."""

from __future__ import annotations

import pytest

from support.harness import wait_until
from support.history import check_history
from support.traffic import changed_bytes, recoveries
from support.worker import Fault


def check_bytes(changes):
    """Of one change, as each of its members saw it: what all have sent is what two plans differ in; those bytes."""
    (before, after), *others = [(each[0][0], each[1][0]) for each in changes]
    assert all(pair[1]["nodes"] == after["nodes"] for pair in others)
    expected, sent = changed_bytes(before, after), sum(each[1][1] for each in changes)
    print(f"sent {sent} of {expected} bytes: {sent / expected:.3f}")
    assert 0.9 * expected <= sent <= 1.1 * expected
    return sent


def pairs(worker):
    """Return each recovery except a worker's first, after its predecessor."""
    found = recoveries(worker)
    return list(zip(found, found[1:], strict=False))


@pytest.mark.parametrize("copies", [2, 3])
def test_a_rebalance_sends_what_moves(start_job, copies):
    job = start_job(4, preset="auto", replication=copies, expert_slots=3, rebalance_interval=3)
    workers = job.start_all({}, "abcd", steps=12, states=True)
    assert [each.join() for each in workers] == [0] * 4
    check_history(workers)
    changes = list(zip(*map(pairs, workers), strict=True))
    assert changes
    every = sum(size * 4 for size in workers[0].events("holders")[0]["sizes"].values())
    for change in changes:
        assert check_bytes(change) < every / 2


def start_join(start_job, *faults, **options):
    """Members in the steps of a job, and one that comes to them."""
    job = start_job(3, preset="auto", join_interval=1, rebalance_interval=0)
    job.open_gate(4)
    options |= {"gated": True, "steps": 16, "states": True}
    workers = [job.start(name, *faults, **options) for name in "abc"]
    for each in workers:
        each.wait_for("gate", step=4)
    workers.append(job.start("d", **options))
    job.take_in(workers[3], until=16)
    return job, workers


def joined(workers):
    """The first change of each old member, and that of the newcomer, which had nothing before."""
    changes = [pairs(each)[0] for each in workers[:3]]
    return [*changes, (changes[0][0], recoveries(workers[3])[0])]


def test_members_take_the_step_after_a_join_while_its_copies_are_sent_and_nothing_else(start_job):
    """All copies hang until all members, the newcomer included, have computed a complete step."""
    job, workers = start_join(start_job, Fault("state of 4", action="hang"), model="wide")
    wait_until(lambda: any(each.events("fault") for each in workers), "a copy is to be sent")
    for each in workers:
        joined_at = each.wait_for("recovered", members=4)["step"]
        each.wait_for("reduce", step=joined_at)
    assert not any(each.events("commit", step=joined_at) for each in workers)
    job.wake()
    assert [each.join() for each in workers] == [0] * 4
    check_history(workers)
    for each in workers:
        events = each.events()
        resumed = events.index(each.events("recovered", members=4)[0])
        arranged = max(at for at, event in enumerate(events[:resumed]) if event["event"] == "protection_planned")
        assert not any(event["event"] == "confirm" for event in events[arranged:resumed]), "it waits for no copies"
        taken = next(at for at, event in enumerate(events) if at > resumed and event["event"] == "update")
        begun = [event["step"] for event in events[resumed:taken] if event["event"] in ("begin", "vote")]
        assert [*begun, events[taken]["step"]] == [joined_at] * 3, "the very next step is taken, at once"
    check_bytes(joined(workers))
    for each in workers[:3]:
        assert [event["step"] for event in each.events("commit")] == list(range(16)), "no step is skipped or repeated"
        assert {event["steps_lost"] for event in each.events("recovered")} == {0}


@pytest.mark.long
def test_a_death_sends_what_the_dead_node_had(start_job):
    job = start_job(4, preset="auto", expert_slots=3, join_interval=50, rebalance_interval=0)
    workers = job.start_all({"b": [Fault("vote", 5)]}, "abcd", states=True, model="wide")
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    check_bytes([pairs(each)[-1] for each in workers if each.name != "b"])
