"""A member that is given experts dies before their copies are complete: who gave them away still has them."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault

JOIN = 10
"""Step before which the survivor looks for new members."""
STEPS = 20


def join_and_die(job, *faults, names="c"):
    """One of two members dies, the other one trains on alone; then joiners come, each of which dies by its fault."""
    job.open_gate(8)
    a, b = workers = job.start_all({"b": [Fault("vote", 3)]}, "ab", gated=True, steps=STEPS)
    assert b.join() == -9
    a.wait_for("gate", step=8)
    joiners = [job.start(name, fault, steps=STEPS) for name, fault in zip(names, faults, strict=True)]
    job.take_in(*joiners, until=STEPS)
    assert [each.join() for each in joiners] == [-9] * len(joiners)
    assert a.join() == 0
    return a, [*workers, *joiners]


@pytest.mark.parametrize(
    ("preset", "dense"),
    [(preset, "replicated") for preset in ("auto", "gemini", "moetion")] + [("auto", "sharded"), ("gemini", "sharded")],
)
@pytest.mark.parametrize("point", ["copy", "confirm"])
def test_joiner_dies_before_the_copies_of_its_experts_are_complete(start_job, preset, dense, point):
    job = start_job(2, preset=preset, shard_optimizer=dense == "sharded", snapshot_interval=1000, **FEWEST)
    a, workers = join_and_die(job, Fault(point))
    rank, plan = (workers[-1].events(name)[0] for name in ("joined", "protection_planned"))
    given = {unit for unit, trainers in plan["active"].items() if rank["rank"] in trainers}
    assert any("experts" in unit for unit in given)
    assert {"head", "embedding", "first.router", "second.router"} & given
    if dense == "sharded":
        assert not {"head", "embedding", "first.router", "second.router"} <= given, "some stay where they are"
    check_nothing_is_lost(a, workers)


def test_two_joiners_die_one_after_the_other(start_job):
    """Units given to either still exist when the second one dies in the recovery from the death of the first."""
    job = start_job(2, snapshot_interval=1000, **FEWEST)
    check_nothing_is_lost(*join_and_die(job, Fault("copy"), Fault("copy", nth=2), names="cd"))


def check_nothing_is_lost(a, workers):
    check_history(workers)
    recovered = check_recovered(workers, a)
    assert recovered["step"] >= JOIN
    assert (recovered["members"], recovered["steps_lost"]) == (1, 0)
    assert (recovered["stale"], recovered["lost_units"]) == ({}, [])
    assert recovered["sources"]["local memory"] > 0
    assert a.events("verified")[0]["digests_mismatched"] == 0
