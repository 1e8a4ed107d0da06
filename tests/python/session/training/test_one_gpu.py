"""Several members on one GPU: gloo takes the place of NCCL, and all that a session copies from a GPU is at work."""

import re

import pytest
import torch

from support.gpu_memory import MIN_WORKSPACE, MeasuredWorker
from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.slow_links import HOST_RATE, SlowHostWorker
from support.worker import Fault

SLOW = 120.0
"""Seconds for workers that open a GPU each."""


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["auto", "gemini", "moetion"])
def test_survivors_of_a_kill_resume_from_copies(start_job, cuda, preset):
    job = start_job(3, preset=preset, hang_timeout=30.0, **FEWEST)
    workers = job.start_all({"b": [Fault("forward", 4)]}, device=cuda.type, steps=10)
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    if preset != "moetion":
        check_recovered(workers, workers[0])
    assert workers[0].events("recovered")[-1]["digests_mismatched"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", ["adamw", "evermoe", "sgd", "sgd-fused"])
@pytest.mark.parametrize("preset", ["auto", "gemini"])
def test_copies_are_of_every_optimizer(start_job, device, optimizer, preset):
    """The copies are compared with the state after the first steps, and at the end."""
    job = start_job(2, preset=preset, hang_timeout=30.0, **FEWEST)
    workers = job.start_all({}, "ab", device=device, optimizer=optimizer, steps=6)
    assert [each.join(SLOW) for each in workers] == [0, 0]
    check_history(workers)
    verified = [event for each in workers for event in each.events("verified")]
    assert sum(event["digests_checked"] for event in verified) > 0
    assert sum(event["digests_mismatched"] for event in verified) == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["gpu", "auto"])
@pytest.mark.parametrize("preset", ["auto", "gemini", "baft"])
def test_snapshots_on_the_gpu_are_those_of_the_step_before(start_job, cuda, preset, memory):
    """Training continues at once, and what arrives is compared with the state as it was."""
    job = start_job(3, preset=preset, snapshot_memory=memory, hang_timeout=30.0, **FEWEST)
    workers = job.start_all({"b": [Fault("forward", 6)]}, device=cuda.type, optimizer="evermoe", steps=10)
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    check_recovered(workers, workers[0])
    taken = [event["gpu_bytes"] for event in workers[0].events("measured")]
    assert preset == "auto" or max(taken) > 1000, "a snapshot lay on the GPU"
    assert sum(event["digests_mismatched"] for event in workers[0].events("verified")) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("stands_in")
@pytest.mark.timeout(300)
def test_messages_are_planned_by_a_copy_to_the_host_that_is_slower_than_the_network(start_job, cuda):
    job = start_job(2, preset="gemini", hang_timeout=30.0, profile_steps=4, profile_interval=6, **FEWEST)
    workers = [job.start(name, kind=SlowHostWorker, device=cuda.type, steps=12) for name in "ab"]
    assert [each.join(SLOW) for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        paced = each.events("paced")[-1]
        assert 0 < paced["budgets"][1] <= 2 * HOST_RATE * max(one.events("paced")[-1]["seconds"] for one in workers)
        said = paced["summary"]
        found = re.search(r"messages keep pace with the copy from GPU to host, ([0-9.e+-]+) MB/s", said)
        assert found, said
        assert float(found[1]) * 1e6 <= HOST_RATE


@pytest.mark.gpu
@pytest.mark.chip
@pytest.mark.timeout(300)
def test_a_recovery_takes_little_more_memory_than_training_does_after_it(start_job, cuda):
    job = start_job(3, preset="gemini", hang_timeout=30.0, **FEWEST)
    common = {"kind": MeasuredWorker, "device": cuda.type, "optimizer": "evermoe", "environment": MIN_WORKSPACE}
    faults = {"a": [], "b": [Fault("forward", 4)], "c": []}
    workers = [job.start(name, *faults[name], steps=10, **common) for name in faults]
    assert [each.join(SLOW) for each in workers] == [0, -9, 0]
    for each in (workers[0], workers[2]):
        peaks = [(event["until"], event["bytes"]) for event in each.events("peak")]
        recovery = max(number for number, (until, _) in enumerate(peaks) if until == "recovered")
        # Without the first step, in which the script still has the loss of the interrupted one, and with it its graph.
        training = [taken for _, taken in peaks[recovery + 3 :]]
        assert len(training) >= 3 and min(training) > 100e6
        assert peaks[recovery][1] / max(training) < 1.3


@pytest.mark.timeout(300)
def test_replicas_repeat_the_steps_on_their_device(start_job, device):
    job = start_job(3, preset="moetion", hang_timeout=30.0, replica_device=device, **FEWEST)
    workers = job.start_all({"b": [Fault("forward", 4)]}, device=device, optimizer="evermoe", steps=8)
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["digests_mismatched"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_survivors_resume_from_replicas_between_which_the_gpu_splits_the_tokens(start_job, cuda):
    job = start_job(3, preset="lazarus", hang_timeout=30.0)
    workers = job.start_all({"b": [Fault("forward", 4)]}, device=cuda.type, steps=8)
    assert workers[1].join(SLOW) == -9
    assert [each.join(SLOW) for each in (workers[0], workers[2])] == [0, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["digests_mismatched"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_trains_as_the_processor_does(start_job, cuda):
    """Losses are equal but for the order of sums."""
    losses = []
    for place in ("cpu", cuda.type):
        (worker,) = start_job(1).start_all({}, "a", device=place, steps=8)
        assert worker.join(SLOW) == 0
        losses.append(torch.tensor([event["loss"] for event in worker.events("commit")]))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0.0)
