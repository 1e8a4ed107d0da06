"""Windows of a pipeline, which a loss does not forget: real processes."""

from __future__ import annotations

import pytest

from support.pipelines import PRESETS, RANKS, Pipeline

DEEP = {"stages": RANKS, "peers": 1}


@pytest.mark.parametrize("shape", [{}, DEEP], ids=["2 x 2", "4 x 1"])
@pytest.mark.long
def test_a_loss_leaves_all_ranks_the_windows_of_before(start_job, shape):
    """A newcomer's are those of its predecessor, which the others remember; also where it is lost again at once."""
    copies = PRESETS["baft"] | {"profile_steps": 4, "copy_buffer_bytes": 1 << 12, "snapshot_interval": 1}
    pipeline = Pipeline(start_job(RANKS), **shape, steps=13, work=4, copies=copies)
    started = [pipeline.start(rank, kill_in_step=9 if rank == 2 else None) for rank in range(RANKS)]
    pipeline.lose(started[2])
    second = pipeline.start(2, kill_in_step=10)
    pipeline.lose(second)
    third = pipeline.start(2)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    for newcomer in (second, third):
        first = newcomer.events("step")[0]
        assert first["plans"] == 1
        assert first["summary"] == {e["step"]: e["summary"] for e in started[0].events("step")}[first["step"]]
        assert set(newcomer.events("step")[-1]["sent"]) <= {"window", "vote", "recovery"}, "windows are always known"
    for survivor in (started[0], started[1], started[3]):
        events = [each for each in survivor.events() if each["event"] in ("step", "recovered")][1:]
        losses = [place for place, event in enumerate(events) if event["event"] == "recovered"]
        assert len(losses) == 2
        assert [events[at + 1]["plans"] - events[at - 1]["plans"] for at in losses] == [1, 1]
        idle = [event["sent"].get("idle", 0) for event in (events[losses[0] - 1], events[-1])]
        assert idle[0] == idle[1], "since then no message went at any time"
    assert sum(each.events("step")[-1]["sent"].get("window", 0) for each in (third, *started[:2])) > 0
