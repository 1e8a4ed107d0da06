"""Members that are lost while others launch, connect, or wait for their GPU: the others are back in Python at once.

The stand-in of NCCL aborts as reluctantly as NCCL does: tests/emulator/fake_nccl.cpp says for what it waits.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evermoe import _native
from evermoe.comm import torch_groups
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from support import stand_in
from support.harness import PATIENCE, wait_until
from support.ranks import run_ranks

LIMIT = timedelta(seconds=PATIENCE)
SOON = 10.0
"""Seconds from a drop to the error in Python, on a busy machine; some milliseconds on a quiet one."""
PAUSE = 0.05
"""Seconds from a collective to the drop: the others wait by then."""
THIS_THREAD = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"""
ROWS = 12
RANKS, TIMES = 4, 20
COLLECTIVES = {
    "all_reduce": lambda group, rows: group.all_reduce(rows),
    "all_gather": lambda group, rows: group.all_gather(rows),
    "all_to_all": lambda group, rows: group.all_to_all(rows, *[[len(rows) // group.size] * group.size] * 2),
}
STATES = ["waits", "connects", "queue is full", "graph is alive", "connects next to a graph", "behind another"]
DEATHS = {"one": [[1]], "two": [[1, 3]], "three": [[1, 2, 3]], "one after another": [[1], [3]]}


class Graph:
    """A CUDA graph of the work that a function launches on the current stream."""

    def __init__(self, launch):
        self._stream, graph = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_void_p()
        self._graph = ctypes.c_void_p()
        torch.cuda.synchronize()
        self._do("cuStreamBeginCapture_v2", self._stream, THIS_THREAD)
        launch()
        self._do("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._do("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), graph, ctypes.c_ulonglong(0))
        self._do("cuGraphDestroy", graph)

    def launch(self):
        self._do("cuGraphLaunch", self._graph, self._stream)

    def __del__(self):
        self._do("cuGraphExecDestroy", self._graph)

    def _do(self, name, *arguments):
        assert getattr(stand_in.DRIVER, name)(*arguments) == 0, name


def connect(groups, folder, number, rank, size):
    for name, group in groups.items():
        store = dist.FileStore(f"{folder}/{number}-{name}", size)
        group.rebuild(store, rank, size, torch.device("cuda", 0), LIMIT)


def data(group):
    return torch.arange(2.0 * ROWS, device="cuda").reshape(ROWS, 2) * (group.rank + 1)


def begin(state, call, groups):
    """Launch what ends only if all take part; return what must live on and what the host then waits for."""
    group, rows, kept = groups["first"], data(groups["first"]), []
    if "graph" in state:
        graph = Graph(lambda: kept.append(call(group, rows)))
        graph.launch()
        if state == "connects next to a graph":  # the abort lasts as long as the graph; the launch must not
            other = "all_reduce" if call is COLLECTIVES["all_to_all"] else "all_to_all"
            COLLECTIVES[other](group, rows)
        return [graph, *kept]
    kept.append(call(group, rows))
    if state == "behind another":
        kept.append(call(groups["second"], rows))
    if state == "queue is full":
        for _ in range(1500):
            torch.cuda._sleep(1)
    return kept


def lose(groups, folder, rank, state, call, rounds):
    """In each round some ranks do nothing, as if they were lost, and the others drop the group, as their watch does.

    Return the sums of those that are left, and the longest time from a drop to the error in Python.
    """
    group, alive, kept, slowest = groups["first"], list(range(RANKS)), [], 0.0
    for number, lost in enumerate(rounds):
        if rank not in alive:
            return None, 0.0, []
        connect(groups, folder, number, alive.index(rank), len(alive))
        if state != "connects":
            for each in groups.values():
                call(each, data(each))
            torch.cuda.synchronize()
        if rank not in lost:
            dropped = []
            watch = threading.Timer(PAUSE, lambda at=dropped: (at.append(time.monotonic()), group.drop("lost")))
            watch.start()
            with pytest.raises(PeerLost, match="lost"):
                kept.append(begin(state, call, groups))
                kept[-1][-1].cpu()
                group.check_nccl()
            slowest = max(slowest, time.monotonic() - dropped[0])
            watch.join()
        alive = [each for each in alive if each not in lost]
    if rank not in alive:
        return None, 0.0, []
    if state == "graph is alive":
        assert not _native.wait_for_nccl_aborts(0.0), "a communicator lives as long as the graph"
    connect(groups, folder, len(rounds), alive.index(rank), len(alive))
    sums = call(group, data(group)).cpu()
    group.check_nccl()
    return sums, slowest, kept


def number_of_threads():
    return len(os.listdir("/proc/self/task"))


def lose_in_each_state(group, folder, environment):
    os.environ |= environment[group.rank]
    groups = {"first": Group(), "second": Group()}
    groups["first"].linked.append(groups["second"])
    found, threads, stream = {}, 0, torch.cuda.Stream()
    for number, (state, name, deaths) in enumerate(product(STATES, COLLECTIVES, DEATHS)):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        with torch.cuda.stream(stream):
            sums, slowest, kept = lose(groups, place, group.rank, state, COLLECTIVES[name], DEATHS[deaths])
        group.all_reduce(torch.zeros(1))
        groups["first"].drop("this case is over")
        kept.clear()
        assert _native.wait_for_nccl_aborts(PATIENCE), (state, name, deaths)
        threads = threads or number_of_threads()
        wait_until(lambda limit=threads: number_of_threads() <= limit, "no thread of a case is left")
        found[state, name, deaths] = sums, slowest
        group.all_reduce(torch.zeros(1))
    return {"found": found, "used": torch.cuda.memory_allocated()}


@pytest.mark.gpu
@pytest.mark.usefixtures("stands_in")
def test_survivors_are_back_at_once_whatever_they_wait_for(tmp_path, own_gpus):
    """In six states, of three collectives, with one, two and three lost members, also one after another."""
    done = run_ranks(tmp_path, RANKS, lose_in_each_state, str(tmp_path), [own_gpus(rank) for rank in range(RANKS)])
    rows, times = torch.arange(2.0 * ROWS).reshape(ROWS, 2), {state: 0.0 for state in STATES}
    for state, name, deaths in product(STATES, COLLECTIVES, DEATHS):
        lost = {rank for ranks in DEATHS[deaths] for rank in ranks}
        alive = [rank for rank in range(RANKS) if rank not in lost]
        everyone = torch.stack([rows * (place + 1) for place in range(len(alive))])
        for place, rank in enumerate(alive):
            expected = {
                "all_reduce": everyone.sum(0),
                "all_gather": everyone,
                "all_to_all": everyone.reshape(len(alive), len(alive), -1, 2)[:, place].flatten(0, 1),
            }[name]
            sums, slowest = done[rank]["found"][state, name, deaths]
            assert torch.equal(sums, expected), (state, name, deaths)
            times[state] = max(times[state], slowest)
    print({state: f"{1e3 * seconds:.0f} ms" for state, seconds in times.items()})
    assert max(times.values()) < SOON, times
    for each in done:
        assert each["used"] == 0, "no tensor of a case is left"


def drop_at_any_time(group, folder, environment):
    """All exchange without a pause until each drops its group, at a random time."""
    os.environ |= environment[group.rank]
    found, times = {"first": Group()}, random.Random(group.rank)
    exchanged = 0
    for number in range(TIMES):
        connect(found, folder, number, group.rank, group.size)
        watch = threading.Timer(times.uniform(0.0, 0.05), found["first"].drop, ["lost"])
        watch.start()
        rows = data(found["first"])
        with pytest.raises(PeerLost, match="lost"):
            while True:
                COLLECTIVES["all_to_all"](found["first"], rows)
                exchanged += 1
        watch.join()
        group.all_reduce(torch.zeros(1))
    return exchanged


@pytest.mark.gpu
def test_a_drop_while_another_thread_launches_ends_the_launch_first(tmp_path, own_gpus):
    """NCCL may crash if a thread calls it during an abort; the stand-in does."""
    done = run_ranks(tmp_path, 2, drop_at_any_time, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert min(done) > 0


def abort_torch(group, folder, environment):
    """A collective of one of torch's groups waits behind one of another, which rank 1 never begins."""
    os.environ |= environment[group.rank]
    torch_groups.keep_alive_after_nccl_failure()
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/torch", group.size)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=group.rank, world_size=group.size)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    rows = torch.ones(4, device="cuda")
    for each in groups:
        dist.all_reduce(rows, group=each)
    torch.cuda.synchronize()
    seconds = 0.0
    if group.rank == 0:
        for each in groups:
            dist.all_reduce(rows, group=each)
        began = time.monotonic()
        torch_groups.abort_nccl()
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
    group.all_reduce(torch.zeros(1))
    torch_groups.end_torch_groups()
    return seconds


@pytest.mark.gpu
@pytest.mark.usefixtures("stands_in")
def test_torch_groups_that_wait_for_each_other_are_aborted_together(tmp_path, own_gpus):
    seconds, _ = run_ranks(tmp_path, 2, abort_torch, str(tmp_path), [own_gpus(rank) for rank in range(2)])
    assert seconds < SOON
