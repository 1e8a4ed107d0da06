"""After a failure only the ranks that lost their state compute again; the others send again what they have logged."""

from __future__ import annotations

import pytest

from support.pipeline_worker import MICROBATCHES
from support.pipelines import BORDER_BYTES, RANKS, Pipeline, run_undisturbed

STEPS = 9
COMMON = {"attempts": "means", "dropout": 0.1, "steps": STEPS, "rate": 1e-3, "schedules_rate": True}
WAYS = {"1F1B": {"parts": 2, "copies": {"max_grad_norm": 0.5}}, "interleaved": {"chunks": 2}}


@pytest.fixture(scope="module", params=WAYS)
def undisturbed(request, tmp_path_factory):
    """A way, and the end of a run in it."""
    return request.param, *run_undisturbed(tmp_path_factory.mktemp("undisturbed"), **COMMON | WAYS[request.param])


def passes(done):
    """Forwards and backwards that a process has computed."""
    return done["forwards"], done["backwards"]


def share(done, steps):
    """Of those of all steps."""
    return tuple(each * steps // STEPS for each in passes(done))


def recovered_at(worker):
    return [event["step"] for event in worker.events("recovered")]


def check_log(way, steps_R):
    """The log of each rank of an undisturbed run has two steps at most."""
    runs, borders = (2, (1, 1)) if way == "1F1B" else (1, (3, 3))  # between four virtual stages, two on each rank
    for rank, events in enumerate(steps_R):
        each = runs * borders[rank // 2] * BORDER_BYTES
        assert {event["logged"] for event in events} <= {each, 2 * each}


@pytest.mark.few(1)
def test_those_that_live_compute_nothing_again(start_job, undisturbed):
    """A rank dies within a step; one when its peer has the sums of gradients; all of a stage, in their copies.

    After the last of these the others have a newer state than the copies of the stage that is lost.
    """
    way, expected, steps_R = undisturbed
    check_log(way, steps_R)
    order = [*range(RANKS)] if way == "1F1B" else [*reversed(range(RANKS))]  # another stage is lost
    pipeline = Pipeline(start_job(RANKS), **COMMON | WAYS[way])
    plans = {0: {"kill_reduced": 4}, 1: {"kill_in_copy": 7, "kill_with": order[0]}, 2: {}, 3: {"kill_in_step": 2}}
    first = [pipeline.start(order[place], **plan) for place, plan in plans.items()]
    pipeline.lose(first[3])
    last = {3: pipeline.start(order[3])}
    pipeline.lose(first[0])
    second = pipeline.start(order[0], kill_in_copy=7, kill_with=order[1])
    for each in (second, first[1]):
        pipeline.lose(each)
    last |= {0: pipeline.start(order[0]), 1: pipeline.start(order[1])}
    done = pipeline.finish()

    assert recovered_at(first[2]) == [0, 2, 4, 6]
    assert recovered_at(last[3]) == [2, 4, 6]
    assert recovered_at(last[0]) == recovered_at(last[1]) == [6]
    for place, steps in ((2, STEPS), (3, STEPS - 2), (0, STEPS - 6), (1, STEPS - 6)):
        assert passes(done[order[place]]) == share(expected[order[place]], steps)
        assert done[order[place]]["computed"] == done[order[place]]["forwards"]
        assert (done[order[place]]["resent"] > 0) == (place in (2, 3))
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    assert [each["rate"] for each in done] == [pytest.approx(1e-3 * 0.8**STEPS)] * RANKS


@pytest.mark.long
def test_without_it_all_ranks_compute_the_step_again(start_job, tmp_path):
    pipeline = Pipeline(start_job(RANKS), **COMMON | {"copies": {"localised": False}})
    started = [pipeline.start(rank, kill_reduced=2 if rank == 0 else None) for rank in range(RANKS)]
    pipeline.lose(started[0])
    pipeline.start(0)
    done = pipeline.finish()
    assert [passes(each) for each in done[1:]] == [(MICROBATCHES * (STEPS + 1),) * 2] * 3
    assert {event["logged"] for each in pipeline.ranks for event in each.events("step")} == {0}


@pytest.mark.long
def test_other_data_than_before_is_noticed(start_job):
    """A newcomer that gives its stage other batches: all ranks compute the step again, with the same batches."""
    pipeline = Pipeline(start_job(RANKS), **COMMON)
    # In the third microbatch it has a gradient of the first: the next stage has computed that.
    started = [
        pipeline.start(rank, **({"kill_in_step": 3, "kill_microbatch": 2} if rank == 0 else {}))
        for rank in range(RANKS)
    ]
    pipeline.lose(started[0])
    pipeline.start(0, noise=1.0)
    done = pipeline.finish()
    assert any(
        "microbatch 0 at stage 1 has other bits than before" in str(each.events("connection_lost"))
        for each in started[1:]
    )
    assert all("all ranks compute the step again" in each.log() for each in started[1:])
    assert recovered_at(started[1]) == [0, 3, 3]
    assert [each["different"] for each in done] == [[]] * RANKS
    assert done[0]["digests"] == done[1]["digests"]
