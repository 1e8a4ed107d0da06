"""Scripts that evaluate between steps in islands: no process waits in FSDP2 for a neighbour that recovers."""

import pytest

from support.island_scripts import script
from support.islands import start_island


def losses(worker):
    return {event["step"]: event["loss"] for event in worker.events("commit")}


def join(workers):
    return [each.join() for each in workers]


def test_a_result_of_a_vote_that_one_process_has_not_heard(start_job):
    alone = start_job(1).start("x", **script("evaluates"))
    job = start_job(4)
    workers = [each for name in "ab" for each in start_island(job, name, **script("unheard"))]
    assert join([alone, *workers]) == [0] * 5
    assert losses(workers[2]) == pytest.approx(losses(alone), rel=1e-5)
    for pair in (workers[:2], workers[2:]):  # an island evaluates as one
        assert len({len(each.events("evaluated")) for each in pair}) == 1


@pytest.mark.parametrize("way", ["fsdp", "cp", "fsdp and tp"])
@pytest.mark.few(2)
def test_an_evaluation_is_that_of_one_process(start_job, way):
    alone = start_job(1).start("x", **script("evaluates"))
    job = start_job(1)
    workers = start_island(job, "a", way=way, session={"replication": 1}, **script("evaluates"))
    assert join([alone, *workers]) == [0] * (1 + len(workers))
    (expected,) = alone.events("evaluated")
    for each in workers:
        (event,) = each.events("evaluated")
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_an_island_that_joins_has_not_kept_weights_of_an_earlier_forward(start_job):
    alone = start_job(1).start("x", **script("none"))
    job = start_job(2, join_interval=1, replication=1)
    job.open_gate(3)
    first = start_island(job, "a", gated=True, **script("none"))
    for each in first:
        each.wait_for("gate", step=3)
    joiners = start_island(job, "b", gated=True, **script("early"))
    job.take_in(*joiners, until=10)
    assert join([alone, *first, *joiners]) == [0] * 5
    assert losses(first[0]) == pytest.approx(losses(alone), rel=1e-5)
