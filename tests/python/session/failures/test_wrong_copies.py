"""A copy that repeats steps and its trainer differ: another trainer says which of the two is wrong."""

from __future__ import annotations

import pytest

from support.harness import FEWEST

STEPS = 150
"""More than twice those in which each parameter is compared."""
PATIENCE = 300.0


def start(start_job, names, where, **session):
    """`b` updates its experts wrongly, or repeats wrongly the steps of others."""
    job = start_job(len(names), preset="auto", **FEWEST, rebalance_interval=0, join_interval=1000, **session)
    return [job.start(name, steps=STEPS, wrong=where if name == "b" else "") for name in names]


def found_by(worker):
    return [(event["nodes"], event["action"]) for event in worker.events("corruption_found")]


@pytest.mark.parametrize("where", ["optimizer", "repeats"])
@pytest.mark.quick("a worker updates an expert wrongly that no other worker trains")
def test_a_third_member_names_the_one_that_is_wrong(start_job, where):
    workers = start(start_job, "abc", where)
    assert [each.join(PATIENCE) for each in workers] == [0, 0, 0]
    found = found_by(workers[0])
    assert (["b"], "repair") in found
    assert all(nodes in ([], ["b"]) for nodes, _ in found), "nobody else is named"
    assert [found_by(each) for each in workers[1:]] == [found, found]
    assert "b (rank 1) against the others: the copy takes the state of the member that trains it" in workers[0].log()
    assert len(workers[0].events("recovered")) == 1, "the start alone"


@pytest.mark.parametrize("where", ["optimizer", "repeats"])
def test_the_one_that_is_wrong_leaves_if_that_is_the_policy(start_job, where):
    """Its experts come from the copies, which have repeated its steps rightly."""
    workers = a, b, c = start(start_job, "abc", where, on_corruption="evict")
    assert [each.join(PATIENCE) for each in workers] == [0, 1, 0]
    assert "CorruptState" in b.log()
    for each in (a, c):
        assert (["b"], "evict") in found_by(each)
        recovered = each.events("recovered")[-1]
        assert (recovered["steps_lost"], recovered["lost_units"], recovered["stale"]) == (0, [], {})


@pytest.mark.parametrize(("policy", "codes"), [("repair", [0, 0, 0]), ("evict", [0, 0, 1])])
def test_a_replica_node_that_repeats_wrongly_is_named(start_job, policy, codes):
    job = start_job(2, preset="auto", **FEWEST, rebalance_interval=0, join_interval=1000, on_corruption=policy)
    y = job.start("y", session={"role": "replica"}, steps=STEPS, wrong="repeats")
    y.wait_for("phase", phase="agree")
    a, b = [job.start(name, steps=STEPS) for name in "ab"]
    assert [each.join(PATIENCE) for each in (a, b, y)] == codes
    for each in (a, b, y):
        assert (["y"], policy) in found_by(each)
        assert all(nodes in ([], ["y"]) for nodes, _ in found_by(each))
    assert a.events("commit")[-1]["step"] == STEPS - 1


@pytest.mark.parametrize("where", ["optimizer", "repeats"])
def test_of_two_neither_is_named(start_job, where):
    workers = start(start_job, "ab", where)
    assert [each.join(PATIENCE) for each in workers] == [0, 0]
    assert set(map(str, found_by(workers[0]))) == {"([], 'repair')"}
    assert workers[0].events("damaged") or workers[1].events("damaged")


def test_right_updates_are_never_found_wrong(start_job):
    workers = start(start_job, "abc", "")
    assert [each.join(PATIENCE) for each in workers] == [0, 0, 0]
    assert not any(each.events("corruption_found") or each.events("damaged") for each in workers)
