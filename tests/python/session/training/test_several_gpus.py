"""Members that have a GPU each: NCCL is at work between them, and what it leaves when one of them is lost."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault

SLOW = 120.0
"""Seconds for workers that open a GPU each."""


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["auto", "gemini", "moetion"])
@pytest.mark.parametrize("point", ["forward", "reduce"])
def test_survivors_of_a_kill_resume(start_job, own_gpus, preset, point):
    """The GPU of a survivor waits for the lost one until its communicator is aborted."""
    job = start_job(3, preset=preset, hang_timeout=60.0, **FEWEST)
    faults = {"b": [Fault(point, 4)]}
    workers = [
        job.start(name, *faults.get(name, []), device="cuda", steps=10, environment=own_gpus(number))
        for number, name in enumerate("abc")
    ]
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    if preset != "moetion":
        check_recovered(workers, workers[0])
    for each in (workers[0], workers[2]):
        assert each.events("done")[0]["uses_nccl"]
        assert each.events("recovered")[-1]["digests_mismatched"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["gemini", "baft"])
def test_copies_travel_in_windows_between_what_the_gpus_run(start_job, own_gpus, preset):
    """Also after a kill; what they bring is what the GPUs have."""
    job = start_job(3, preset=preset, hang_timeout=60.0, **FEWEST)
    faults = {"b": [Fault("forward", 8)]}
    workers = [
        job.start(name, *faults.get(name, []), device="cuda", steps=16, environment=own_gpus(number))
        for number, name in enumerate("abc")
    ]
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    check_recovered(workers, workers[0])
    chunks = [event for each in (workers[0], workers[2]) for event in each.events("chunk_sent")]
    for steps in (range(3, 8), range(10, 16)):
        assert "window" in {chunk["when"] for chunk in chunks if chunk["step"] in steps}, steps
    verified = [event for each in (workers[0], workers[2]) for event in each.events("verified")]
    assert sum(event["digests_checked"] for event in verified) > 0
    assert sum(event["digests_mismatched"] for event in verified) == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("stands_in")
def test_survivors_whose_streams_are_full_give_up_a_member_that_hangs(start_job, own_gpus):
    """Their hosts wait in a launch, which holds up all calls of the driver, in every thread."""
    job = start_job(3, hang_timeout=8.0, **FEWEST)
    faults = {"b": [Fault("forward", 4, "hang")]}
    workers = [
        job.start(name, *faults.get(name, [Fault("forward", 4, "flood")]), device="cuda", steps=8, environment=gpu)
        for name, gpu in zip("abc", map(own_gpus, range(3)), strict=True)
    ]
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    job.wake()
    check_history(workers, away="b")
    for each in (workers[0], workers[2]):
        assert "waited 8 s for b-" in each.log()
        assert [event["members"] for event in each.events("recovered")] == [3, 2]


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_survivors_give_up_a_member_that_hangs_while_their_gpus_wait_for_it(start_job, own_gpus):
    """Their hosts have launched the exchange and left it: nobody waits in a call that has a timeout."""
    job = start_job(3, hang_timeout=8.0, **FEWEST)
    faults = {"b": [Fault("forward", 4, "hang")]}
    workers = [
        job.start(name, *faults.get(name, []), device="cuda", steps=8, environment=own_gpus(number))
        for number, name in enumerate("abc")
    ]
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    job.wake()
    check_history(workers, away="b")
    for each in (workers[0], workers[2]):
        assert "waited 8 s for b-" in each.log()
        assert [event["members"] for event in each.events("recovered")] == [3, 2]
