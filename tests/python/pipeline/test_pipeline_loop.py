"""The loop of a pipeline's session: errors of the script, a rank that leaves, a job that is stopped, events."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evermoe.comm.torch_groups import is_group_error
from support.pipeline_worker import PEERS, STAGES, Options, Stage, batch
from support.pipelines import RANKS, Pipeline, run_undisturbed


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Final digests of a run in which nothing happens, by rank."""
    done, _ = run_undisturbed(tmp_path_factory.mktemp("uninterrupted"))
    return [each["digests"] for each in done]


def raised(error, cause=None):
    """An error as `except` has it."""
    try:
        raise error from cause
    except Exception as found:
        return found


def test_errors_of_torchs_groups_are_told_from_those_of_a_script(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError) as caught:
            dist.distributed_c10d._get_default_group().recv([torch.empty(1)], 0, 7).wait(timedelta(milliseconds=1))
        assert is_group_error(raised(RuntimeError("Failed to run stage forward"), caught.value))
    finally:
        dist.destroy_process_group()
    assert is_group_error(dist.DistBackendError("NCCL error"))
    assert not is_group_error(raised(RuntimeError("shapes cannot be multiplied"), ValueError("gloo/")))


def first_step_alone():
    """Loss and norm of the gradient of the first step when one process computes it."""
    width = Options.width
    model = torch.nn.Sequential(*(Stage(number, width, 0) for number in range(STAGES)))
    inputs, target = torch.cat([batch(0, peer, width) for peer in range(PEERS)], 1)
    loss = torch.nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()


def test_an_error_of_the_script_itself_is_raised_and_not_repeated(start_job, uninterrupted):
    """Torch's groups fail with a RuntimeError, too. The others wait for another process, and lose no step."""
    pipeline = Pipeline(start_job(RANKS))
    ranks = [pipeline.start(rank, raises=4 if rank == 1 else None) for rank in range(RANKS)]
    assert ranks[1].join() == 1
    assert "RuntimeError: the script itself has failed" in ranks[1].log()
    assert not ranks[1].events("connection_lost")
    pipeline.start(1)
    done = [(pipeline.ranks[-1] if rank == 1 else ranks[rank]).wait_for("done") for rank in range(RANKS)]
    assert [each["digests"] for each in done] == uninterrupted
    assert [each["step"] for each in ranks[0].events("recovered")] == [0, 4]


@pytest.mark.long
def test_a_rank_that_leaves_on_a_signal_repeats_no_step(start_job, uninterrupted):
    pipeline = Pipeline(start_job(RANKS))
    ranks = [pipeline.start(rank) for rank in range(RANKS)]
    ranks[2].wait_for("step", step=3)
    ranks[2].signal(signal.SIGTERM)
    assert ranks[2].join() == 143
    pipeline.start(2)
    done = [(pipeline.ranks[-1] if rank == 2 else ranks[rank]).wait_for("done") for rank in range(RANKS)]
    assert [each["digests"] for each in done] == uninterrupted
    lost, recovered = ranks[0].events("member_lost"), ranks[0].events("recovered")[-1]
    assert [each["kind"] for each in lost] == ["left"]
    assert (recovered["steps_undone"], recovered["failure"]) == (0, "left")


@pytest.mark.long
def test_ranks_send_the_events_of_a_session_until_one_stops_the_job_on_all(start_job):
    """Each step once, with the norm of one process; a commit comes with the next vote."""
    pipeline = Pipeline(start_job(RANKS))
    for rank in range(RANKS):
        pipeline.start(rank, stops=2 if rank == 3 else None)
    done = pipeline.finish()
    assert {each["step"] for each in done} == {3}
    expected = first_step_alone()
    names = ["begin", "reduce", "confirm", "vote", "update", "copy", "measured"]
    start = [*["phase"] * 4, "joined", "copy", "confirm", "recovered"]
    for each in pipeline.ranks:
        other = ("protocol", "chunk_sent", "losses", "step", "done", "damaged")
        found = [event["event"] for event in each.events() if event["event"] not in other]
        after = [*names[:4], "commit", *names[4:]]
        assert found == [*start, *names, *after, *after, "commit", "verified"], found
        commits = each.events("commit")
        assert [event["step"] for event in commits] == [0, 1, 2]
        assert (commits[0]["loss"], commits[0]["grad_norm"]) == pytest.approx(expected, rel=1e-4)
