"""Groups of `torch.distributed` whose ranks may be lost: time limits, and waits that end."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import evermoe
from evermoe.comm import torch_groups
from support.harness import PATIENCE


def test_groups_have_the_given_limit():
    default = dist.constants.default_pg_timeout
    store = torch_groups.WatchedStore(dist.HashStore(), threading.Event(), timedelta(seconds=7))
    try:
        with torch_groups.quick_groups(timedelta(seconds=7), threading.Event()):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            longer = dist.new_group([0], timeout=timedelta(seconds=70))
        later = dist.new_group([0])
        groups = (dist.group.WORLD, longer, later)
        limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        assert limits == [timedelta(seconds=7), timedelta(seconds=70), default]
    finally:
        torch_groups.end_torch_groups()


def test_a_stage_waits_for_the_next_one_as_long_as_the_limit_allows():
    """Gloo keeps the timeout with which it connects for sends and receives."""
    limit, store, lost = timedelta(seconds=5), dist.HashStore(), threading.Event()
    watched = torch_groups.WatchedStore(store, lost, limit)
    with torch_groups.quick_groups(limit, lost), ThreadPoolExecutor(2) as pool:
        connect = functools.partial(dist.distributed_c10d.ProcessGroupGloo, watched, timeout=limit)
        first, second = pool.map(lambda rank: connect(rank=rank, size=2), range(2))
    received = torch.zeros(1)
    work = first.recv([received], 1, 0)
    timer = threading.Timer(2, second.send, ([torch.ones(1)], 0, 0))
    timer.start()
    work.wait()
    timer.join()
    assert received == 1


def test_a_rank_lost_while_gloo_connects_ends_the_wait():
    store, lost = dist.HashStore(), threading.Event()
    watched = torch_groups.WatchedStore(store, lost, timedelta(seconds=PATIENCE))
    store.set("rank 1", "is here")
    threading.Timer(0.1, lost.set).start()
    with (
        torch_groups.quick_groups(timedelta(seconds=PATIENCE), lost),
        pytest.raises(evermoe.errors.PeerLost, match="a rank is lost"),
    ):
        dist.distributed_c10d.ProcessGroupGloo(watched, 0, 2, timeout=timedelta(seconds=PATIENCE))


def test_a_wait_in_a_store_ends():
    """It ends when the key exists, when a rank is lost, or at the limit, even if a longer wait was requested."""
    lost, store = threading.Event(), dist.HashStore()
    patient = torch_groups.WatchedStore(store, lost, timedelta(seconds=PATIENCE))
    threading.Timer(0.1, store.set, ("late", "value")).start()
    assert patient.get("late") == b"value"
    hasty = torch_groups.WatchedStore(store, lost, timedelta(seconds=0.1))
    with pytest.raises(evermoe.errors.PeerLost, match="nothing from some rank"):
        hasty.wait(["never"], timedelta(seconds=2 * PATIENCE))
    threading.Timer(0.1, lost.set).start()
    with pytest.raises(evermoe.errors.PeerLost, match="a rank is lost"):
        patient.wait(["never"])
