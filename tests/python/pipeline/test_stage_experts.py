"""Experts that the ranks of a stage divide among them, in real processes."""

from __future__ import annotations

import pytest

from support.pipeline_worker import MICROBATCHES
from support.pipelines import PRESETS, RANKS, Pipeline, check_same_bits, losses, run_undisturbed

STEPS, EXPERTS = 9, 5
COMMON = {"attempts": "means", "dropout": 0.1, "steps": STEPS, "rate": 1e-3, "experts": EXPERTS}
UNDIVIDED = {"expert_parallel": False}
WAYS = {
    "1F1B": COMMON | {"parts": 2, "copies": PRESETS["baft"] | {"expert_parallel": True, "max_grad_norm": 0.5}},
    "interleaved": COMMON
    | {
        "chunks": 2,
        "copies": PRESETS["moetion"] | {"replication": 2, "expert_parallel": True, "expert_selection": "all"},
    },
}


@pytest.fixture(scope="module", params=WAYS)
def undisturbed(request, tmp_path_factory):
    """A way, and the end of a run in it."""
    return request.param, *run_undisturbed(tmp_path_factory.mktemp("undisturbed"), **WAYS[request.param])


@pytest.mark.few(1)
def test_each_rank_holds_its_experts_and_computes_what_one_with_all_would(undisturbed, tmp_path):
    way, done, steps = undisturbed
    options = WAYS[way]
    undivided, expected = run_undisturbed(tmp_path, **options | {"copies": options["copies"] | UNDIVIDED})
    for found, exact in zip(losses(steps), losses(expected), strict=True):
        assert found == pytest.approx(exact, rel=1e-5)
    for found, exact in zip(losses(steps, "squares"), losses(expected, "squares"), strict=True):
        assert found == pytest.approx(exact, rel=1e-4), "a gradient's norm, for clipping"
    for stage in range(2):
        peers = done[2 * stage : 2 * stage + 2]
        own = [{name for name in each["digests"] if "experts" in name} for each in peers]
        chunks = options.get("chunks", 1)
        assert [len(each) for each in own] == [2 * chunks, 3 * chunks]
        assert not own[0] & own[1]
        dense = [{name: value for name, value in each["digests"].items() if "experts" not in name} for each in peers]
        assert dense[0] == dense[1]
    assert [each["different"] for each in (*done, *undivided)] == [[]] * 2 * RANKS


@pytest.mark.parametrize("plan", [{"kill_in_step": 4}, {"kill_reduced": 4}, {"kill_in_copy": 4}], ids=str)
def test_only_the_lost_ranks_stage_computes_again(start_job, undisturbed, plan):
    way, _, _ = undisturbed
    pipeline = Pipeline(start_job(RANKS), **WAYS[way])
    common = {"tells_forwards": way == "1F1B"}
    started = [pipeline.start(rank, **common | (plan if rank == 3 else {})) for rank in range(RANKS)]
    pipeline.lose(started[3])
    pipeline.start(3)
    done = check_same_bits(pipeline, undisturbed)
    once = MICROBATCHES * STEPS * WAYS[way].get("parts", 1) * WAYS[way].get("chunks", 1)
    assert [each["forwards"] for each in done[:2]] == [once] * 2
    assert done[2]["forwards"] > once
    assert [event["step"] for event in started[0].events("recovered")] in ([0, 3], [0, 4])


@pytest.mark.long
def test_the_loss_of_any_rank_leaves_the_same_bits(start_job, undisturbed):
    """One after the other: in a forward, with sums of gradients, in copies, in a forward again."""
    plans = {3: {"kill_in_step": 2}, 0: {"kill_reduced": 4}, 1: {"kill_in_copy": 6}, 2: {"kill_in_step": 8}}
    pipeline = Pipeline(start_job(RANKS), **WAYS[undisturbed[0]])
    started = {rank: pipeline.start(rank, **plans[rank]) for rank in range(RANKS)}
    for rank in plans:
        pipeline.lose(started[rank])
        pipeline.start(rank)
    check_same_bits(pipeline, undisturbed)
