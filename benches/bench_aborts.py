#!/usr/bin/env python3
"""Time from the death of a member's process until another one, whose GPU waits for it in NCCL, is back in Python.

    python benches/bench_aborts.py --device cuda

Two processes per state: rank 1 is killed (SIGKILL), a thread of rank 0 notices that it has ended and drops the group,
and rank 0's training thread gets `PeerLost`. "freed" is when NCCL has given the communicator back.

  waits      the host reads the result of a collective
  connects   the first collective, which needs a connection to the lost rank
  queue      2,000 launches behind a collective: more than a stream takes
  graph      a CUDA graph that contains a collective is alive
  behind     a second communicator's collective waits behind the first one's
  launches   an exchange after the other, without a pause

With one GPU both ranks use it, which NCCL can do from 2.30 on: NCCL_LIBRARY names such a library, which is preloaded
(libnccl.so.2 of nvidia-nccl-cu13 on PyPI).
"""

import argparse
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import Table, parse, parser, where
from evermoe import _native
from evermoe.comm.group import Group
from evermoe.errors import PeerLost

STATES = ("waits", "connects", "queue", "graph", "behind", "launches")
LIMIT_SECONDS = 40.0
"""After which a state counts as a hang."""
QUEUED = 2000
SHARE_A_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


def begin(state, groups, rows):
    """Launch what cannot end without the other rank; return what must live on."""
    first, second = groups
    if state == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first.all_reduce(rows)
        graph.replay()
        return graph
    first.all_reduce(rows)
    if state == "behind":
        second.all_reduce(rows)
    if state == "queue":
        for _ in range(QUEUED):
            torch.cuda._sleep(1000)
    while state == "launches":
        first.all_to_all(rows, [len(rows) // 2] * 2, [len(rows) // 2] * 2)
    return None


def drop_when_ended(process, group):
    """Drop the group once another process has ended, as the failure detector does."""
    handle = os.pidfd_open(process)
    select.select([handle], [], [])
    group.drop("rank 1 has ended")


def run(rank, state, folder):
    """One rank: connect, and lose rank 1."""
    groups = [Group(), Group()]
    groups[0].linked.append(groups[1])
    for number, group in enumerate(groups):
        store = dist.FileStore(f"{folder}/{number}", 2)
        group.rebuild(store, rank, 2, torch.device("cuda", 0), timedelta(seconds=LIMIT_SECONDS))
    assert groups[0].nccl is not None, "no NCCL between the ranks"
    rows = torch.ones(1 << 16, device="cuda")
    if state != "connects":
        for group in groups:
            group.all_reduce(rows)
        groups[0].all_to_all(rows, [len(rows) // 2] * 2, [len(rows) // 2] * 2)
        torch.cuda.synchronize()
    store.set(f"process {rank}", str(os.getpid()))
    other = int(store.get(f"process {1 - rank}"))
    if rank == 1:
        if state == "launches":
            threading.Timer(0.5, die, [store]).start()
            begin(state, groups, rows)
        store.get("waits")
        time.sleep(0.5)
        die(store)
    threading.Thread(target=drop_when_ended, args=[other, groups[0]], daemon=True).start()
    store.set("waits", "1")
    kept = None
    try:
        kept = begin(state, groups, rows)
        rows.cpu()
        groups[0].check_nccl()
    except PeerLost:
        pass
    back = time.monotonic()
    del kept
    freed = time.monotonic() if _native.wait_for_nccl_aborts(LIMIT_SECONDS) else math.nan
    died = float(Path(folder, "died").read_text(encoding="utf-8"))
    print(json.dumps({"back ms": 1e3 * (back - died), "freed ms": 1e3 * (freed - died)}), flush=True)
    os._exit(0)


def die(store):
    """Note the time, which is the same clock for all processes of a machine, and end."""
    folder = os.environ["EVERMOE_BENCH_FOLDER"]
    Path(folder, "died").write_text(str(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def measure(state, environment, shares_a_gpu):
    """Return milliseconds until rank 0 is back and until its communicator is freed, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            own = SHARE_A_GPU if shares_a_gpu else {"CUDA_VISIBLE_DEVICES": str(rank)}
            command = [sys.executable, __file__, "--device", "cuda", "--rank", str(rank), "--states", state]
            variables = environment | own | {"EVERMOE_BENCH_FOLDER": folder}
            ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
        try:
            said, _ = ranks[0].communicate(timeout=2 * LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return {"result": "hangs"}
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        lines = said.strip().splitlines()
        if ranks[0].returncode or not lines:
            return {"result": f"exit code {ranks[0].returncode}"}
        return {"result": "back", **json.loads(lines[-1])}


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=0.0, devices=("cuda",))
    made.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    made.add_argument("--rounds", type=int, default=1, help="runs of each state; the slowest counts (%(default)s)")
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parse(made)
    if arguments.rank is not None:
        run(arguments.rank, arguments.states[0], os.environ["EVERMOE_BENCH_FOLDER"])
    library = os.environ.get("NCCL_LIBRARY")
    environment = dict(os.environ, **({"LD_PRELOAD": library} if library else {}))
    columns = {"state": "12s", "result": "14s", "back ms": "10.1f", "freed ms": "10.1f"}
    title = f"aborts: torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {where('cuda')}"
    found = Table(title, columns)
    for state in arguments.states:
        runs = [measure(state, environment, torch.cuda.device_count() < 2) for _ in range(arguments.rounds)]
        found.add(state=state, **max(runs, key=lambda run: (run["result"] != "back", run.get("back ms"))))
    found.write(arguments)


if __name__ == "__main__":
    main()
