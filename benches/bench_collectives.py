#!/usr/bin/env python3
"""Collectives among processes on CPUs: a session's own connections, compared with torch's gloo, in turns in one run.

    python benches/bench_collectives.py [--workers 2 4 8] [--rounds 6] [--json PATH]

Both run below `evermoe.comm.group.Group`, with one thread of torch in each process. A ratio is the median over the
rounds of a turn's time over that of gloo in the same round. "processor" is the processor's time of all threads.
"""

import argparse
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import Table, run_ranks
from evermoe.comm.group import Group

sys.path.insert(0, str(Path(__file__).parents[1]))
from benches.compare.gloo_group import GlooGroup

COLUMNS = {
    "workers": "7d",
    "collective": "<10",
    "bytes": "11d",
    "gloo µs": "9.0f",
    "µs": "9.0f",
    "ratio": "6.3f",
    "processor": "9.3f",
}
SIZES = {"all_reduce": (256, 16 << 20), "all_gather": (256,), "all_to_all": (4 << 10, 4 << 20)}
"""Bytes of each process's tensor."""
SECONDS = 0.5
"""Time of a turn, roughly."""


def call(group, name, tensor):
    """Run a collective once."""
    if name == "all_to_all":
        counts = [len(tensor) // group.size] * group.size
        return group.all_to_all(tensor, counts, counts)
    return getattr(group, name)(tensor)


def turn(group, run, times):
    """Return the seconds of each of some calls, and of the processor."""
    group.all_reduce(torch.zeros(1))
    began, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times, (time.process_time() - used) / times


def measure(rank, folder, workers, rounds):
    """Time all collectives in one process; return a row for each."""
    groups = {"gloo": GlooGroup(), "own": Group()}
    for name, group in groups.items():
        store = dist.FileStore(f"{folder}/{name}", workers)
        group.rebuild(store, rank, workers, torch.device("cpu"), timedelta(seconds=60))
    return [
        {"workers": workers, "collective": name, "bytes": nbytes} | compare(groups, name, nbytes, rounds)
        for name, sizes in SIZES.items()
        for nbytes in sizes
    ]


def compare(groups, name, nbytes, rounds):
    """Time one collective in turns."""
    tensor, turns, times = torch.zeros(nbytes // 4), {}, {}
    for which, group in groups.items():
        turns[which] = partial(turn, group, partial(call, group, name, tensor))
        mean = float(group.all_reduce(torch.tensor(turns[which](2)[0]))) / group.size
        times[which] = max(2, round(SECONDS / mean))
    found = [{which: turns[which](times[which]) for which in groups} for _ in range(rounds)]
    ratio = lambda what: statistics.median(each["own"][what] / each["gloo"][what] for each in found)  # noqa: E731
    return {
        "gloo µs": 1e6 * statistics.median(each["gloo"][0] for each in found),
        "µs": 1e6 * statistics.median(each["own"][0] for each in found),
        "ratio": ratio(0),
        "processor": ratio(1),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes (2 4 8)")
    options.add_argument("--rounds", type=int, default=6, help="turns of each (6)")
    options.add_argument("--json", help="file for the results")
    options.set_defaults(device="cpu")
    arguments = options.parse_args()
    table = Table("Collectives on CPUs, compared with gloo's; medians over the rounds", COLUMNS, is_markdown=True)
    for workers in arguments.workers:
        for row in run_ranks(measure, workers, workers, arguments.rounds)[0]:
            table.add(**row)
    table.write(arguments)


if __name__ == "__main__":
    main()
