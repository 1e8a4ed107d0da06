"""After failures the units that the fewest nodes have are protected first, and each as soon as its state has come."""

from __future__ import annotations

import signal

import pytest

from support.history import check_history, check_recovered
from support.worker import EVERYTHING, Fault

FAULT = 5
LEFT = "ade"


def start(start_job, *faults):
    """Five workers, of which two die at once between two steps: of some units one node is left, of others two."""
    job = start_job(
        5, preset="auto", replication=3, copy_budget=1.0, expert_slots=1, join_interval=50, rebalance_interval=0
    )
    job.open_gate(FAULT)
    workers = job.start_all({"a": list(faults)}, "abcde", states=True, gated=True)
    for each in workers:
        each.wait_for("gate", step=FAULT)
    for each in workers[1:3]:
        each.signal(signal.SIGKILL)
    for each in workers[1:3]:
        assert each.join() == -signal.SIGKILL
    job.open_gate(EVERYTHING)
    return workers


def since_death(worker):
    """Return what the worker knew of the units at its second plan, and all events from then on."""
    events = worker.events()
    (_, begin, *_) = [at for at, event in enumerate(events) if event["event"] == "risk"]
    return events[begin], events[begin:]


def risk_of(units, known, tokens):
    """Of each unit the nodes that have it, few first, and its tokens, many first."""
    return [(len(known["nodes"][unit]), -tokens.get(unit, float("inf")), unit) for unit in units]


def test_states_are_sent_and_taken_over_in_the_order_of_risk(start_job):
    workers = start(start_job)
    assert [each.join() for each in workers] == [0, -9, -9, 0, 0]
    check_history(workers)
    left = [each for each in workers if each.name in LEFT]
    known_R = [since_death(each)[0] for each in left]
    assert all(known["nodes"] == known_R[0]["nodes"] for known in known_R), "all members know the same"
    tokens = known_R[0]["tokens"]
    sent_R = []
    for each, known in zip(left, known_R, strict=True):
        events = since_death(each)[1]
        sent = [event["unit"] for event in events if event["event"] == "state"]
        assert sent == list(dict.fromkeys(sent)), "a state is read once for all of its holders"
        assert risk_of(sent, known, tokens) == sorted(risk_of(sent, known, tokens))
        sent_R.append(sent)
    assert [sorted({len(known_R[0]["nodes"][unit]) for unit in sent}) for sent in sent_R] == [[1, 2], [1, 2], [2]]
    for each, known in zip(left, known_R, strict=True):
        taken = [event["unit"] for event in since_death(each)[1] if event["event"] == "taken"]
        for sent in sent_R:
            came = [unit for unit in sent if each.name not in known["nodes"][unit]]
            theirs = [unit for unit in came if known["rank"] in known["replicas"][unit]]
            assert [unit for unit in taken if unit in theirs][: len(theirs)] == theirs, "both ends have one order"


@pytest.mark.long
def test_what_one_node_had_is_protected_before_the_rest_is_sent(start_job):
    """The sender dies after the units that it alone had, while those that another node has, too, are still to come."""
    workers = start(start_job, Fault("state", FAULT, "hang", nth=3))
    a, *_, d, e = workers
    a.wait_for("fault", point="state")
    known, events = since_death(a)
    alone = [unit for unit in known["replicas"] if known["nodes"][unit] == ["a"]]
    assert len(alone) == 2
    assert len(known["nodes"][[event["unit"] for event in events if event["event"] == "state"][-1]]) == 2
    for each in (d, e):
        each.wait_for("recovered", count=2)
        for unit in alone:
            each.wait_for("taken", unit=unit, code="ok")
    a.signal(signal.SIGKILL)
    assert [each.join() for each in workers] == [-9, -9, -9, 0, 0]
    check_history(workers)
    for each in (d, e):
        assert check_recovered(workers, each)["steps_lost"] == 0
