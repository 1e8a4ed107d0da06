"""Members that are islands: complete or absent, with the losses of one process and the same bits in all islands."""

import signal

import pytest

from support.harness import wait_until
from support.history import check_history
from support.islands import WAYS, check_losses, size_of, start_island
from support.worker import Fault

CLIP = 0.4
"""A norm below that of most gradients."""
POINTS = ["gather", "exchange", "backward", "reduce", "vote", "update"]
DIES_IN = 4
LOST = {-9, 1}
"""Exit codes of an island whose processes kill themselves: the first may be gone before the second comes to that."""


def join(workers):
    return [each.join() for each in workers]


@pytest.fixture
def alone(start_job):
    """A worker that trains without others, and without a mesh."""
    return start_job(1, max_grad_norm=CLIP).start("x")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(3)
def test_losses_are_those_of_one_process(start_job, alone, way):
    job = start_job(2 * size_of(way), max_grad_norm=CLIP)
    workers = [each for name in "ab" for each in start_island(job, name, way=way)]
    assert join([alone, *workers]) == [0] * (1 + len(workers))
    check_history(workers)
    check_losses(alone, workers)


@pytest.mark.parametrize("way", ["fsdp", "tp"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.few(3)
def test_an_island_is_lost(start_job, alone, way, point):
    job = start_job(4, max_grad_norm=CLIP)
    fault = Fault(point, step=DIES_IN)
    workers = [*start_island(job, "a", way=way), *start_island(job, "b", (0, fault), (1, fault), way=way)]
    assert join([alone, *workers[:2]]) == [0, 0, 0]
    assert {*join(workers[2:])} <= LOST
    check_history(workers)
    check_losses(alone, workers[:2])


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.few(2)
@pytest.mark.quick("one process of an island dies")
def test_a_process_of_an_island_is_lost(start_job, alone, point):
    job = start_job(4, max_grad_norm=CLIP)
    workers = [*start_island(job, "a"), *start_island(job, "b", (1, Fault(point, step=DIES_IN)))]
    assert join([alone, *workers]) == [0, 0, 0, 1, -9]
    (failed,) = workers[2].events("failed")
    assert failed["error"] == "IslandLost"
    check_history(workers)
    check_losses(alone, workers[:2])


def test_a_process_of_an_island_is_stopped(start_job, alone):
    job = start_job(4, max_grad_norm=CLIP)
    fault = Fault("gather", step=DIES_IN, action="stop")
    workers = [*start_island(job, "a"), *start_island(job, "b", (1, fault))]
    assert join([alone, *workers[:3]]) == [0, 0, 0, 1]  # its neighbour does not wait for it in FSDP2's gather
    workers[3].signal(signal.SIGCONT)
    assert workers[3].join() == 1
    check_history(workers)
    check_losses(alone, workers[:2])


def test_two_of_three_islands_are_lost(start_job, alone):
    job = start_job(3, max_grad_norm=CLIP, replication=3)
    fault = Fault("backward", step=DIES_IN)
    first = start_island(job, "a", way="one process")
    lost = [each for name in "bc" for each in start_island(job, name, (0, fault), way="one process")]
    assert join([alone, *first]) == [0, 0]
    assert join(lost) == [-9, -9]
    check_history([*first, *lost])
    check_losses(alone, first)


def test_an_island_joins_once_it_is_complete(start_job, alone):
    job = start_job(4, max_grad_norm=CLIP, join_interval=1)
    job.open_gate(3)
    workers = [each for name in "ab" for each in start_island(job, name, gated=True)]
    for each in workers:
        each.wait_for("gate", step=3)
    joiners = start_island(job, "c", gated=True)
    job.take_in(*joiners, until=10)
    assert join([alone, *workers, *joiners]) == [0] * 7
    check_history([*workers, *joiners])
    check_losses(alone, workers)
    assert [event["members"] for event in workers[0].events("recovered")] == [4, 6]
    assert joiners[0].events("recovered")[0]["step"] > 3


def test_an_island_leaves_on_notice(start_job, alone):
    job = start_job(4, max_grad_norm=CLIP)
    job.open_gate(3)
    workers = [each for name in "ab" for each in start_island(job, name, gated=True)]
    for each in workers:
        each.wait_for("gate", step=3)
    for each in workers[2:]:
        each.signal(signal.SIGTERM)
        wait_until(lambda each=each: "SIGTERM" in each.log(), "it has heard the signal")
    job.open_gate(10)
    assert join([alone, *workers]) == [0, 0, 0, 143, 143]
    check_history(workers)
    check_losses(alone, workers[:2])
    assert workers[0].events("recovered")[1]["steps_lost"] == 0


def test_an_island_starts_again_and_takes_its_state(start_job, alone):
    job = start_job(4, max_grad_norm=CLIP, join_interval=1)
    job.open_gate(6)
    fault = Fault("exchange", step=DIES_IN)
    workers = [
        *start_island(job, "a", gated=True),
        *start_island(job, "b", (0, fault), (1, fault), gated=True),
    ]
    assert {*join(workers[2:])} <= LOST
    for each in workers[:2]:
        each.wait_for("gate", step=6)
    again = start_island(job, "b", gated=True)
    job.take_in(*again, until=10)
    assert join([alone, *workers[:2], *again]) == [0] * 5
    check_history([*workers, *again], away=["b0", "b1"])
    check_losses(alone, workers[:2])
