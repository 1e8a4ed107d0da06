"""A bit that flips in the memory of a copy is found before the copy is used, wherever it is and whenever it flips."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault

REPLAYED = ["auto", "moetion"]
FLIPPED = 4
KILLED = 60


def start(start_job, preset, tmp_path=None, **session):
    """Two workers; those copies on `a` of what `b` trains are flipped; `b` is killed."""
    more = {"remote_bytes_per_step": 1 << 30} if preset == "moetion" else {}
    if tmp_path is not None:
        more |= {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 3}
    return start_job(2, preset=preset, **FEWEST, rebalance_every=0, join_every=50, **more, **session)


@pytest.mark.parametrize("preset", REPLAYED)
@pytest.mark.parametrize("where", ["state", "log", "step"])
def test_flip_in_a_replica_is_found_and_healed_while_its_trainer_lives(start_job, preset, where):
    job = start(start_job, preset)
    faults = {"a": [Fault("vote", FLIPPED, "flip", where=where)], "b": [Fault("vote", KILLED)]}
    workers = a, _ = job.start_all(faults, "ab", steps=KILLED + 4)
    assert [each.join() for each in workers] == [0, -9]
    flipped = set(a.events("flipped")[0]["units"])
    assert flipped
    assert {event["unit"] for event in a.events("damaged")} == flipped
    assert all(event["unit"] in a.log() for event in a.events("damaged"))
    check_history(workers)
    recovered = check_recovered(workers, a)
    assert (recovered["step"], recovered["steps_lost"], recovered["stale"]) == (KILLED, 0, {})
    assert recovered["digests_mismatched"] == 0


@pytest.mark.parametrize("preset", REPLAYED)
@pytest.mark.parametrize("where", ["state", "log"])
def test_flip_right_before_the_only_trainer_dies_is_never_adopted(start_job, tmp_path, preset, where):
    """What is lost is said: the job goes back to a checkpoint."""
    job = start(start_job, preset, tmp_path)
    faults = {"a": [Fault("update", 6, "flip", where=where)], "b": [Fault("forward", 7)]}
    workers = a, _ = job.start_all(faults, "ab", steps=10)
    assert [each.join() for each in workers] == [0, -9]
    flipped = set(a.events("flipped")[0]["units"])
    assert flipped
    assert {event["unit"] for event in a.events("damaged")} >= flipped
    check_history(workers, undone=True)
    recovered = a.events("recovered")[-1]
    assert recovered["lost_units"] or recovered["stale"]


def test_flip_in_one_of_two_replicas_costs_nothing(start_job):
    job = start_job(3, copies=3, **FEWEST, rebalance_every=0, join_every=50)
    faults = {"a": [Fault("update", 6, "flip")], "b": [Fault("forward", 7)]}
    workers = a, _, c = job.start_all(faults, steps=10)
    assert [each.join() for each in workers] == [0, -9, 0]
    assert {event["unit"] for event in a.events("damaged")} == set(a.events("flipped")[0]["units"])
    assert not c.events("damaged")
    check_history(workers)
    for each in (a, c):
        recovered = check_recovered(workers, each)
        assert (recovered["step"], recovered["steps_lost"]) == (7, 0)
