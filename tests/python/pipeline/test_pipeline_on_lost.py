"""Ranks of a pipeline that are lost: the hook asks for others while those that are left wait for them."""

from __future__ import annotations

import pytest

from support.harness import wait_until
from support.hooks import NOTE, calls, given
from support.pipelines import PRESETS, RANKS, Pipeline


def start(start_job, **plans):
    """All ranks with a hook that notes its calls."""
    job = start_job(RANKS)
    copies = PRESETS["baft"] | {"on_lost": NOTE.format(folder=job.folder)}
    pipeline = Pipeline(job, copies=copies, attempts="means")
    for rank in range(RANKS):
        pipeline.start(rank, **plans.get(f"r{rank}", {}))
    return pipeline


def wait_for_calls(pipeline, count):
    folder = pipeline.job.folder
    return wait_until(lambda: len(calls(folder)) >= count and calls(folder), f"{count} calls")


def said(rank, event):
    """Events of one kind that a rank's protocol got."""
    return [each for each in rank.events("protocol") if each["said"].get("event") == event]


def test_the_hook_is_called_once_before_another_process_comes(start_job):
    pipeline = start(start_job, r3={"kill_in_step": 4})
    pipeline.lose(pipeline.ranks[3])
    (call,) = wait_for_calls(pipeline, 1)
    pipeline.start(3)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    assert calls(pipeline.job.folder) == [call], "once in the job"
    first, *others = (each for each in pipeline.ranks if each.process.exitcode == 0)
    assert call.pid == first.pid
    (gone,) = first.events("member_lost")
    told = given(pipeline.job.folder, call)
    assert told == {name: gone[name] for name in told}
    about = ("job", "node", "domain", "role", "kind", "step", "members", "wanted", "attempt")
    assert [told[name] for name in about] == [pipeline.job.name, "n3", "", "train", "process", 4, 3, RANKS, 1]
    for each in others:
        assert [event["key"] for event in each.events("member_lost")] == [call.key]


@pytest.mark.long
def test_a_rank_that_is_slow_to_recover_is_not_lost(start_job, tmp_path):
    pipeline = start(start_job, r1={"lingers": str(tmp_path / "go")}, r3={"kill_in_step": 4})
    pipeline.lose(pipeline.ranks[3])
    (call,) = wait_for_calls(pipeline, 1)
    before = len(said(pipeline.ranks[0], "waited"))
    wait_until(lambda: len(said(pipeline.ranks[0], "waited")) > before + 10, "rank 0 has looked on")
    (tmp_path / "go").touch()
    pipeline.start(3)
    pipeline.finish()
    assert calls(pipeline.job.folder) == [call]
    assert call.key.startswith("n3-")


@pytest.mark.long
def test_the_next_rank_calls_again_if_the_caller_is_lost_while_all_wait(start_job):
    pipeline = start(start_job, r3={"kill_in_step": 4})
    pipeline.lose(pipeline.ranks[3])
    (first,) = wait_for_calls(pipeline, 1)
    wait_until(lambda: said(pipeline.ranks[1], "waited"), "rank 1 knows the loss")
    pipeline.ranks[0].process.kill()
    pipeline.lose(pipeline.ranks[0])
    found = wait_for_calls(pipeline, 3)
    assert {each.pid for each in found[1:]} == {pipeline.ranks[1].pid}
    assert sorted((each.key[:3], each.attempt) for each in found) == [("n0-", 1), ("n3-", 1), ("n3-", 2)]
    assert first.key in [each.key for each in found[1:]]
    for rank in (0, 3):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    assert len(calls(pipeline.job.folder)) == 3
