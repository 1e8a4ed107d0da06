"""Jobs whose copies and recoveries travel by UCX: a worker's death costs what it does over TCP."""

from __future__ import annotations

import signal

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

pytest.importorskip("libucx", reason="needs the package libucx-cu12")


@pytest.mark.parametrize("preset", ["gemini", "baft"])
def test_job_survives_a_death(start_job, preset):
    workers = start_job(transport="ucx", preset=preset).start_all({"b": [Fault("vote", 5)]}, model="wide")
    assert [each.join() for each in workers] == [0, -signal.SIGKILL, 0]
    check_history(workers)
    for survivor in workers[::2]:
        assert check_recovered(workers, survivor)["members"] == 2


@pytest.mark.long
def test_job_takes_in_a_newcomer(start_job):
    job = start_job(2, transport="ucx", preset="gemini")
    workers = job.start_all({}, "ab", model="wide", steps=40)
    workers[0].wait_for("commit", step=7)
    workers.append(job.start("c", model="wide", steps=40))
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    assert workers[2].events("commit", members=3)
