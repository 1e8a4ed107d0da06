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

With `--rounds` the survivor connects with a new rank 1 after each death. "MiB", "threads" and "files" are the GPU's
used memory, the survivor's threads and the files `/dev/shm/nccl-*` after the last round, minus those after the first.
Times are of the slowest round. Rows are written after each state: a state that hangs costs no other its row.

With one GPU both ranks use it, which NCCL can do from 2.30 on: NCCL_LIBRARY names such a library, which is preloaded
(libnccl.so.2 of nvidia-nccl-cu13 on PyPI).
"""

import argparse
import ctypes
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
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import Table, parse, parser, where
from evermoe import _native
from evermoe.comm.group import Group
from evermoe.errors import PeerLost

STATES = ("waits", "connects", "queue", "graph", "behind", "launches")
START_SECONDS, ROUND_SECONDS = 60.0, 5.0
"""A state whose processes take longer than the first and, for each round, the second counts as a hang."""
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


def connect(rank, number, state, folder):
    """Return two connected groups of round `number`, what they send, and the other rank's process."""
    store = dist.FileStore(f"{folder}/{number}", 2)
    store.set(f"process {rank}", str(os.getpid()))
    other = int(store.get(f"process {1 - rank}"))
    groups = [Group(), Group()]
    groups[0].linked.append(groups[1])
    for name, group in zip("ab", groups, strict=True):
        own = dist.PrefixStore(name, store)
        group.rebuild(own, rank, 2, torch.device("cuda", 0), timedelta(seconds=START_SECONDS))
    assert groups[0].nccl is not None, "no NCCL between the ranks"
    rows = torch.ones(1 << 16, device="cuda")
    if state != "connects":
        for group in groups:
            group.all_reduce(rows)
        groups[0].all_to_all(rows, [len(rows) // 2] * 2, [len(rows) // 2] * 2)
        torch.cuda.synchronize()
    return groups, rows, other, store


def survive(state, folder, rounds):
    """Rank 0: lose a rank 1 in each round. Prints the times and what is left of each."""
    start_victim(state, folder, 0)
    for number in range(rounds):
        if number + 1 < rounds:
            start_victim(state, folder, number + 1)
        groups, rows, victim, store = connect(0, number, state, folder)
        threading.Thread(target=drop_when_ended, args=[victim, groups[0]], daemon=True).start()
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
        freed = time.monotonic() if _native.wait_for_nccl_aborts(START_SECONDS) else math.nan
        died = float(Path(folder, f"died {number}").read_text(encoding="utf-8"))
        del groups, rows, store
        print(json.dumps({"back ms": 1e3 * (back - died), "freed ms": 1e3 * (freed - died), **held()}), flush=True)
    os._exit(0)


def held():
    """Return the version of NCCL, what this process holds, and what NCCL has left in shared memory."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    library, version = ctypes.CDLL(None), ctypes.c_int()
    if not hasattr(library, "ncclGetVersion"):  # it is not preloaded
        library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetVersion(ctypes.byref(version))
    return {
        "NCCL": version.value,
        "MiB": (total - free) / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(list(Path("/dev/shm").glob("nccl-*"))),
    }


def start_victim(state, folder, number):
    """Start rank 1 of a round."""
    options = ["--device", "cuda", "--states", state, "--victim", str(number)]
    variables = os.environ if shares_a_gpu() else os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    command = [sys.executable, __file__, *options, "--folder", folder]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables)


def perish(state, folder, number):
    """Rank 1 of a round: die while the survivor waits."""
    dist.FileStore(f"{folder}/{number}", 2).get("process 0")  # its turn; before that it holds nothing of the GPU
    groups, rows, _, store = connect(1, number, state, folder)
    if state == "launches":
        threading.Timer(0.5, die, [folder, number]).start()
        begin(state, groups, rows)
    store.get("waits")
    time.sleep(0.5)
    die(folder, number)


def die(folder, number):
    """Note the time, which is the same clock for all processes of a machine, and end."""
    Path(folder, f"died {number}").write_text(str(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def shares_a_gpu():
    """Return whether both ranks use one GPU."""
    return "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ


def measure(state, rounds, environment):
    """Return the times of the slowest round and what all have left, or how it failed."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "errors").open("w+", encoding="utf-8") as errors:
        command = [sys.executable, __file__, "--device", "cuda", "--states", state, "--rounds", str(rounds)]
        command += ["--folder", folder]
        ranks = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        result = "back"
        try:
            said, _ = ranks.communicate(timeout=START_SECONDS + ROUND_SECONDS * rounds)
        except subprocess.TimeoutExpired:
            result = "hangs"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
        if result == "hangs":
            said, _ = ranks.communicate()
        done = [json.loads(line) for line in said.splitlines()]
        if ranks.returncode > 0:
            result = f"exit code {ranks.returncode}"
        errors.seek(0)
        found = {"result": result, "rounds": len(done)}
        if result != "back":
            found["errors"] = errors.read()[-2000:]
            print(found["errors"], file=sys.stderr)
    if done:
        found["NCCL"] = done[0]["NCCL"]
        found |= {name: max(each[name] for each in done) for name in ("back ms", "freed ms")}
        found |= {name: done[-1][name] - done[0][name] for name in ("MiB", "threads", "files")}
    return found


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=0.0, devices=("cuda",))
    made.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    made.add_argument("--rounds", type=int, default=1, help="deaths that one process survives (%(default)s)")
    made.add_argument("--folder", help=argparse.SUPPRESS)
    made.add_argument("--victim", type=int, help=argparse.SUPPRESS)
    arguments = parse(made)
    if arguments.victim is not None:
        perish(arguments.states[0], arguments.folder, arguments.victim)
    if arguments.folder is not None:
        survive(arguments.states[0], arguments.folder, arguments.rounds)
    environment = dict(os.environ)
    if torch.cuda.device_count() < 2:
        environment |= SHARE_A_GPU
    else:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
        environment.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
    if "NCCL_LIBRARY" in os.environ:
        environment["LD_PRELOAD"] = os.environ["NCCL_LIBRARY"]
    columns = {"state": "12s", "result": "14s", "rounds": "d", "back ms": "10.1f", "freed ms": "10.1f"}
    columns |= {"MiB": ".0f", "threads": "d", "files": "d", "NCCL": "8d"}
    found = Table(f"aborts: torch {torch.__version__}, {where('cuda')}", columns)
    is_right = True
    for state in arguments.states:
        row = measure(state, arguments.rounds, environment)
        is_right = is_right and row["result"] == "back"
        found.add(state=state, **row)
        found.write(arguments)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
