"""Snapshots travel in the windows that the session has found itself: real processes, and the traces of what they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from history import check_history

PROFILE = {"profile_steps": 6, "profile_every": 8}
BUSY = 60
"""Multiplications, some milliseconds in each of which the network is idle."""
ROUNDING = 1.0
"""Microseconds."""


def events(text, kind):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def ends(event):
    return event["ts"] + event["dur"]


def run(start_job, preset, size=2, steps=30, work=((0, BUSY),), **session):
    """The workers of a job that has ended well, and the traces of their sessions."""
    job = start_job(size, preset=preset, **PROFILE | session)
    workers = job.start_all({}, "abc"[:size], steps=steps, work=[list(each) for each in work], trace=True)
    assert [each.join() for each in workers] == [0] * size, workers[0].log()
    check_history(workers)
    return workers, [(Path(job.folder) / f"{each.name}.session.json").read_text() for each in workers]


def check_in_windows(trace):
    """Bytes sent in windows and in all; each message begins in its window, outside of all collectives."""
    busy = [event for event in events(trace, "collective") if event["name"] != "copies"]
    windows = events(trace, "window")
    copies = [copy for copy in events(trace, "copy") if copy["ts"] >= windows[0]["ts"]]
    assert copies
    for copy in copies:
        number = copy["args"]["window"]
        if number is None:
            continue
        found = [w for w in windows if w["args"]["number"] == number and w["ts"] <= copy["ts"] + ROUNDING]
        assert copy["ts"] <= ends(found[-1]) + ROUNDING
        assert not [span for span in busy if span["ts"] + ROUNDING < copy["ts"] < ends(span) - ROUNDING]
    inside = sum(copy["args"]["bytes"] for copy in copies if copy["args"]["window"] is not None)
    return inside, sum(copy["args"]["bytes"] for copy in copies)


@pytest.mark.parametrize(("preset", "size"), [("gemini", 2), ("gemini", 3), ("baft", 3)])
def test_most_bytes_travel_in_windows(start_job, preset, size):
    workers, traces = run(start_job, preset, size)
    for worker, trace in zip(workers, traces, strict=True):
        inside, everything = check_in_windows(trace)
        assert inside > everything / 2
        assert worker.events("paced")[-1]["plans"] >= 1
        assert "a version takes 1 step" in worker.events("paced")[-1]["words"]
