"""Failures of real processes at named points: survivors resume in place, no committed step is lost."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

from support.history import check_history, check_recovered, committed_steps, states_by_version
from support.worker import Fault

FAULT = 5
"""The step in which things go wrong."""
POINTS = ["begin", "forward", "reduce", "send", "confirm", "vote", "update", "copy", "commit"]
SNAPSHOT_POINTS = ["send", "vote", "copy", "commit"]
"""Where presets that send snapshots differ from others."""


def at(point, action="kill", step=FAULT):
    """The events of copying name the step that they complete."""
    return Fault(point, step + (point in ("copy", "confirm", "send")), action)


@pytest.mark.parametrize(
    ("point", "preset"),
    [
        pytest.param(point, preset, marks=() if preset == "auto" or point in SNAPSHOT_POINTS else pytest.mark.long)
        for preset in ("auto", "gemini", "baft")
        for point in POINTS
    ],
)
@pytest.mark.few(4)
@pytest.mark.quick("a worker is killed at any point of a step")
def test_killed_at(start_job, point, preset):
    job = start_job(preset=preset)
    workers = job.start_all({"b": [at(point)]})
    a, b, c = workers
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in (a, c):
        recovered = check_recovered(workers, survivor)
        assert recovered["members"] == 2
        late = preset != "auto"  # a step counts as committed when its copies are complete, during the next one
        assert FAULT - late <= recovered["step"] <= FAULT + 1 + (point == "commit")
        assert recovered["step"] >= committed_steps([b])
        assert recovered["sources"].get("disk", 0) == recovered["digests_mismatched"] == 0
        verified = survivor.events("verified")[-1]
        assert verified["digests_checked"] > 20
        assert (verified["digests_mismatched"], verified["units"]) == (0, [])
        assert survivor.events("done")[0]["pid"] == survivor.pid
        assert recovered["time"] - b.events("fault")[0]["time"] < 5
    assert a.events("done")[0]["version"] == c.events("done")[0]["version"]


@pytest.mark.long
def test_killed_with_a_compiled_model(start_job):
    """Graphs stay in use while members and experts change; the layers' exchanges are within them."""
    workers = start_job(hang_timeout=30.0).start_all({"b": [at("forward")]}, compiled=True)
    assert [each.join(100) for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in workers[::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["step"], recovered["digests_mismatched"]) == (2, FAULT, 0)


@pytest.mark.quick("two nodes are lost at once")
def test_two_of_five_killed_at_once(start_job):
    job = start_job(5, replication=3)
    workers = job.start_all({"b": [at("vote")], "d": [at("vote")]}, "abcde")
    assert [each.join() for each in workers] == [0, -9, 0, -9, 0]
    check_history(workers)
    for survivor in workers[::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["digests_mismatched"]) == (3, 0)


@pytest.mark.parametrize("point", ["phase agree", "phase rebuild", "phase fetch", "phase verify", "copy", "confirm"])
@pytest.mark.quick("a second worker dies during the recovery from the first one's loss")
def test_second_death_during_the_recovery(start_job, point):
    job = start_job(4, replication=3, join_interval=50)
    # Copying after step 4 is the first time that this event names step 5, the recovery's copying the second. Its copies
    # are complete in the repeated step.
    second = Fault(point, nth=2, step={"copy": FAULT, "confirm": FAULT + 1}.get(point))
    workers = job.start_all({"b": [at("vote")], "c": [second]}, "abcd")
    assert [each.join() for each in workers] == [0, -9, -9, 0]
    check_history(workers)
    for survivor in (workers[0], workers[3]):
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["step"], recovered["digests_mismatched"]) == (2, FAULT, 0)
        assert recovered["time"] - workers[1].events("fault")[0]["time"] < job.session["hang_timeout"]


@pytest.mark.quick("a node is lost with its memory")
def test_both_processes_of_a_node_die(start_job):
    """Copies lie on another node, not in another process of the same one."""
    job = start_job(4, join_interval=50, expert_slots=1)
    nodes = {"a": "left", "b": "right", "c": "left", "d": "right"}
    dying = [at("vote")]
    faults = {"a": dying, "b": [], "c": dying, "d": []}
    workers = [job.start(name, *faults[name], session={"node": node}) for name, node in nodes.items()]
    assert [workers[i].join() for i in (0, 2)] == [-9, -9]
    job.lose_node("left")
    assert [workers[i].join() for i in (1, 3)] == [0, 0]
    check_history(workers)
    for survivor in workers[1::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["step"], recovered["steps_lost"]) == (2, FAULT, 0)


@pytest.mark.parametrize("point", ["forward", "vote", "copy"])
@pytest.mark.quick("a worker is stopped for longer than `heartbeat_timeout`")
def test_frozen_worker_is_left_behind_and_comes_back(start_job, point):
    hang_timeout = 2.0
    job = start_job(hang_timeout=hang_timeout)
    job.open_gate(8)
    workers = a, b, c = job.start_all({"b": [at(point, "stop")]}, gated=True, steps=80)  # time for it to ask
    b.wait_until_stopped()
    for survivor in (a, c):
        recovered = survivor.wait_for("recovered", members=2)
        assert recovered["time"] - b.events("fault")[0]["time"] < hang_timeout + 3
        survivor.wait_for("gate", step=8)
    b.signal(signal.SIGCONT)
    b.wait_for("connection_lost")
    job.open_gate(80)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers, away="b")
    recovered = check_recovered(workers, b)
    assert (recovered["pid"], recovered["members"], recovered["digests_mismatched"]) == (b.pid, 3, 0)
    assert recovered["step"] >= 8
    assert {each.events("done")[0]["pid"] for each in workers} == {each.pid for each in workers}


@pytest.mark.quick("a worker is stopped for less than `heartbeat_timeout`")
def test_short_freeze_is_no_failure(start_job):
    job = start_job(join_interval=50)
    workers = job.start_all({"b": [at("reduce", "stop")]})
    workers[1].wait_until_stopped()
    workers[1].signal(signal.SIGCONT)
    assert [each.join() for each in workers] == [0, 0, 0]
    assert [len(each.events("recovered")) for each in workers] == [1, 1, 1]
    check_history(workers)
    states = states_by_version(workers)  # what the tests record is complete
    assert len(states) == 10
    assert len({frozenset(state) for state in states.values()}) == 1
    assert len({value for state in states.values() for value in state.values()}) > 2 * len(states[min(states)])
    assert all(later - earlier == 1 for earlier, later in pairwise(sorted(states)))


@pytest.mark.quick("a worker joins, also while others die")
def test_joiner_is_taken_in_at_a_step_boundary(start_job):
    job = start_job(2)
    job.open_gate(6)
    workers = job.start_all({}, "ab", gated=True, steps=30)
    workers[0].wait_for("gate", step=6)
    workers.append(job.start("c", steps=30))
    job.take_in(workers[2], until=30)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    recovered = check_recovered(workers, workers[2])
    assert 10 < recovered["step"] < 30  # overheard in step 10 or later
    assert recovered["sources"]["peer"] == recovered["fetched_units"] > 0


@pytest.mark.parametrize("point", ["phase agree", "phase fetch", "copy", "confirm"])
def test_joiner_dies_while_it_joins(start_job, point):
    job = start_job(2)
    job.open_gate(6)
    workers = job.start_all({}, "ab", gated=True, steps=20)
    workers[0].wait_for("gate", step=6)
    workers.append(job.start("c", Fault(point), steps=20))
    job.take_in(workers[2], until=20)
    assert [each.join() for each in workers] == [0, 0, -9]
    check_history(workers)
    assert workers[0].events("done")[0]["version"] == workers[1].events("done")[0]["version"]


@pytest.mark.long
def test_every_worker_is_replaced_one_after_the_other(start_job):
    job = start_job()
    job.open_gate(5)
    living = job.start_all({}, gated=True, steps=40)
    for turn, name in enumerate("def"):
        for each in living:
            each.wait_for("gate", step=5 + 10 * turn)
        living.pop(0).signal(signal.SIGKILL)
        living.append(job.start(name, gated=True, steps=40))
        job.take_in(living[-1], until=15 + 10 * turn)
    job.open_gate(40)
    assert [each.join() for each in living] == [0, 0, 0]
    check_history(job.workers)
    for each in living:
        check_recovered(job.workers, each, 0)
    assert job.workers[-1].events("done")[0]["step"] == 40


@pytest.mark.quick("your code raises on one worker")
def test_exception_of_the_user_ends_that_worker_alone(start_job):
    job = start_job()
    workers = a, b, c = job.start_all({"b": [at("forward", "raise")]})
    assert [each.join() for each in workers] == [0, 1, 0]
    assert b.events("failed")[0]["error"] == "ZeroDivisionError"
    assert "asked for at forward" in b.log()
    check_history(workers)
    for survivor in (a, c):
        assert survivor.events("recovered")[-1]["members"] == 2
        assert survivor.events("recovered")[-1]["time"] - b.events("failed")[0]["time"] < 5
