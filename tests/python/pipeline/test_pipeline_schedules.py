"""Each schedule of `torch.distributed.pipelining` in a `PipelineSession`: any one rank dies, and two at once."""

from __future__ import annotations

import pytest

from support.pipelines import RANKS, Pipeline, run_undisturbed

STEPS = 8
SCHEDULES = {
    "Schedule1F1B": 1,
    "ScheduleGPipe": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""Virtual stages on each rank."""
SHAPES = {"2 x 2": (2, 2), "4 x 1": (4, 1)}
TOGETHER = {"2 x 2": (2, 3), "4 x 1": (1, 3)}
"""Ranks that die at once: all of a stage, or two stages of which neither keeps the other's copies."""


def options_of(schedule, shape):
    stages, peers = SHAPES[shape]
    options = {"schedule": schedule, "chunks": SCHEDULES[schedule], "stages": stages, "peers": peers, "width": 48}
    return options | {"attempts": "means", "dropout": 0.1, "steps": STEPS, "microbatches": 8, "rate": 1e-3}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.long
def test_digests_are_those_of_an_undisturbed_run(start_job, tmp_path, schedule, shape):
    """Each rank dies once in a step, one after the other; then two of them die in the same step."""
    options = options_of(schedule, shape)
    (tmp_path / "undisturbed").mkdir()
    expected, _ = run_undisturbed(tmp_path / "undisturbed", **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    pair = TOGETHER[shape]
    last = [pipeline.start(rank, kill_in_step=1 + rank) for rank in range(RANKS)]
    pipeline.lose_each(last, pair, begun=6)
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    for rank in set(range(RANKS)) - set(pair):  # what they have computed once is never computed again
        steps = STEPS - last[rank].events("recovered")[0]["step"]
        assert done[rank]["forwards"] == expected[rank]["forwards"] * steps // STEPS
