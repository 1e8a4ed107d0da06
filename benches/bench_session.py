"""Step time with and without copies, and recovery by phase: real workers and real kills, in one run.

    python benches/bench_session.py [--device cuda] [--kills 3] [--json PATH]

Runs with and without copies alternate, so that a slow moment of the machine affects both. The ratio of their median
step times is the cost of copies. The demo's own summary gives the phases of each recovery. With `--device cuda` workers
share the GPUs of this machine. If there are fewer GPUs than workers, tensors travel over gloo; and to count the
routers' choices, the demo synchronizes with the host once more per layer, with and without copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import parse
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments
from evermoe.demo.summary import PHASES, copy_seconds, episodes, step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs with and without copies (%(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="runs with a kill (%(default)s)")
    add_arguments(parser)
    parser.set_defaults(steps=30, threads=[])
    options = parse(parser)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise the workers would use the GPUs
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder), console)
    show(result, console)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, object]:
    seconds: dict[int, list[float]] = {0: [], 2: []}
    copying: list[float] = []
    for number in range(options.rounds):
        for copies in (0, 2):
            run = Run(options, folder / f"{number}-{copies}", console=console, title=f"replication={copies}")
            events = run.run_workers({}, None, options.steps, copies)
            seconds[copies] += step_seconds(events)
            copying += copy_seconds(events) if copies else []
    recoveries = []
    for number in range(options.kills):
        run = Run(options, folder / f"kill-{number}", console=console, title="kill")
        events = run.run_workers({number % options.workers: options.steps // 2}, None, options.steps, 2)
        recoveries += [vars(episode) for episode in episodes(events)]
    without, with_copies = (statistics.median(seconds[copies]) for copies in (0, 2))
    return {
        "workers": options.workers,
        "step_seconds_without_copies": without,
        "step_seconds": with_copies,
        "ratio": with_copies / without,
        "copy_seconds": statistics.median(copying),
        "copy_share_of_step": statistics.median(copying) / with_copies,
        "recoveries": recoveries,
    }


def show(result: dict[str, object], console: Console) -> None:
    console.print(
        f"step with copies {result['step_seconds']:.3f} s, without {result['step_seconds_without_copies']:.3f} s: "
        f"ratio {result['ratio']:.3f}; copies take {result['copy_share_of_step']:.1%} of a step in the training thread"
    )
    table = Table(title="SIGKILL → all survivors have committed the next step (seconds)", title_justify="left")
    for name in ("killed", *PHASES, "total", "MB fetched"):
        table.add_column(name, justify="right")
    for row in result["recoveries"]:
        phases = [f"{row['seconds'].get(phase, 0):.3f}" for phase in PHASES]
        table.add_row(str(row["killed"]), *phases, f"{row['total_seconds']:.3f}", f"{row['fetched_bytes'] / 1e6:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
