"""The last steps of a job: nobody leaves while another needs its copies, nobody waits for ever."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

STEPS = 6
HANG_LIMIT = 60.0
"""Seconds: longer than a test waits for a worker, so that none is waited for by this limit."""


@pytest.mark.parametrize("point", ["forward", "copy", "commit", "verified"])
def test_killed_in_the_last_step(start_job, point):
    job = start_job(hang_timeout=HANG_LIMIT)
    step = None if point == "verified" else STEPS - 1 + (point == "copy")
    workers = job.start_all({"b": [Fault(point, step)]}, steps=STEPS)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    a, b, c = (each.events("done") for each in workers)
    assert not b
    assert a[0]["version"] == c[0]["version"]


def test_killed_while_the_last_checkpoint_is_written(start_job, tmp_path):
    saved = tmp_path / "saved"
    job = start_job(checkpoints=str(saved), checkpoint_interval=2, hang_timeout=HANG_LIMIT)
    workers = job.start_all({"a": [Fault("checkpoint", STEPS)]}, steps=STEPS)
    assert [each.join() for each in workers] == [-9, 0, 0]
    check_history(workers)
    assert (saved / f"step-{STEPS:08d}" / "manifest.json").exists()


def test_second_run_of_a_finished_job_has_nothing_to_do(start_job, tmp_path):
    job = start_job(2, checkpoints=str(tmp_path / "saved"))
    first = job.start_all({}, "ab", steps=STEPS)
    assert [each.join() for each in first] == [0, 0]
    again = job.start_all({}, "ab", steps=STEPS)
    assert [each.join() for each in again] == [0, 0]
    assert sorted("nothing left to do: 6 of 6 steps are taken" in each.log() for each in again) == [False, True]
    for each in again:
        assert not each.events("commit")
        assert check_recovered(job.workers, each)["step"] == STEPS
    assert job.arenas() == []
