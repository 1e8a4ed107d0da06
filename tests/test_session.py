"""Failures of real processes at named points: survivors go on in place and no bit of a committed step is lost."""

from __future__ import annotations

import pytest
from harness import check_history, check_recovered, committed_steps
from worker import Fault

KILLED_AT = 5
POINTS = ["begin", "forward", "reduce", "vote", "update", "copy", "confirm", "commit"]


def at(point, action="kill", step=KILLED_AT):
    """The events of copying name the step that they complete."""
    return Fault(point, step + (point in ("copy", "confirm")), action)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at(start_job, point):
    job = start_job()
    workers = job.start_all({"b": [at(point)]})
    a, b, c = workers
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in (a, c):
        recovered = check_recovered(workers, survivor, count=2)
        assert recovered["members"] == 2
        assert recovered["step"] >= committed_steps([b])
        assert recovered["step"] in (KILLED_AT, KILLED_AT + 1)
        assert recovered["sources"].get("disk", 0) == 0
        assert survivor.events("done")[0]["pid"] == survivor.pid
    assert a.events("done")[0]["version"] == c.events("done")[0]["version"]
