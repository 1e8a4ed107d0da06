"""Sessions with models that get memory once their experts are placed: who begins, who joins, who comes back."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

FAULT = 5


def first_digests(workers):
    """Digest of each unit, the loop's state aside, with its first values."""
    found = {}
    for each in workers:
        for unit, value in each.events("copy")[0]["digests"].items():
            assert each.events("copy")[0]["step"] == 0
            assert found.setdefault(unit, value) == value, unit
    found.pop("session")
    return found


@pytest.mark.parametrize("preset", ["auto", "gemini"])
def test_first_values_are_the_same_on_any_number_of_ranks_and_survive_a_kill(start_job, preset):
    alone = [start_job(1).start("a", deferred=True, steps=3)]
    assert alone[0].join() == 0
    workers = start_job(preset=preset, expert_slots=2).start_all({"b": [Fault("vote", FAULT)]}, deferred=True)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in workers[::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["step"], recovered["digests_mismatched"]) == (2, FAULT, 0)
    assert first_digests(workers) == first_digests(alone)


@pytest.mark.parametrize("point", ["phase fetch", "phase verify", "copy", "confirm"])
def test_a_death_while_the_job_begins_loses_no_first_values(start_job, point):
    """Units that only the dead member had made are made again."""
    step, job = None if point.startswith("phase") else 0, start_job(expert_slots=2)
    workers = job.start_all({"b": [Fault(point, step)]}, deferred=True)
    assert workers[1].join() == -9
    workers.append(job.start("d", deferred=True))
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    assert {each.events("done")[0]["step"] for each in workers if each.name != "b"} == {10}
    alone = [start_job(1).start("a", deferred=True, steps=1)]
    assert alone[0].join() == 0
    expected = first_digests(alone)
    for unit, value in workers[0].events("copy")[0]["digests"].items():
        assert unit == "session" or expected[unit] == value


def test_a_deferred_joiner_gets_its_units_from_the_others_and_a_replica_node_makes_none(start_job):
    job = start_job(2, expert_slots=4)
    job.open_gate(6)
    replica = job.start("r", session={"role": "replica"}, steps=20, deferred=True)
    workers = job.start_all({}, "ab", gated=True, steps=20, deferred=True)
    workers[0].wait_for("gate", step=6)
    workers.append(job.start("c", steps=20, deferred=True))
    job.take_in(workers[2], until=20)
    assert [each.join() for each in (*workers, replica)] == [0, 0, 0, 0]
    check_history(workers)
    assert workers[2].events("recovered")[0]["fetched_units"] > 0
    assert not any(event["digests"] for event in replica.events("copy"))


def test_a_deferred_job_resumes_from_shared_memory_and_then_from_its_checkpoint(start_job, tmp_path):
    options = {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_interval": 2}
    job = start_job(**options)
    first = job.start_all({name: [Fault("copy", FAULT)] for name in "abc"}, steps=8, deferred=True)
    assert [each.join() for each in first] == [-9, -9, -9]
    second = job.start_all({}, steps=8, deferred=True)
    assert [each.join() for each in second] == [0, 0, 0]
    assert {each.events("recovered")[0]["step"] for each in second} <= {FAULT - 1, FAULT}
    elsewhere = start_job(2, **options, job=job.name)
    third = elsewhere.start_all({}, "ab", steps=12, deferred=True)
    assert [each.join() for each in third] == [0, 0]
    recovered = third[0].events("recovered")[0]
    assert (recovered["step"], set(recovered["sources"])) == (8, {"disk"})
    check_history(job.workers)
