"""A bit that flips in the memory of a copy is found before the copy is used, wherever it is and whenever it flips."""

from __future__ import annotations

import signal

import pytest

from evermoe.checkpoint.checkpoint_folder import find_manifests
from evermoe.checkpoint.manifest import SAVE
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of
from support.flips import flip_file
from support.harness import FEWEST, wait_until
from support.history import check_history, check_recovered
from support.optimizers import make_optimizer
from support.worker import Fault, Model

REPLAYED = ["auto", "moetion"]
FLIPPED = 4
KILLED = 60


def start(start_job, preset, tmp_path=None, **session):
    """Two workers; those copies on `a` of what `b` trains are flipped; `b` is killed."""
    more = {"remote_bytes_per_step": 1 << 30} if preset == "moetion" else {}
    if tmp_path is not None:
        more |= {"checkpoints": str(tmp_path / "saved"), "checkpoint_interval": 3}
    return start_job(2, preset=preset, **FEWEST, rebalance_interval=0, join_interval=50, **more, **session)


@pytest.mark.parametrize("preset", REPLAYED)
@pytest.mark.parametrize("where", ["log", "state", "step"])
@pytest.mark.quick("bits of a copy flip in memory or on disk")
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


TIMES = {
    "begin": Fault("begin", 7, "flip"),
    "gradients_logged": Fault("gradients_logged", 7, "flip"),
    "vote": Fault("vote", 6, "flip"),
    "update": Fault("update", 6, "flip"),
    "update, log": Fault("update", 6, "flip", where="log"),
    "copy": Fault("copy", 7, "flip"),
    "agree": Fault("phase agree", action="flip", nth=2),
    "agree, log": Fault("phase agree", action="flip", nth=2, where="log"),
    "fetch": Fault("phase fetch", action="flip", nth=2),
}
"""In the step before the death, in the step of it, and in the recovery: before copies are looked at, and after that."""


@pytest.mark.parametrize("preset", REPLAYED)
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.few(2)
def test_flip_right_before_the_only_trainer_dies_is_never_adopted(start_job, tmp_path, preset, time):
    """The report names the loss: the job goes back to a checkpoint."""
    job = start(start_job, preset, tmp_path)
    faults = {"a": [TIMES[time]], "b": [Fault("forward", 7)]}
    workers = a, _ = job.start_all(faults, "ab", steps=10)
    assert [each.join() for each in workers] == [0, -9]
    flipped = set(a.events("flipped")[0]["units"])
    assert flipped
    damaged = {event["unit"] for event in a.events("damaged")}
    if time == "agree, log" and not damaged:  # copies catch up when a loss is noticed: their log was read before
        check_history(workers)
        assert check_recovered(workers, a)["stale"] == {}
        return
    assert damaged >= flipped
    check_history(workers, undone=True)
    recovered = a.events("recovered")[-1]
    assert recovered["lost_units"] or recovered["stale"]


def test_flip_in_one_of_two_replicas_costs_nothing(start_job):
    job = start_job(3, replication=3, **FEWEST, rebalance_interval=0, join_interval=50)
    faults = {"a": [Fault("update", 6, "flip")], "b": [Fault("forward", 7)]}
    workers = a, _, c = job.start_all(faults, steps=10)
    assert [each.join() for each in workers] == [0, -9, 0]
    assert {event["unit"] for event in a.events("damaged")} == set(a.events("flipped")[0]["units"])
    assert not c.events("damaged")
    check_history(workers)
    for each in (a, c):
        recovered = check_recovered(workers, each)
        assert (recovered["step"], recovered["steps_lost"]) == (7, 0)


@pytest.mark.parametrize("preset", ["gemini", "baft"])
def test_flip_in_the_only_snapshot_takes_the_version_before(start_job, preset):
    job = start_job(2, preset=preset, **FEWEST, rebalance_interval=0, join_interval=50)
    faults = {"a": [Fault("vote", 7, "flip", where="arena")], "b": [Fault("vote", 7)]}
    workers = a, _ = job.start_all(faults, "ab", steps=10)
    assert [each.join() for each in workers] == [0, -9]
    assert a.events("flipped")[0]["units"]
    recovered = check_recovered(workers, a)
    assert recovered["digests_mismatched"] > 0
    assert (recovered["step"], recovered["lost_units"]) == (6, [])
    check_history(workers, undone=True)


def test_flips_in_the_newest_file_of_a_unit_of_pec_take_an_older_one(start_job, tmp_path):
    folder = tmp_path / "saved"
    job = start_job(2, preset="pec", checkpoints=str(folder), **FEWEST, rebalance_interval=0, join_interval=50)
    job.open_gate(6)
    workers = a, b = job.start_all({}, "ab", steps=10, gated=True)
    for each in workers:
        each.wait_for("gate", step=6)
    model = Model()
    layout = TrainingState(model, make_optimizer("adamw", model)).catalog.layout
    newest = wait_until(lambda: saved_after(folder, layout, 6), "the save after 6 steps is complete")
    alone = b.events("copy")[0]["digests"].keys() - a.events("copy")[0]["digests"].keys()
    unit = min(alone, key=lambda unit: (-newest[unit].version, unit))
    flip_file(newest[unit].files[0])
    b.signal(signal.SIGKILL)
    job.open_gate(10)
    assert [each.join() for each in workers] == [0, -9]
    recovered = a.events("recovered")[-1]
    assert recovered["digests_mismatched"] > 0
    assert recovered["stale"][unit] < step_of(newest[unit].version)
    assert (recovered["steps_lost"], recovered["lost_units"]) == (0, [])
    check_history(workers)


def saved_after(folder, layout, step):
    """Return the newest version of each unit in the save after this number of steps; None if there is no such save."""
    found = find_manifests(folder, layout, (SAVE,))
    return next((each.units for each in found if step_of(each.version) == step), None)


def test_flip_in_an_active_replica_is_found_when_they_are_compared(start_job):
    job = start_job(
        3,
        preset="lazarus",
        replication=3,
        expert_slots=10,
        min_replicas=3,
        rebalance_interval=0,
        join_interval=50,
        on_corruption="ignore",
    )
    faults = {"a": [Fault("update", 4, "flip", where="active")]}
    workers = a, *_ = job.start_all(faults, "abc", steps=8)
    assert [each.join() for each in workers] == [0, 0, 0]
    flipped = set(a.events("flipped")[0]["units"])
    for each in workers:
        verified = each.events("verified")[0]
        assert set(verified["units"]) == flipped
        assert verified["digests_mismatched"] == len(flipped)
