"""Experts move without a failure when the load has shifted, and nothing else changes."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

SHIFTED = "the load has shifted"


def rebalances(each):
    return [event for event in each.events("recovered") if event["reason"] == SHIFTED]


@pytest.fixture
def job(start_job):
    return start_job(expert_slots=3, rebalance_interval=3)


def test_experts_move_with_the_load(job):
    workers = job.start_all({}, steps=12)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    seen = [[(event["step"], event["members"]) for event in rebalances(each)] for each in workers]
    assert seen[0] and seen == seen[:1] * 3
    assert all(step % 3 == 0 and members == 3 for step, members in seen[0])
    assert max(step for step, _ in seen[0]) < 12, "nothing moves after the last step"
    for each in workers:
        for event in rebalances(each):
            assert (event["steps_lost"], event["digests_mismatched"]) == (0, 0)
        check_recovered(workers, each)
    assert sum(event["fetched_units"] for each in workers for event in rebalances(each)) > 0


@pytest.mark.long
def test_experts_move_between_nodes_of_several_workers(start_job):
    """Nodes exchange what their workers hold together; the death of a node's workers is survived before and after."""
    job = start_job(4, preset="gemini", expert_slots=3, rebalance_interval=3)
    nodes = {"a": "x", "b": "x", "c": "y", "d": "y"}
    job.open_gate(9)
    workers = [job.start(name, session={"node": node}, steps=14, narrow=3, gated=True) for name, node in nodes.items()]
    for each in workers:
        each.wait_for("gate", step=9)
    for each in workers[2:]:
        each.process.kill()
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [0, 0, -9, -9]
    check_history(workers)
    assert rebalances(workers[0])
    for each in workers[:2]:
        recovered = each.events("recovered")[-1]
        assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (2, 0, 0)
        assert each.events("verified")[0]["digests_mismatched"] == 0


@pytest.mark.parametrize("point", ["phase fetch", "phase verify", "copy", "confirm"])
@pytest.mark.quick("experts move, and a worker dies meanwhile")
def test_a_death_while_experts_move(job, point):
    # Copying at step 3 the second time is the rebalance's; its copies are complete in the step that follows.
    fault = Fault("confirm", 4) if point == "confirm" else Fault(point, 3 if point == "copy" else None, nth=2)
    workers = job.start_all({"b": [fault]}, steps=9)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in workers[::2]:
        assert each.events("done")[0]["step"] == 9
        check_recovered(workers, each)
