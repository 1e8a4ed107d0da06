"""Snapshots in a node's own memory, where the budget decides when: after a change of members they come a step later."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

FAULT = 4
AS_BUDGET_ALLOWS = {"preset": "auto", "snapshot_interval": None, "join_interval": 50, "rebalance_interval": 0}


def start_three(start_job, *faults_of_a, **options):
    """A job in which `b` is killed at a vote."""
    job = start_job(3, **AS_BUDGET_ALLOWS)
    return job, job.start_all({"a": list(faults_of_a), "b": [Fault("vote", FAULT)]}, **options)


def generations(job, node):
    return {int(path.name[:10]) for path in job.arenas() if path.parent.name == node}


@pytest.mark.parametrize(("step", "left"), [(FAULT + 1, 2), (FAULT + 2, 1)], ids=["one step later", "two steps later"])
@pytest.mark.few(2)
def test_previous_snapshots_stay_until_all_members_have_new_ones(start_job, step, left):
    """A crash of all processes after that loses a step at most."""
    job, workers = start_three(start_job, Fault("reduce", step, action="hang"))
    a, _, c = workers
    a.wait_for("fault", point="reduce")
    c.wait_for("reduce", step=step)  # it has taken the step before, too
    assert len(generations(job, "a")) == left == len(generations(job, "c"))
    if left > 1:
        job.wake()
        assert [each.join() for each in workers] == [0, -9, 0]
        check_history(workers)
        for each in (a, c):
            assert check_recovered(workers, each)["steps_lost"] == 0
        return
    for each in (a, c):
        each.process.kill()
    assert [each.join() for each in workers] == [-9] * 3
    job.lose_node("b")
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    assert min(each.events("begin")[0]["step"] for each in again) >= step - 1


@pytest.mark.parametrize("preset", ["auto", "lazarus"])
@pytest.mark.quick("all workers crash, and one machine is lost with its memory")
def test_all_processes_crash_and_a_host_is_lost(start_job, preset):
    """Units that several nodes train have snapshots on `replication` of them: the job needs no single host's memory."""
    # All reach the vote before any is killed: a worker that died alone would be a loss to the others.
    at_the_vote = Fault("vote", FAULT, action="hang")
    job = start_job(3, preset=preset, min_replicas=2, rebalance_interval=0)
    workers = job.start_all({name: [at_the_vote] for name in "abc"})
    for each in workers:
        each.wait_for("fault", point="vote")
    for each in workers:
        each.process.kill()
    assert [each.join() for each in workers] == [-9] * 3
    job.lose_node("b")
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    check_history([*workers, *again], undone=True)
    copied = [each.events("copy", step=FAULT)[-1]["digests"] for each in workers]
    known = {unit: value for digests in copied for unit, value in digests.items()}
    for each in again:
        assert each.events("begin")[0]["step"] == FAULT
        found = each.events("copy", step=FAULT)[0]["digests"]
        assert found.keys() - {"session"}
        assert all(value == known[unit] for unit, value in found.items() if unit != "session")


@pytest.mark.parametrize("where", ["reduce", "vote", "update", "copy"])
def test_a_second_death_in_the_step_after_costs_nothing(start_job, where):
    job = start_job(4, **AS_BUDGET_ALLOWS)
    faults = {"b": [Fault("vote", FAULT)], "d": [Fault(where, FAULT + 1)]}
    workers = job.start_all(faults, "abcd")
    assert [each.join() for each in workers] == [0, -9, 0, -9]
    check_history(workers)
    for each in workers[::2]:
        assert all(event["steps_lost"] == 0 for event in each.events("recovered"))
    assert not generations(job, "a") | generations(job, "c"), "the job is over"
