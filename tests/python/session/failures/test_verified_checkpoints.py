"""Bits that flip before a checkpoint and are found after it: which checkpoints are verified, stay, and are resumed."""

from __future__ import annotations

import pytest

from evermoe.checkpoint.checkpoint_store import stored
from evermoe.cli.main import main
from support.worker import Fault

EVERYWHERE = {"preset": "lazarus", "replication": 3, "expert_slots": 10, "min_replicas": 3}
"""All members hold all experts."""
COMPARED = 16
"""A step in whose vote members compare all state, however short their steps are, and another one 8 steps before it."""
FLIPPED = 18
"""The step in whose update a bit flips: the checkpoint after it, of step 19, is the first with wrong bits."""
FOUND_BY = 24
"""The next step after it in whose vote all state is compared."""
FLIP = Fault("update", FLIPPED, "flip", where="moment")


def start(start_job, folder, keep=1, **session):
    """Write a checkpoint after each step, of which the newest stay."""
    places = {"checkpoints": str(folder), "checkpoint_interval": 1, "keep_checkpoints": keep}
    return start_job(3, **EVERYWHERE, **places, rebalance_interval=0, join_interval=50, **session)


def verified(worker):
    return [event["step"] for event in worker.events("checkpoint_verified")]


def on_disk(folder):
    """By step: whether the checkpoint is verified."""
    return {each.step: each.verified_at is not None for each in stored(folder)}


@pytest.mark.quick("wrong bits have reached checkpoints before they are found")
def test_an_older_checkpoint_stays_is_named_by_the_error_and_resumed(start_job, tmp_path, capsys):
    job = start(start_job, tmp_path / "saved", on_corruption="stop")
    workers = job.start_all({"b": [FLIP]}, steps=FOUND_BY + 2)
    assert [each.join() for each in workers] == [1, 1, 1]
    (newest,) = {verified(each)[-1] for each in workers}
    assert COMPARED - 8 <= newest < FLIPPED
    found = on_disk(tmp_path / "saved")
    assert found.pop(newest)
    assert max(found) > FLIPPED and not any(found.values()), "they may have the wrong bits"
    path = tmp_path / "saved" / f"step-{newest:08d}"
    for each in workers:
        assert f"The newest verified checkpoint is {path}, of step {newest}: " in each.log()
    main(["checkpoints", "list", str(tmp_path / "saved")])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines if "  verified at step" in line] == [path.name]
    assert sum("not verified" in line for line in lines) == len(found)

    before = {event["step"]: event["digests"] for event in workers[0].events("copy")}
    job.session["resume_from"] = "verified"
    again = job.start_all({}, steps=FOUND_BY + 2)
    assert [each.join() for each in again] == [0, 0, 0]
    for each in again:
        assert each.events("recovered")[0]["step"] == newest
        assert each.events("copy")[0]["digests"] == before[newest]
        assert each.events("verified")[-1]["digests_mismatched"] == 0
    assert on_disk(tmp_path / "saved")[FOUND_BY + 2], "the end of a job compares all state"


def test_after_a_repair_only_later_checkpoints_are_verified(start_job, tmp_path):
    job = start(start_job, tmp_path / "saved")
    workers = job.start_all({"b": [FLIP]}, steps=FOUND_BY + 12)
    assert [each.join() for each in workers] == [0, 0, 0]
    (found,) = {event["step"] for each in workers for event in each.events("corruption_found")}
    assert FLIPPED < found <= FOUND_BY
    steps = verified(workers[0])
    assert steps == verified(workers[1]) == verified(workers[2]) == sorted(set(steps))
    assert not {*range(FLIPPED + 1, found + 1)} & {*steps}
    assert steps[-1] == FOUND_BY + 12 and any(found < step < FOUND_BY + 12 for step in steps)
    assert on_disk(tmp_path / "saved") == {FOUND_BY + 12: True}


CHANGES = {"a member is lost": "kill", "the same members connect again": "drop"}


@pytest.mark.parametrize("change", CHANGES)
def test_when_members_change_those_of_lost_members_are_never_verified(start_job, tmp_path, change):
    """A recovery compares all state. That of a lost member is in checkpoints, and nobody can compare it any more."""
    job = start(start_job, tmp_path / "saved", keep=9)
    fault = Fault("vote", FLIPPED, CHANGES[change])
    workers = job.start_all({"b": [fault]}, steps=FOUND_BY)
    assert [each.join() for each in workers] == [0, -9 if change == "a member is lost" else 0, 0]
    a, _, c = workers
    assert verified(a) == verified(c)
    last = FLIPPED - 1  # complete on disk since the vote before the fault, so that this vote would have verified it
    assert (last in verified(a)) == (change == "the same members connect again")
    assert verified(a)[-1] == FOUND_BY


def test_a_job_with_unverified_checkpoints_does_not_begin_again(start_job, tmp_path):
    job = start(start_job, tmp_path / "saved", on_corruption="ignore")
    workers = job.start_all({}, steps=COMPARED)
    assert [each.join() for each in workers] == [0, 0, 0]
    assert on_disk(tmp_path / "saved") == {COMPARED: False}
    next_job = start(start_job, tmp_path / "saved", resume_from="verified")
    again = next_job.start_all({}, steps=COMPARED + 1)
    assert [each.join() for each in again] == [1, 1, 1]
    for each in again:
        assert "resume_from is 'verified', but none of the 1 checkpoints in" in each.log()
    assert on_disk(tmp_path / "saved") == {COMPARED: False}


def test_a_job_with_state_in_memory_alone_does_not_begin_again(start_job, tmp_path):
    job = start_job(3, preset="gemini", checkpoints=str(tmp_path / "saved"), rebalance_interval=0, join_interval=50)
    workers = job.start_all({name: [Fault("vote", 8)] for name in "abc"}, steps=COMPARED)
    assert [each.join() for each in workers] == [-9, -9, -9]
    job.session["resume_from"] = "verified"
    again = job.start_all({}, steps=COMPARED)
    assert [each.join() for each in again] == [1, 1, 1]
    for each in again:
        assert "resume_from is 'verified', and no checkpoint is, but nodes have state of step 8" in each.log()
