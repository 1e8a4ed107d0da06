"""Driver of the demo: start the workers, kill some, admit a new one, show progress, and print the verdict."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from evermoe.demo.closing_text import headline, print_report
from evermoe.demo.flags import check, worker_arguments
from evermoe.demo.plot import plot_run
from evermoe.demo.summary import Event, summarise
from evermoe.demo.timeline import timeline
from evermoe.errors import LaunchError
from evermoe.launch import LocalJob, Worker
from evermoe.options import count
from evermoe.planning.presets import PRESETS
from evermoe.process.reports import Report, Reports
from evermoe.profile.files import merge_files

START_LIMIT = 180.0
"""Seconds within which the workers have to start Python and build the model."""


class Run:
    """One run of the workers, from start to end, with all their events.

    Raises:
        LaunchError: a worker failed by itself, or no worker reported anything for too long.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, *, console: Console, title: str) -> None:
        self.options, self.folder, self.console, self.title = options, folder, console, title
        self.reports = Reports(folder)
        self.events = self.reports.events
        self._last_event = time.monotonic()
        self._graves: dict[Path, float] = {}
        """Memory of lost nodes, and the time of each loss."""
        self._shown_plan = ""
        """Latest plan of protection, in one sentence."""

    def run_workers(
        self, kills: Mapping[int, int], join: int | None, steps: int, copies: int
    ) -> dict[int, list[Report]]:
        """Run a job to its end and return the events of each worker."""
        options = self.options
        job = LocalJob(
            [sys.executable, "-m", "evermoe.demo.train", *worker_arguments(options, steps, copies, self.folder)],
            f"demo-{uuid.uuid4().hex[:8]}",
            options.workers,
            memory_dir=options.memory_dir,
            hang_timeout=options.hang_timeout,
            environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        try:
            with job, self._progress() as progress:
                self._drive(job, progress, kills, join, steps)
        finally:
            job.remove_memory()
        return self.events

    def _drive(self, job: LocalJob, progress: Progress, kills: Mapping[int, int], join: int | None, steps: int) -> None:
        options = self.options
        bar = progress.add_task(self.title, total=steps, loss="", speed="", members="", age="")
        for worker in range(options.workers):
            extra = ["--die-at", str(kills[worker])] if worker in kills else []
            self._start(job, worker, *extra)
        spare = self._start(job, options.workers, "--spare", stdin=subprocess.PIPE) if join is not None else None
        while True:
            step = self._follow(progress, bar)
            self._remove_memory(job, kills)
            if spare is not None and join is not None and step >= join and self._is_ready(spare):
                self._admit(spare)
                spare = None
            ended = all(worker.process.poll() is not None for worker in job.workers if worker is not spare)
            self._check_alive(job)
            if ended:
                break
            time.sleep(0.02)
        self._follow(progress, bar)

    def _start(self, job: LocalJob, index: int, *extra: str, **popen: Any) -> Worker:
        events = self.reports.add(index)
        with self.reports.log(index).open("w") as log:
            return job.start(
                index,
                f"node-{index:02d}",
                "--events",
                str(events),
                *(["--trace", str(self.folder / f"trace-{index}.json")] if self.options.trace else []),
                *extra,
                stdout=log,
                stderr=subprocess.STDOUT,
                **popen,
            )

    def _is_ready(self, spare: Worker) -> bool:
        return any(event["event"] == "ready" for event in self.events[spare.index])

    def _admit(self, spare: Worker) -> None:
        assert spare.process.stdin is not None
        self.events[spare.index].append({"event": "joining", "time": time.time()})
        spare.process.stdin.write("go\n")
        spare.process.stdin.close()
        self.console.print(f"[cyan]worker {spare.index} asks to join[/]")

    def _remove_memory(self, job: LocalJob, kills: Mapping[int, int]) -> None:
        """Hide the memory of killed nodes at once, and free it later.

        The others must not find it, as a lost machine's memory is gone. It is freed once they have taken a step:
        freeing it takes processor time, which the loss of a real machine would not.
        """
        for worker in job.workers:
            memory, grave = job.memory / worker.node, job.memory / f"{worker.node}-lost"
            if worker.index in kills and worker.process.poll() is not None and memory.exists():
                memory.rename(grave)
                self._graves[grave] = time.time()
        updates = [event["time"] for rows in self.events.values() for event in rows[-8:] if event["event"] == "update"]
        for grave in [each for each, since in self._graves.items() if max(updates, default=0.0) > since]:
            shutil.rmtree(grave, ignore_errors=True)
            del self._graves[grave]

    def _check_alive(self, job: LocalJob) -> None:
        for worker in job.workers:
            if (worker.process.poll() or 0) > 0:
                raise LaunchError(f"worker {worker.index} failed:\n{self.reports.log_end(worker.index)}")
        started = any(event["event"] == "begin" for rows in self.events.values() for event in rows)
        limit = 60 + 4 * self.options.hang_timeout if started else START_LIMIT
        if time.monotonic() - self._last_event > limit:
            logs = "\n".join(self.reports.log_end(worker.index) for worker in job.workers)
            raise LaunchError(f"no worker has reported anything for {limit:.0f} s:\n{logs}")

    # ---- progress

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(24),
            TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[members]}"),
            TextColumn("{task.fields[age]}"),
            TimeElapsedColumn(),
            console=self.console,
        )

    def _follow(self, progress: Progress, bar: Any) -> int:
        """Read new events and show them. Return the number of committed steps."""
        for worker, event in self.reports.read():
            self._last_event = time.monotonic()
            self._print_event(worker, event)
        newest = max(
            (event for rows in self.events.values() for event in rows[-12:] if event["event"] == "commit"),
            key=lambda event: event["step"],
            default=None,
        )
        if newest is None:
            return 0
        done = newest["step"] + 1
        if done > progress.tasks[bar].completed:
            self._show(progress, bar, newest, done)
        return done

    def _show(self, progress: Progress, bar: Any, newest: Event, done: int) -> None:
        rows = max(self.events.values(), key=lambda rows: sum(event["event"] == "commit" for event in rows))
        times = [event["time"] for event in rows if event["event"] == "commit"][-6:]
        seconds = statistics.fmean(b - a for a, b in zip(times, times[1:], strict=False)) if len(times) > 1 else 0.0
        tokens = self.options.batch * self.options.sequence
        fields: dict[str, Any] = {
            "loss": f"loss {newest['loss']:.3f}",
            "speed": f"{tokens / seconds:,.0f} tokens/s" if seconds else "",
            "members": count(newest["members"], "member"),
            "age": f"copies {done - newest['copied']} steps old" if newest["copied"] >= 0 else "no copies",
        }
        progress.update(bar, completed=done, **fields)
        if not self.console.is_terminal and done % 5 == 0:
            self.console.print(f"{self.title}: step {done:3}  " + "  ".join(fields.values()))

    def _print_event(self, worker: int, event: Event) -> None:
        if event["event"] == "killed":
            where = "during a recovery" if event["where"] == "recovery" else f"in the middle of step {event['step']}"
            self.console.print(f"[red]worker {worker} is killed {where}: SIGKILL, its node's memory is gone[/]")
        elif event["event"] == "protection_planned" and event["summary"] != self._shown_plan:
            self._shown_plan = event["summary"]
            self.console.print(f"[dim]{self._shown_plan}[/]")
        elif (
            event["event"] == "recovered"
            and event["reason"]
            and any(e["event"] == "begin" for e in self.events[worker])
        ):
            fetched = f"{event['fetched_units']} units, {event['fetched_bytes'] / 1e6:.1f} MB"
            where = f"at step {event['step']} with {count(event['members'], 'member')}"
            self.console.print(f"[green]worker {worker} resumes {where}; fetched {fetched}[/]")


def main(options: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0 if no step was lost, every digest matched and the loss fell."""
    console = Console(highlight=False)
    kills = check(options)
    is_partial = PRESETS[options.preset].may_lose_tokens
    folder = Path(options.events) if options.events else Path(tempfile.mkdtemp(prefix="evermoe-demo-"))
    try:
        baseline = None
        if not options.no_baseline:
            console.print("[dim]First a run without failures, for its losses; then the run with them.[/]")
            run = Run(options, folder / "without-failures", console=console, title="without failures")
            baseline = run.run_workers({}, None, options.steps, 0)
        join = None if options.no_join else options.join
        run = Run(options, folder / "run", console=console, title="with failures")
        events = run.run_workers(kills, join, options.steps, options.replication)
        if options.trace:
            merge_files(sorted(run.folder.glob("trace-*.json")), options.trace)
    except LaunchError as error:
        console.print(f"[red]demo failed:[/] {error}", markup=True)
        return 1
    finally:
        if not options.events:
            shutil.rmtree(folder, ignore_errors=True)
    result = summarise(events, baseline, options.steps, is_partial=is_partial)
    result["joined"] = _joined(events, options, join)
    if join is not None and not result["joined"]:
        result["problems"].append("the new worker did not join")
        result["ok"] = False
    plot_run(timeline(events, baseline, options.batch * options.sequence), Path(options.plot), headline(result))
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    print_report(console, result, options)
    return 0 if result["ok"] else 1


def _joined(events: Mapping[int, Sequence[Event]], options: argparse.Namespace, join: int | None) -> bool:
    rows = events.get(options.workers, []) if join is not None else []
    return any(event["event"] == "commit" for event in rows)
