"""Pipelines whose versions travel as steps, which keepers repeat (MoEtion's Algorithm 3), in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from support.pipelines import RANKS, Pipeline, run_undisturbed
from support.replay_faults import FAULT

STEPS = 9
COMMON = {"attempts": "means", "steps": STEPS, "schedules_rate": True}
SHAPES = {"2 x 2": {"stages": 2, "peers": 2}, "4 x 1": {"stages": 4, "peers": 1}}
EXPERTS, EXPERT_BYTES = 5, 73_732
LOOP_BYTES = 18_000
"""State of the training loop, which travels as it is, at most."""


def options_of(shape, **copies):
    """One node more than a stage's own keeps each unit."""
    copies = {
        "preset": "moetion",
        "replication": SHAPES[shape]["peers"] + 1,
        "max_grad_norm": 0.5,
        "replay": True,
    } | copies
    return COMMON | SHAPES[shape] | {"copies": copies}


@pytest.fixture(scope="module", params=SHAPES)
def undisturbed(request, tmp_path_factory):
    """A shape, and what ranks say at the end of a run in which nothing happens."""
    done, _ = run_undisturbed(tmp_path_factory.mktemp("undisturbed"), **options_of(request.param))
    return request.param, done


def check(pipeline, expected):
    """All bits are those of the undisturbed run, and all copies those of their trainers."""
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    return done


def damaged(pipeline):
    """Steps of the versions that were not repeated, by rank."""
    return {each.options.rank: {event["step"] for event in each.events("damaged")} for each in pipeline.ranks}


@pytest.mark.few(1)
def test_each_version_but_the_first_travels_as_a_step(undisturbed, tmp_path):
    shape, done = undisturbed
    plain, _ = run_undisturbed(tmp_path, **options_of(shape, replay=False))
    assert [each["weights"] for each in done] == [each["weights"] for each in plain]
    assert [each["different"] for each in done] == [[]] * RANKS
    for each in done:
        first, *others = (each["sent"][str(step)] for step in range(STEPS + 1))
        assert len({*others}) == 1, "no state was asked for"
        assert others[0] < 0.35 * first + LOOP_BYTES
    stage_bytes = done[0]["state_bytes"] * SHAPES[shape]["stages"]
    assert sum(each["sent"]["0"] for each in done) >= stage_bytes, "first the state"
    assert sum(each["sent"]["5"] for each in done) <= sum(each["sent"]["5"] for each in plain) / 2


@pytest.mark.parametrize("plan", [{"kill_in_step": 5}, {"kill_reduced": 5}, {"kill_in_copy": 5}], ids=str)
def test_a_stage_is_lost(start_job, undisturbed, plan):
    """All that hold its state: what is left are the keepers' copies, made from steps."""
    shape, expected = undisturbed
    pipeline = Pipeline(start_job(RANKS), **options_of(shape))
    lost = range(RANKS - SHAPES[shape]["peers"], RANKS)
    started = [pipeline.start(rank, **(plan if rank in lost else {})) for rank in range(RANKS)]
    for rank in lost:
        pipeline.lose(started[rank])
        pipeline.start(rank)
    check(pipeline, expected)
    assert {event["step"] for event in started[0].events("recovered")} <= {0, 4, 5}
    assert not any(damaged(pipeline).values())


@pytest.mark.long
def test_each_rank_is_lost_and_then_two_at_once(start_job, undisturbed):
    shape, expected = undisturbed
    pipeline = Pipeline(start_job(RANKS), **options_of(shape))
    plans = [{"kill_in_step": 2}, {"kill_reduced": 3}, {"kill_in_copy": 4}, {"kill_at": "vote 5"}]
    last = [pipeline.start(rank, **plan) for rank, plan in enumerate(plans)]
    pair = (0, 2)  # of two stages, of which neither keeps the other's copies in the longer pipeline
    pipeline.lose_each(last, pair, begun=7)
    check(pipeline, expected)
    assert not any(damaged(pipeline).values())


@pytest.mark.parametrize("fault", ["memory", "message", "head"])
def test_a_copy_that_is_not_its_trainers_gets_the_state(start_job, undisturbed, fault):
    """In the same version: nothing is repeated for it, and the next one travels as a step again."""
    shape, expected = undisturbed
    broken = {2: {FAULT: f"{fault} 4"}}
    pipeline = Pipeline(start_job(RANKS), environment=lambda rank: broken.get(rank, {}), **options_of(shape))
    started = [pipeline.start(rank) for rank in range(RANKS)]
    done = check(pipeline, expected)
    assert damaged(pipeline) == {0: set(), 1: set(), 2: {4}, 3: set()}
    assert "is replaced by its full state" in started[2].log()
    assert all(len(each.events("recovered")) == 1 for each in started)
    sent = {step: sum(each["sent"][str(step)] for each in done) for step in range(1, STEPS)}
    assert len({sent[step] for step in sent if step != 4}) == 1
    assert sent[4] > sent[3] + sum(each["state_bytes"] for each in done) / RANKS / 3


@pytest.mark.few(1)
def test_an_update_that_is_left_out_is_a_step_that_changes_nothing(start_job, undisturbed):
    shape, _ = undisturbed
    options = options_of(shape, on_nonfinite="skip", max_grad_norm=None) | {"poison": 4}
    pipeline = Pipeline(start_job(RANKS), **options)
    started = [pipeline.start(rank) for rank in range(RANKS)]
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    assert not any(damaged(pipeline).values())
    peers = SHAPES[shape]["peers"]
    assert all(done[rank]["weights"] == done[rank - rank % peers]["weights"] for rank in range(RANKS))
    assert all(np.isfinite(values).all() for values in pipeline.losses().values())
    assert all(len({each["sent"][str(step)] for step in range(1, STEPS)}) == 1 for each in done)
    assert started[0].events("step")[-1]["step"] == STEPS


@pytest.mark.few(1)
def test_where_steps_cannot_be_repeated_state_travels(start_job, undisturbed):
    shape, _ = undisturbed
    pipeline = Pipeline(start_job(RANKS), environment=lambda rank: {FAULT: "amsgrad"}, **options_of(shape))
    started = [pipeline.start(rank) for rank in range(RANKS)]
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    assert all(each["sent"]["5"] == each["sent"]["0"] for each in done)
    assert all(
        "are snapshots of the state, which take several times the bytes of gradients" in each.log() for each in started
    )


@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.long
def test_stages_of_several_virtual_ones(start_job, tmp_path, schedule):
    options = options_of("4 x 1") | {"schedule": schedule, "chunks": 2, "width": 48, "microbatches": 8}
    expected, _ = run_undisturbed(tmp_path, **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    started = [pipeline.start(rank, kill_in_step=4 if rank == 2 else None) for rank in range(RANKS)]
    pipeline.lose(started[2])
    pipeline.start(2)
    check(pipeline, expected)
    assert not any(damaged(pipeline).values())


def expert_options(shape, experts):
    """Room for this number of experts in each version."""
    room = {"expert_parallel": True, "remote_bytes_per_step": experts * EXPERT_BYTES, "replication": 2}
    return options_of(shape, **room) | {"experts": EXPERTS, "tells_experts": True, "rate": 1e-3}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long
def test_experts_that_are_divided_among_ranks(start_job, tmp_path, shape):
    """With room for all of them each travels as a step, and nothing is lost with a rank."""
    options = expert_options(shape, RANKS * EXPERTS)
    expected, _ = run_undisturbed(tmp_path, **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    plans = {3: {"kill_in_step": 2}, 0: {"kill_reduced": 4}, 1: {"kill_in_copy": 6}}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for rank in plans:
        pipeline.lose(started[rank])
        pipeline.start(rank)
    done = pipeline.finish()
    trained = [{name: value for name, value in each["digests"].items() if "_loop" not in name} for each in done]
    assert all(found.items() <= each["digests"].items() for found, each in zip(trained, expected, strict=True))
    assert [each["different"] for each in done] == [[]] * RANKS
    assert not any(damaged(pipeline).values())
    assert all(each["sent"]["7"] < each["sent"]["0"] / 2 for each in expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long
def test_experts_that_were_in_the_version_before_travel_as_steps_and_others_as_state(start_job, shape):
    """With room for 3 of all: which these are changes, and a lost rank's are older."""
    pipeline = Pipeline(start_job(RANKS), **expert_options(shape, 3))
    started = [pipeline.start(rank, kill_in_step=6 if rank == 3 else None) for rank in range(RANKS)]
    pipeline.lose(started[3])
    pipeline.start(3)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    assert not any(damaged(pipeline).values())
    assert started[0].events("recovered")[-1]["stale"]
