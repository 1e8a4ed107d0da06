"""Versions of copies that take several steps: real processes, what a loss undoes, and who decides how many steps."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from support.harness import FEWEST
from support.history import check_history
from support.worker import Fault

DIES_IN = 8


def versions(worker):
    """Return the steps taken in the versions that arrived completely from a peer."""
    return sorted({event["step"] for event in worker.events("snapshot_received")})


def commits_before(worker, step):
    """The last step that was reported as committed before the worker took its part in this one."""
    found = worker.events()
    begun = next(place for place, event in enumerate(found) if event["event"] == "begin" and event["step"] == step)
    return max(event["step"] for event in found[:begun] if event["event"] == "commit")


@pytest.mark.parametrize("preset", ["baft", pytest.param("gemini", marks=pytest.mark.long)])
def test_a_loss_undoes_the_steps_since_the_newest_whole_version(start_job, preset):
    """Versions 1, 4 and 7 are copied; the member dies where 4 is complete everywhere, and 7 may be."""
    job = start_job(3, preset=preset, profile_steps=0, snapshot_interval=3, **FEWEST)
    workers = job.start_all({"b": [Fault("vote", DIES_IN)]}, "abc", steps=16)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    survivors = workers[::2]
    again = {each.events("recovered")[-1]["step"] for each in survivors}
    assert again in ({4}, {7})
    for each in survivors:
        recovered = each.events("recovered")[-1]
        assert recovered["steps_undone"] in (DIES_IN - recovered["step"], DIES_IN + 1 - recovered["step"])
        assert recovered["steps_lost"] == 0
        assert commits_before(each, DIES_IN) == 3
        step = recovered["step"]
        assert {1, 4} <= set(versions(each)) <= {0, 1, 4, 7, *range(step, 17, 3), *range(step + 1, 17, 3), 16}
        assert [event["digests_mismatched"] for event in each.events("verified")] == [0]
        assert [event["step"] for event in each.events("commit")] == list(range(16))


@pytest.mark.long
def test_windows_that_are_too_short_for_a_version_share_it_out(start_job):
    """The profile says over how many steps; nothing is waited for in between."""
    job = start_job(2, preset="baft", profile_steps=6, profile_interval=1000, copy_buffer_bytes=128)
    workers = job.start_all({}, "ab", steps=60, work=20, trace=True)
    assert [each.join() for each in workers] == [0, 0], workers[0].log()
    check_history(workers)
    paced = [worker.events("paced")[-1] for worker in workers]
    assert paced[0]["summary"] == paced[1]["summary"]
    steps = int(re.search(r"a version takes (\d+) steps", paced[0]["summary"])[1])
    planned = next(event["step"] for event in workers[0].events("paced") if event["plans"] == paced[0]["plans"])
    for worker in workers:
        found = [step for step in versions(worker) if step > planned + 1]
        assert {b - a for a, b in pairwise(found[:-1])} <= {steps}  # the last one is that of the job's end
        assert len(found) >= (60 - planned) // steps - 1
        assert (Path(worker.options.folder) / f"{worker.name}.session.json").exists()


@pytest.mark.long
def test_windows_that_take_nothing_make_versions_as_rare_as_loses_the_least_time(start_job):
    """By the formula of Gemini, which weighs delays against what failures would waste: done, not only said."""
    job = start_job(2, preset="gemini", profile_steps=4, profile_interval=1000, window_share=1e-4)
    workers = job.start_all({}, "ab", steps=80, slow=0.05)
    assert [each.join() for each in workers] == [0, 0], workers[0].log()
    check_history(workers)
    paced = workers[0].events("paced")
    assert paced[-1]["summary"] == workers[1].events("paced")[-1]["summary"]
    steps = int(re.search(r"so there is a version every (\d+) steps, which loses the least", paced[-1]["summary"])[1])
    assert 1 < steps < 64
    planned = next(event["step"] for event in paced if event["plans"] == paced[-1]["plans"])
    for worker in workers:
        found = [step for step in versions(worker) if step > planned + 1]
        assert len(found) > 2
        assert {b - a for a, b in pairwise(found[:-1])} == {steps}
