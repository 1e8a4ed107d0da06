"""Pipelines whose stages are on a GPU: one that all ranks share, where gloo takes the place of NCCL, or one each."""

from __future__ import annotations

import ctypes
import signal
import threading

import pytest
import torch

from evermoe.pipeline.host_copy import BorderDigest, HostCopy, on_device, to_host
from evermoe.profile.follower import StreamFollower
from support import stand_in
from support.harness import wait_until
from support.pipeline_worker import MICROBATCHES, ROWS
from support.pipelines import RANKS, Pipeline, has_voted, run_undisturbed

STEPS = 6
COMMON = {"attempts": "means", "dropout": 0.1, "steps": STEPS, "rate": 1e-3, "schedules_rate": True}
WAYS = {
    "1F1B": {"parts": 2, "copies": {"max_grad_norm": 0.5}},
    "zero-bubble": {"schedule": "ScheduleInterleavedZeroBubble", "chunks": 2},
    "snapshots on the GPU": {"copies": {"snapshot_memory": "gpu"}},
    "sparse": {"copies": {"sparse": True, "snapshot_interval": 2}},
    "steps in place of state": {
        "copies": {"preset": "moetion", "replication": 3, "max_grad_norm": 0.5, "replay": True}
    },
    "experts": {"experts": 4, "copies": {"expert_parallel": True, "preset": "moetion", "expert_selection": "all"}},
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_stage_computes_again_and_the_others_send_from_their_log(start_job, tmp_path, cuda, way):
    """The second rank has a log once the lost rank has its activations. With experts the first two ranks use theirs
    only if both have the same, as they do when all ranks vote."""
    divides_experts = way == "experts"
    expected, done = lose_a_stage(start_job, tmp_path, in_vote=divides_experts, device=str(cuda), **WAYS[way])
    assert done[1]["resent"] > 0
    assert done[0]["resent"] == done[1]["resent"] or not divides_experts
    assert [each["forwards"] for each in done[: RANKS // 2]] == [each["forwards"] for each in expected[: RANKS // 2]]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_with_a_gpu_each_all_compute_the_step_under_way_again(start_job, tmp_path, own_gpus, way):
    """NCCL may have left half of the work when it was aborted, and no rank can know."""
    expected, done = lose_a_stage(start_job, tmp_path, device="cuda", environment=own_gpus, **WAYS[way])
    for each, undisturbed in zip(done[: RANKS // 2], expected[: RANKS // 2], strict=True):
        assert undisturbed["forwards"] < each["forwards"] <= undisturbed["forwards"] * (1 + 1 / STEPS)


def lose_a_stage(start_job, folder, in_vote=False, **options):
    """Lose the last rank in step 3: in its second microbatch, or once all ranks vote."""
    options |= COMMON
    expected, _ = run_undisturbed(folder, **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    end = {"stop_at": "vote 3"} if in_vote else {"kill_in_step": 3}
    started = [pipeline.start(rank, **(end if rank == RANKS - 1 else {})) for rank in range(RANKS)]
    if in_vote:
        for each in started:
            wait_until(lambda each=each: has_voted(each, 3), f"{each.name} votes")
        started[-1].signal(signal.SIGKILL)
    pipeline.lose(started[-1])
    pipeline.start(RANKS - 1)
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    return expected, done


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_experts_that_a_budget_leaves_out_lose_tokens_that_are_counted(start_job, cuda):
    copies = {"expert_parallel": True, "preset": "moetion", "remote_bytes_per_step": 3 << 16}
    options = COMMON | {"experts": 4, "copies": copies, "device": str(cuda)}
    pipeline = Pipeline(start_job(RANKS), **options)
    started = [pipeline.start(rank, **({"kill_reduced": 4} if rank == RANKS - 1 else {})) for rank in range(RANKS)]
    pipeline.lose(started[-1])
    pipeline.start(RANKS - 1)
    done = pipeline.finish()
    recovered = started[0].events("recovered")[-1]
    assert (recovered["step"], recovered["steps_undone"]) == (4, 0)
    assert recovered["stale"].keys() == recovered["lost_tokens"].keys() <= {f"stage1.0.moe.experts.{e}" for e in (2, 3)}
    assert any(recovered["lost_tokens"].values())
    assert [done[rank]["tokens"] for rank in (0, 2)] == [done[rank]["tokens"] for rank in (1, 3)]
    routed = 2 * 2 * MICROBATCHES * ROWS * STEPS  # by two ranks, to two experts each
    assert [sum(map(sum, each["tokens"])) for each in done] == [routed] * RANKS
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.gpu
def test_what_is_kept_on_the_host_is_what_the_stream_had_written(cuda):
    """It is written after the copy was asked for, and its memory is given back at once."""
    tensor = torch.zeros(1 << 16, device=cuda)
    torch.cuda._sleep(10_000_000)
    tensor += torch.arange(1 << 16, device=cuda)
    kept = to_host({"sent": (tensor, None), "loss": torch.ones(1)})
    del tensor
    others = [torch.full((1 << 16,), -1.0, device=cuda) for _ in range(4)]
    assert isinstance(kept["sent"][0], HostCopy)
    assert kept["sent"][0].data.is_pinned()
    found = on_device(kept)
    assert found["sent"][0].device == cuda
    assert torch.equal(found["sent"][0].cpu(), torch.arange(1.0 * (1 << 16)))
    assert found["sent"][1] is None
    assert all(float(each.sum()) == -(1 << 16) for each in others)


@pytest.mark.gpu
def test_what_is_kept_on_the_host_comes_back_once_it_is_there(cuda):
    tensor = torch.zeros(1 << 16, device=cuda)
    torch.cuda._sleep(10_000_000)
    tensor += 3.0
    assert float(on_device(to_host(tensor)).sum()) == 3 << 16


@pytest.mark.parametrize("size", [0, 5, 1024, 1030, 5000])
def test_digests_tell_whether_bits_are_the_same(device, size):
    tensor = torch.arange(1.0 * size, device=device)
    found = BorderDigest([tensor, torch.ones(3)])
    assert found == BorderDigest([tensor.clone(), torch.ones(3)])
    assert found != BorderDigest([tensor.clone(), torch.zeros(3)])
    assert found != BorderDigest([torch.arange(1.0 * size + 1, device=device), torch.ones(3)])
    for place in {0, size // 2, size - 1} if size else ():
        other = tensor.clone()
        other[place] += 1
        assert found != BorderDigest([other, torch.ones(3)])
    assert BorderDigest([tensor[1:]]) == BorderDigest([tensor[1:].clone()]), "an address that is not aligned"


@pytest.mark.gpu
def test_transfers_are_told_of_in_order_when_streams_have_reached_them(cuda):
    follower, told, is_told = StreamFollower(), [], threading.Event()
    events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)]
    torch.cuda._sleep(10_000_000)
    for number, event in enumerate(events):
        event.record()
        follower.follow(event, lambda at, number=number, event=event: told.append((number, at, event.query())))
    follower.follow(events[-1], lambda at: is_told.set())
    assert is_told.wait(60)
    follower.close()
    assert [(number, is_reached) for number, _, is_reached in told] == [(0, True), (1, True), (2, True)]
    assert [at for _, at, _ in told] == sorted(at for _, at, _ in told)


@pytest.mark.gpu
def test_a_stream_is_captured_while_another_is_told_of(cuda):
    """In the mode in which torch captures, an unsafe call of any thread spoils what is captured."""
    driver = stand_in.DRIVER or ctypes.CDLL("libcuda.so.1")
    captured, followed = torch.cuda.Stream(), torch.cuda.Stream()
    event, graph, is_told = torch.cuda.Event(blocking=True), ctypes.c_void_p(), threading.Event()
    event.record(followed)
    event.synchronize()  # all is loaded, and the event exists
    follower = StreamFollower()
    assert driver.cuStreamBeginCapture_v2(ctypes.c_void_p(captured.cuda_stream), 0) == 0
    event.record(followed)
    follower.follow(event, lambda at: is_told.set())
    was_told = is_told.wait(60)
    assert driver.cuStreamEndCapture(ctypes.c_void_p(captured.cuda_stream), ctypes.byref(graph)) == 0
    assert was_told and driver.cuGraphDestroy(graph) == 0
    follower.close()
