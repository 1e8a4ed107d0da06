"""`python -m benches.compare`: run the candidates one after the other; write the table, the picture and JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benches.compare.candidates import CANDIDATES
from benches.compare.failures import Schedule, at_steps, from_trace, poisson
from benches.compare.flags import add_arguments
from evermoe.cli.main import Parser, exit_code
from evermoe.cli.results import write_all
from evermoe.demo.corpus import Corpus
from evermoe.demo.flags import check_numbers
from evermoe.demo.worker_flags import add_session_arguments
from evermoe.errors import LaunchError
from evermoe.options import checked
from evermoe.simulate import Failure

DESCRIPTION = "Run presets, and what others use, through the same failures."
ROOT = Path(__file__).parents[2]
MAX_SECONDS = 1e7
TABLE_WIDTH = 100
"""Width of the table in characters, also on a narrower terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code."""
    parser = Parser(prog="python -m benches.compare", description=DESCRIPTION)
    add_arguments(parser)
    return exit_code(parser.prog, lambda: compare(parser.parse_args(arguments)))


def compare(options: argparse.Namespace) -> int:
    """Run all candidates; the exit code is 0 if each of them completed all steps."""
    console = Console(highlight=False)
    options = _complete(options)
    schedule = check(options)
    names = _names(options.candidate)
    missing = [CANDIDATES[name].title for name in CANDIDATES if name not in names and not options.candidate]
    if missing:
        console.print(f"not installed, left out: {', '.join(missing)}")
    console.print(f"{options.steps} steps on {options.workers} workers; {schedule.describe()}")
    if options.plot:
        import matplotlib  # noqa: F401  where it is missing, that is said before any run
    root = Path(options.keep) if options.keep else Path(tempfile.mkdtemp(prefix="evermoe-compare-"))
    _refuse_kept(root, names)
    found: dict[str, Any] = {}
    broken = ""
    try:
        for name in names:
            found[name] = _run(name, options, schedule, root / name, console)
    except LaunchError as error:
        broken = str(error)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    result = {"options": vars(options), "schedule": [asdict(each) for each in schedule.changes], "candidates": found}
    if options.json:
        write_all({"--json": (options.json, (json.dumps(result, indent=2) + "\n").encode())})
    Console(highlight=False, width=max(console.width, TABLE_WIDTH)).print(_table(found))
    if options.plot:
        from benches.compare.picture import draw

        draw({CANDIDATES[name].title: each for name, each in found.items()}, Path(options.plot))
    failures = {name: each["failure"] for name, each in found.items() if each["failure"]}
    for name, failure in failures.items():
        console.print(f"{CANDIDATES[name].title}: {failure}", style="red", markup=False)
    if broken:
        console.print(broken, style="red", markup=False)
    return 1 if failures or broken else 0


def _refuse_kept(root: Path, names: Sequence[str]) -> None:
    for name in names:
        if (root / name).exists():
            raise ValueError(f"--keep {root}: expected a folder without {name}, which exists already")


def _names(asked: Sequence[str] | None) -> list[str]:
    """Return the candidates to run: the requested ones, or all that are installed.

    Raises:
        ValueError: a requested one is not installed.
    """
    installed = [name for name, each in CANDIDATES.items() if each.package is None or find_spec(each.package)]
    for name in asked or ():
        if name not in installed:
            package = (CANDIDATES[name].package or "").replace("_", "-")
            raise ValueError(f"--candidate {name}: expected {package} to be installed: pip install {package}")
    return list(dict.fromkeys(asked or installed))


def _complete(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the defaults of the flags that only a session's worker has."""
    hidden = argparse.ArgumentParser()
    add_session_arguments(hidden, hidden)
    return argparse.Namespace(**vars(hidden.parse_args([])) | vars(options))


def check(options: argparse.Namespace) -> Schedule:
    """Check all flags, complete `options` and return the schedule of failures.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    check_numbers(options)
    for name in ("expert_parallel", "checkpoint_interval", "ft_checkpoint_interval", "held_out"):
        checked(f"--{name.replace('_', '-')}", getattr(options, name), int, least=1)
    size = options.expert_parallel
    if options.experts % size or size > options.workers:
        raise ValueError(
            f"--expert-parallel: expected a divisor of --experts {options.experts} and at most --workers "
            f"{options.workers}, got {size}"
        )
    for name in ("limit", "speedup", "replace_after", *(["mtbf"] if options.mtbf is not None else [])):
        checked(f"--{name.replace('_', '-')}", getattr(options, name), float, above=0, most=MAX_SECONDS)
    checked("--trace-start", options.trace_start, float, least=0, most=MAX_SECONDS)
    windows = len(Corpus(options.data, options.sequence))
    if windows - options.held_out < options.batch:
        raise ValueError(
            f"--held-out {options.held_out}: expected to leave a batch of {options.batch} of {windows} samples"
        )
    if options.expert_slots is None:
        options.expert_slots = options.experts // size
    schedule = _schedule(options)
    options.joins = sum(change.action == "join" for change in schedule.changes)
    return schedule


def _schedule(options: argparse.Namespace) -> Schedule:
    ways = [name for name in ("kill", "mtbf", "trace") if getattr(options, name)]
    if len(ways) > 1 or (options.join is not None and set(ways) - {"kill"}):
        raise ValueError("expected --kill and --join, --mtbf, or --trace: one schedule of failures, got several")
    common = {"workers": options.workers, "least": options.expert_parallel}
    if options.mtbf is not None:
        span = {"replace_after": options.replace_after, "seed": options.seed, "until": options.limit}
        return poisson(mtbf=options.mtbf, **span, **common)
    if options.trace:
        events = Failure.trace(options.trace).fields["events"]
        return from_trace(events, speedup=options.speedup, start=options.trace_start, **common)
    return _at_steps(options)


def _at_steps(options: argparse.Namespace) -> Schedule:
    kills = options.kill or []
    for worker, step in kills:
        if not 0 <= worker < options.workers or not 0 <= step < options.steps:
            raise ValueError(
                f"--kill {worker}@{step}: expected a worker below {options.workers} and a step below {options.steps}"
            )
    if len(dict(kills)) != len(kills):
        raise ValueError(f"--kill: a worker dies only once, got {', '.join(str(worker) for worker, _ in kills)}")
    if options.workers - len(kills) < options.expert_parallel:
        raise ValueError(
            f"--kill: expected at least --expert-parallel {options.expert_parallel} survivors of {options.workers} "
            f"workers, got {len(kills)} kills"
        )
    if options.join is not None and not 0 <= options.join < options.steps:
        raise ValueError(f"--join: expected a step below {options.steps}, got {options.join}")
    return at_steps(dict(kills), options.join, options.workers)


def _run(name: str, options: argparse.Namespace, schedule: Schedule, folder: Path, console: Console) -> dict[str, Any]:
    """Run one candidate in a separate process, which shows its progress."""
    folder.mkdir(parents=True)
    orders = {
        "candidate": name,
        "options": vars(options),
        "changes": [asdict(each) for each in schedule.changes],
    }
    (folder / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-m", "benches.compare.runner", str(folder / "orders.json")]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}  # the runner and its workers import this package
    errors = folder / "runner.log"
    with errors.open("w") as log, _progress(console) as progress:
        bar = progress.add_task(CANDIDATES[name].title, total=options.steps)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                progress.update(bar, completed=int(line.split()[0]))
    if not (folder / "found.json").exists():
        raise LaunchError(f"the run of {name} ended with {process.returncode}:\n{errors.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description:16}"),
        BarColumn(24),
        TextColumn("step {task.completed:>4.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
    )


def _table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in (
        "seconds",
        "tokens/s",
        "of best",
        "step\nms",
        "longest\nstall",
        "lost\nsteps",
        "lost\ntokens",
        "PLT",
        "held-out\nloss",
        "sent\nMB",
        "memory\nMB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    best = max((each["outcome"]["tokens_per_second"] for each in found.values()), default=0.0)
    for name, each in found.items():
        table.add_row(CANDIDATES[name].title, *_cells(each, best))
    return table


def _cells(found: Mapping[str, Any], best: float) -> Sequence[str]:
    outcome = found["outcome"]
    loss, sent = outcome["final_loss"], outcome["sent_bytes"]
    speed = outcome["tokens_per_second"]
    return (
        f"{outcome['seconds']:.1f}" if not found["failure"] else f"step {outcome['steps']}",
        f"{speed:,.0f}",
        f"{speed / best:.0%}" if best else "",
        f"{1e3 * outcome['step_seconds']:.0f}",
        f"{outcome['longest_stall']:.1f}",
        f"{outcome['lost_steps']}",
        f"{outcome['lost_tokens']:,}",
        f"{outcome['plt']:.2%}",
        "" if loss is None else f"{loss:.4f}",
        "" if sent is None else f"{sent / 1e6:,.1f}",
        f"{outcome['peak_memory_bytes'] / 1e6:,.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
