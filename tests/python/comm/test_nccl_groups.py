"""Groups whose members have a GPU each, connected by torch's NCCL, and its failures."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evermoe.comm import torch_groups
from evermoe.comm.group import Group, share_a_gpu
from evermoe.comm.nccl import check_environment
from evermoe.comm.pacer import Pacer
from evermoe.errors import PeerLost
from evermoe.profile.follower import StreamFollower
from support.harness import PATIENCE, wait_until
from support.ranks import run_ranks

LIMIT = timedelta(seconds=PATIENCE)


def on_own_gpu(group, folder, environment):
    """Return a group of the same members that also connects their GPUs."""
    os.environ |= environment[group.rank]
    found = Group()
    store = dist.FileStore(f"{folder}/nccl", group.size)
    found.rebuild(store, group.rank, group.size, torch.device("cuda", 0), LIMIT)
    assert found.nccl is not None
    return found


def collectives(group, folder, environment):
    found = on_own_gpu(group, folder, environment)
    assert not share_a_gpu(found, torch.device("cuda", 0))
    mine = torch.arange(3.0, device="cuda") + 10 * found.rank
    first, other = [1, 2][found.rank], [2, 1][found.rank]
    came = found.all_to_all(mine, [first, other], [first, other])
    total = found.all_reduce(mine.clone())
    assert found.wait_for_collectives()
    found.check_nccl()
    return {"sum": total.cpu(), "rows": found.all_gather(mine).cpu(), "came": came.cpu()}


@pytest.mark.gpu
def test_collectives_between_gpus(tmp_path, own_gpus):
    done = run_ranks(tmp_path, 2, collectives, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    for each in done:
        assert each["sum"].tolist() == [10.0, 12.0, 14.0]
        assert each["rows"].tolist() == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    assert [each["came"].tolist() for each in done] == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]


def paced(group, folder, environment):
    """Rank 1 begins a collective 0.2 s after rank 0, whose host has left it long before."""
    found = on_own_gpu(group, folder, environment)
    pacer, follower, idle = Pacer(), StreamFollower(), []
    total = torch.ones(1, device="cuda")
    found.all_reduce(total)  # connects
    pacer.on_idle = idle.append
    pacer.attach_group(found, follower)
    pacer.record_steps(1)
    pacer.begin_step()
    group.all_reduce(torch.zeros(1))
    if found.rank == 0:
        found.all_reduce(total)
        wait_until(lambda: idle == [False], "the stream has come to it")
        time.sleep(0.2)
        seen = [not pacer.may_begin(None, 0.0), idle == [False]]
        group.all_reduce(torch.zeros(1))
    else:
        group.all_reduce(torch.zeros(1))
        found.all_reduce(total)
        seen = []
    pacer.begin_step()  # perhaps before the follower has reported the end
    [step] = pacer.recorded_steps()
    [(name, since, until)] = step.busy
    follower.close()
    assert name == "all_reduce" and float(total) == 4.0
    return {"seen": seen, "is idle": idle[-1], "seconds": (until - since) / 1e9}


@pytest.mark.gpu
def test_a_collective_lasts_as_long_as_the_gpu_runs_it(tmp_path, own_gpus):
    early, late = run_ranks(tmp_path, 2, paced, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert early["seen"] == [True, True]
    assert early["is idle"] and late["is idle"]
    assert early["seconds"] > 0.19 > late["seconds"]


def silence(group, folder, environment):
    """Rank 1 begins no collective; rank 0 waits in a read of the result, as in a step, until the group is dropped."""
    found = on_own_gpu(group, folder, environment)
    found.all_reduce(torch.zeros(1, device="cuda"))  # connects
    torch.cuda.synchronize()
    if found.rank == 1:
        group.all_reduce(torch.zeros(1))  # until rank 0 has given up
        return {}
    total = torch.zeros(1, device="cuda")
    found.all_reduce(total)  # which puts it into a stream
    assert found.broken is None
    watch = threading.Timer(0.2, found.drop, ["rank 1 is silent"])
    watch.start()
    total.cpu()
    watch.join()
    assert not found.wait_for_collectives()
    with pytest.raises(PeerLost, match="rank 1 is silent"):
        found.check_nccl()
    group.all_reduce(torch.zeros(1))
    return {"ended": torch.ones(1)}


@pytest.mark.gpu
def test_a_read_of_a_result_that_a_silent_member_delays_ends_when_the_group_is_dropped(tmp_path, own_gpus):
    done = run_ranks(tmp_path, 2, silence, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert "ended" in done[0]


def reported(group, folder, environment):
    """Rank 1 ends its communicator; that of rank 0 reports it, as between machines."""
    os.environ["EVERMOE_TEST_NCCL"] = "reports"
    found = on_own_gpu(group, folder, environment)
    found.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    group.all_reduce(torch.zeros(1))
    if found.rank == 1:
        found.drop("it leaves")
        group.all_reduce(torch.zeros(1))
        return {}
    group.all_reduce(torch.zeros(1))
    total = torch.zeros(1, device="cuda")
    with pytest.raises(PeerLost, match=r"ncclAllReduce|ncclCommGetAsyncError"):
        found.all_reduce(total)  # which may notice it at once
        wait_until(found.nccl.failure, "NCCL has noticed")
        found.check_nccl()
    total.cpu()  # which the GPU would wait for still
    return {"ended": torch.ones(1)}


@pytest.mark.gpu
@pytest.mark.usefixtures("stands_in")
def test_a_loss_reported_by_nccl_fails_the_step(tmp_path, own_gpus):
    done = run_ranks(tmp_path, 2, reported, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert "ended" in done[0]


def failed_batch(group, folder, environment):
    """A batch of sends fails when torch's groups are aborted; groups created afterwards work."""
    os.environ |= environment[group.rank]
    torch_groups.keep_alive_after_nccl_failure()
    torch.cuda.set_device(0)
    found = torch.zeros(1)
    for attempt in range(2):
        store = dist.FileStore(f"{folder}/torch{attempt}", group.size)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=group.rank, world_size=group.size)
        peer, rows = 1 - group.rank, torch.ones(4, device="cuda")
        ops = [dist.P2POp(dist.isend, rows, peer), dist.P2POp(dist.irecv, torch.empty_like(rows), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        found = rows + group.rank
        dist.all_reduce(found)
        found = found.cpu()
        group.all_reduce(torch.zeros(1))
        if attempt == 0:
            torch_groups.interrupt_torch_groups()  # as the watch's thread does
            with pytest.raises(RuntimeError, match="abort"):
                dist.batch_isend_irecv(ops)
        torch_groups.end_torch_groups()
    return {"sum": found}


@pytest.mark.gpu
def test_a_failed_batch_blocks_nothing_later(tmp_path, own_gpus):
    done = run_ranks(tmp_path, 2, failed_batch, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert [each["sum"].tolist() for each in done] == [[3.0] * 4] * 2


@pytest.mark.parametrize(("before", "after"), [(None, "2"), ("1", "2"), ("0", "0"), ("2", "2"), ("3", "3")])
def test_nccl_failures_keep_the_process_alive_unless_a_user_has_set_otherwise(monkeypatch, before, after):
    """1 is what torchrun sets, and is torch's default: it would end the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    patience = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    monkeypatch.setenv(patience, "")
    monkeypatch.delenv(patience)
    torch_groups.keep_alive_after_nccl_failure()
    assert os.environ[name] == after
    assert int(os.environ[patience]) < 1000
    os.environ[patience] = "5000"
    torch_groups.keep_alive_after_nccl_failure()
    assert os.environ[patience] == "5000"


def test_memory_that_a_leaving_member_frees_under_others_is_refused(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for value in ("1", "-2"):
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
        check_environment()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    with pytest.raises(ValueError, match="NCCL_P2P_DISABLE=1"):
        check_environment()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    check_environment()
