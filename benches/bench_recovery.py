"""Seconds from SIGKILL to the repeated step with much state, beside what the link alone would take.

    python benches/bench_recovery.py [--rounds 5] [--json PATH]

Each round is a run of `evermoe demo` with three workers of 1.7 GB of state in all, one of which is killed in mid-step,
and right after it one pair of members that send as many bytes as a survivor has fetched. The goal is 0.8 s and 1.5
times what the pair takes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.multiprocessing as mp

from bench_transport import pair, timed_once
from common import Table

SIZES = {"layers": 4, "hidden": 512, "intermediate": 2048, "experts": 16, "batch": 6, "sequence": 64}
PHASES = ("detect", "agree", "rebuild", "fetch", "verify")
"""Parts of a recovery before the step is repeated."""
FIXED_SECONDS, SLOWER = 0.8, 1.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (%(default)s)")
    parser.add_argument("--json", help="where to write the figures")
    arguments = parser.parse_args()
    columns = dict.fromkeys(PHASES, "8.3f")
    columns |= {"in all": "8.2f", "MB": "6.0f", "GB/s": "6.2f", "goal": "6.2f", "of goal": "8.2f", "repeat": "7.2f"}
    table = Table("Seconds of each part; the bytes that one survivor fetched, and the throughput of one pair", columns)
    for _ in range(arguments.rounds):
        table.add(**measure(arguments.limit))
    for name in columns:
        print(f"{name}: median {statistics.median(row[name] for row in table.rows):.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def measure(limit):
    """One run, and one pair."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{name}={size}" for name, size in SIZES.items()]
        options += ["--workers=3", "--steps=12", "--kill=2@6", "--no-join", "--baseline-steps=0"]
        outputs = [f"--json={folder}/summary", f"--plot={folder}/plot.png"]
        command = [sys.executable, "-m", "evermoe", "demo", *options, *outputs]
        subprocess.run(command, check=True, capture_output=True, timeout=limit)
        (episode,) = json.loads(Path(f"{folder}/summary").read_text())["episodes"]
        fetched = episode["fetched_bytes"] // episode["members"]
        mp.spawn(_measure_pair, args=(folder, fetched), nprocs=2)
        seconds = float(Path(f"{folder}/seconds").read_text())
    parts = episode["seconds"]
    row = {phase: parts[phase] for phase in PHASES}
    goal = FIXED_SECONDS + SLOWER * seconds
    row |= {"in all": sum(row.values()), "MB": fetched / 1e6, "GB/s": fetched / seconds / 1e9, "goal": goal}
    return row | {"of goal": row["in all"] / goal, "repeat": parts["repeat"]}


def _measure_pair(rank, folder, nbytes):
    with pair(rank, folder) as members:
        seconds = timed_once(members, nbytes)
    if rank == 0:
        Path(f"{folder}/seconds").write_text(str(seconds))


if __name__ == "__main__":
    main()
