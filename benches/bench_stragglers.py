"""Steps until a slow member is named, and members named by mistake: real workers on a machine as busy as it is.

    python benches/bench_stragglers.py [--episodes 20] [--workers 4] [--busy 2] [--json PATH]

In each episode all workers are equally fast for 24 steps. Then one of them, another in each episode, is slow in 20
steps: it sleeps for 30 % of the processor's time that its steps take, or for 100 ms, or the kernel limits what each of
its TCP connections sends to 10 MB/s. The control has as many steps, and nobody is slow. Each worker is a node of its
own. `named` counts the episodes in which the slow member is named in these 20 steps, `after` is the median number of
steps until then, and `mistakes` counts the names of other members, and of any member in the control. With `--busy N`,
N other processes keep the processors busy for half of the time, in random turns.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

import torch

import evermoe
from common import Table
from evermoe.demo.model import ByteGPT
from evermoe.events import SlowMember
from support.link_rate import NO_LIMIT, RATE, limit_connections

FAST, SLOW = 24, 20
"""Steps of an episode without and with a slow member."""
KINDS = ("none", "30 %", "100 ms", "10 MB/s")
BUSY_SECONDS = 0.5
"""Mean seconds of a turn of a process that keeps a processor busy."""


def main():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--episodes", type=int, default=20, help="number of times that a member is slow (%(default)s)")
    made.add_argument("--workers", type=int, default=4, help="number of members (%(default)s)")
    made.add_argument("--busy", type=int, default=0, help="other processes that use the processors (%(default)s)")
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="how the member is slow")
    made.set_defaults(device="cpu")
    made.add_argument("--json", help="file for the results")
    made.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    made.add_argument("--kind", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker:
        train(arguments)
        return
    columns = {"slow by": "<8", "named": "<10", "after": "6.1f", "mistakes": "9.0f", "step_ms": "9.1f"}
    table = Table(f"{arguments.workers} workers, {arguments.busy} other processes", columns)
    others = [multiprocessing.Process(target=keep_busy, args=[seed], daemon=True) for seed in range(arguments.busy)]
    for each in others:
        each.start()
    try:
        for kind in arguments.kinds:
            table.add(**{"slow by": kind}, **measure(kind, arguments))
    finally:
        for each in others:
            each.kill()
    table.write(arguments)


def keep_busy(seed):
    """Use a processor for half of the time."""
    draw = random.Random(seed)
    while True:
        end = time.monotonic() + draw.expovariate(1 / BUSY_SECONDS)
        while time.monotonic() < end:
            pass
        time.sleep(draw.expovariate(1 / BUSY_SECONDS))


def measure(kind, arguments):
    """Return the figures of one kind."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found"
        options = ["--episodes", arguments.episodes, "--workers", arguments.workers, "--worker", found, "--kind", kind]
        line = ["-m", "evermoe", "run", "--workers", arguments.workers, __file__, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *map(str, line)], check=True, env=environment, stderr=subprocess.DEVNULL)
        names, seconds = json.loads(found.read_text())
    delays, mistakes = {}, 0
    for step, rank in names:
        episode, at = divmod(step, FAST + SLOW)
        if kind != "none" and rank == episode % arguments.workers and at >= FAST:
            delays.setdefault(episode, at - FAST + 1)
        else:
            mistakes += 1
    after = statistics.median(delays.values()) if delays else float("nan")
    named = "" if kind == "none" else f"{len(delays)} of {arguments.episodes}"
    return {"named": named, "after": after, "mistakes": mistakes, "step_ms": 1e3 * seconds}


def train(arguments):
    """Train as one worker; rank 0 writes who was named in which step, and the median seconds of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["EVERMOE_NODE"] = f"node{os.environ['LOCAL_RANK']}"
    model = ByteGPT(layers=2, hidden=64, heads=4, intermediate=128, experts=8, top_k=2, sequence=64, balance=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randint(0, 256, (1000, 65), generator=torch.Generator().manual_seed(1))
    named, times = [], [time.monotonic()]

    def note(event):
        if isinstance(event, SlowMember):
            named.append((event.step, event.rank))

    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(1000, 8 * arguments.workers), on_event=note)
    used = time.thread_time()
    for step in session.steps(arguments.episodes * (FAST + SLOW)):
        episode, at = divmod(step.number, FAST + SLOW)
        is_slow = at >= FAST and session.group.rank == episode % arguments.workers
        if arguments.kind == "10 MB/s" and (is_slow or at == 0):
            limit_connections(RATE if is_slow else NO_LIMIT)
        with step as indices:
            loss = model.loss(data[indices])
            if is_slow:
                sleep = {"30 %": 0.3 * (time.thread_time() - used), "100 ms": 0.1}
                time.sleep(sleep.get(arguments.kind, 0.0))
            used = time.thread_time()
            step.backward(loss)
        times.append(time.monotonic())
    if session.is_main:
        seconds = statistics.median(after - before for before, after in zip(times, times[1:], strict=False))
        Path(arguments.worker).write_text(json.dumps([named, seconds]))


if __name__ == "__main__":
    main()
