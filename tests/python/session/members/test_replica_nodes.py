"""Replica nodes: processes that keep copies for those that train."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault


def start(job, faults, **options):
    """Two trainers and a replica node, which takes part from the first step on."""
    replica = job.start("y", *faults.get("y", []), session={"role": "replica"}, **options)
    replica.wait_for("phase", phase="agree")
    return [*job.start_all(faults, "ab", **options), replica]


@pytest.mark.parametrize(
    ("point", "preset"),
    [
        pytest.param(point, preset, marks=() if preset == "auto" or point in ("send", "commit") else pytest.mark.long)
        for preset in ("auto", "gemini")
        for point in ("forward", "send", "confirm", "vote", "update", "commit")
    ],
)
def test_trainer_is_killed_and_its_experts_come_from_the_replica_node(start_job, point, preset):
    job = start_job(2, preset=preset, **FEWEST)
    step = 5 + (point in ("send", "confirm"))
    workers = a, b, y = start(job, {"b": [Fault(point, step)]}, steps=12)
    assert [each.join() for each in workers] == [0, -9, 0], y.log()
    check_history([a, b])
    if point in ("update", "commit") and preset == "auto":
        # The replica node has taken a step that its trainer has not lived to take: step 5 is reported as the vote on
        # step 6 passes.
        recovered = a.events("recovered")[-1]
        assert recovered["step"] == 6 + (point == "commit")
    else:
        recovered = check_recovered([a, b], a)
    assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (1, 0, 0)
    assert recovered["sources"]["peer"] > 0
    assert {each.events("verified")[0]["digests_mismatched"] for each in (a, y)} == {0}
    assert not y.events("begin")
    assert y.events("done")[0]["step"] == 12


@pytest.mark.parametrize("point", ["confirm", "vote", "update", "phase fetch"])
@pytest.mark.quick("a replica node dies, or joins")
def test_replica_node_is_killed_and_comes_back(start_job, point):
    job = start_job(2, **FEWEST)
    job.open_gate(8)
    faults = {"y": [Fault(point, None if "phase" in point else 6)]}
    a, b, y = start(job, faults, steps=20, gated=True)
    assert y.join() == -9
    again = job.start("y", session={"role": "replica"}, steps=20)
    job.take_in(again, until=20)
    assert [each.join() for each in (a, b, again)] == [0, 0, 0]
    check_history([a, b])
    for each in (a, b, again):
        assert each.events("verified")[0]["digests_mismatched"] == 0
        assert each.events("recovered")[-1]["members"] == 2


def test_replica_node_dies_before_the_first_step(start_job):
    """Those who are left were not the first ones to start this job: what they have is no older start's."""
    job = start_job(2, **FEWEST)
    a, b, y = start(job, {"y": [Fault("confirm", 0)]}, steps=8)
    assert [each.join() for each in (a, b, y)] == [0, 0, -9]
    check_history([a, b])
    assert {each.events("verified")[0]["digests_mismatched"] for each in (a, b)} == {0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.few(2)
def test_trainer_dies_with_clipping_and_another_comes(start_job, dtype):
    """Also with parameters in bfloat16, whose steps the replica node repeats on float32 masters."""
    job = start_job(2, max_grad_norm=0.3, **FEWEST)
    job.open_gate(8)
    options = {"optimizer": "evermoe", "dtype": dtype, "steps": 20}
    a, b, y = start(job, {"b": [Fault("vote", 5)]}, gated=True, **options)
    a.wait_for("gate", step=8)
    died = check_recovered([a, b], a)
    assert (died["members"], died["steps_lost"], died["digests_mismatched"]) == (1, 0, 0)
    assert died["sources"]["peer"] > 0
    c = job.start("c", **options)
    job.take_in(c, until=20)
    assert [each.join() for each in (a, b, c, y)] == [0, -9, 0, 0]
    check_history([a, b, c])
    assert {each.events("verified")[0]["digests_mismatched"] for each in (a, y)} == {0}
    assert a.events("gradients_logged") or y.events("gradients_logged"), "gradients were sent"
    assert "not float32" not in a.log() + y.log()
