"""One run of a candidate in a separate process: start workers, apply the schedule of failures, and measure.

`python -m benches.compare.runner FILE` reads its options from the file, and writes its outcome next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches.compare import loopback, processes
from benches.compare.failures import Change, Schedule
from benches.compare.outcome import in_order, measure, progress
from evermoe.errors import LaunchError
from evermoe.launch import STOP_SIGNALS

LOOK_SECONDS = 0.02
"""Seconds between two checks of the workers."""
MEMORY_SECONDS = 0.25
"""Seconds between two measurements of their memory."""
LAST_SECONDS = 15.0
"""Seconds that workers have to end by themselves after the last step."""


class Run:
    """One run of a candidate.

    Args:
        launch: the candidate's launch, whose context is entered.
        schedule: schedule of deaths and joins.
        options: of `python -m benches.compare`.
        show: called with the number of steps and of seconds, about four times a second.

    Raises:
        LaunchError: a worker failed, or the run took longer than `--limit`.
    """

    def __init__(
        self, launch: Any, schedule: Schedule, options: argparse.Namespace, show: Callable[[int, float], None]
    ) -> None:
        self._launch, self._schedule, self._options, self._show = launch, schedule, options, show
        self.events = launch.reports.events
        self.peak = 0
        self.began = time.time()
        self._left = list(schedule.changes)
        self._dead: set[int] = set()
        self._next_memory = 0.0
        self._first: float | None = None
        """When the first step began."""

    def run_candidate(self) -> None:
        """Run to the end and return the outcome."""
        for worker in range(self._options.workers):
            self._start(worker)
        while not self._is_over():
            self._look()
            time.sleep(LOOK_SECONDS)
        deadline = time.time() + LAST_SECONDS
        while time.time() < deadline and any(each.poll() is None for each in self._launch.running.values()):
            self._look()
            time.sleep(LOOK_SECONDS)

    def _start(self, worker: int) -> None:
        deaths = self._schedule.deaths
        self._launch.start(worker, *(["--die-at", str(deaths[worker])] if worker in deaths else []))

    def _look(self) -> None:
        began = [event["time"] for _, event in self._launch.reports.read() if event["event"] == "begin"]
        if began and self._first is None:
            self._first = min(began)
        self._remove_node()
        if not self._is_over():
            self._obey()
        self._launch.changed()
        self._check()
        if time.time() >= self._next_memory:
            self._next_memory = time.time() + MEMORY_SECONDS
            self.peak = max(self.peak, processes.memory_bytes(p.pid for p in self._launch.running.values()))
            self._show(self._steps(), time.time() - self.began)

    def _is_over(self) -> bool:
        return any(event["event"] == "final" for rows in self.events.values() for event in rows[-8:])

    def _steps(self) -> int:
        found = progress({worker: rows[-50:] for worker, rows in self.events.items()})
        return found[-1][1] if found else 0

    def _remove_node(self) -> None:
        """Remove the node of a worker that killed itself in its step."""
        for worker, rows in self.events.items():
            if worker not in self._dead and any(event["event"] == "killed" for event in rows[-3:]):
                self._dead.add(worker)
                self._launch.kill(worker)

    def _obey(self) -> None:
        """Apply the changes that are scheduled by now."""
        due = [change for change in self._left if self._is_due(change)]
        self._left = [change for change in self._left if change not in due]
        for change in due:
            if change.action == "join" and self._launch.takes_joins:
                self._start(change.worker)
                self.events[change.worker].append({"event": "joining", "time": time.time()})
            elif change.action == "kill" and change.step is None and change.worker in self._launch.running:
                self._dead.add(change.worker)
                self._launch.kill(change.worker)
                self.events[change.worker].append({"event": "killed", "time": time.time(), "step": self._steps()})

    def _is_due(self, change: Change) -> bool:
        if change.step is not None:
            return change.action == "kill" or self._steps() >= change.step
        return self._first is not None and time.time() - self._first >= (change.seconds or 0.0)

    def _check(self) -> None:
        for worker, process in self._launch.running.items():
            if worker not in self._dead and (process.poll() or 0) != 0 and not self._is_over():
                raise LaunchError(f"worker {worker} failed:\n{self._launch.reports.log_end(worker)}")
        if all(process.poll() is not None for process in self._launch.running.values()) and not self._is_over():
            raise LaunchError("no worker is left")
        if time.time() - self.began > self._options.limit:
            logs = "\n".join(self._launch.reports.log_end(worker) for worker in self.events)
            raise LaunchError(f"not done after {self._options.limit:g} s (--limit):\n{logs}")


def main(path: Path) -> None:
    """Run the candidate that the file describes, and write the outcome next to it."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))  # so that no worker remains
    is_counted = loopback.enter()  # before torch has threads
    from benches.compare.candidates import CANDIDATES

    orders = json.loads(path.read_text())
    options = argparse.Namespace(**orders["options"])
    schedule = Schedule(tuple(Change(**change) for change in orders["changes"]))
    folder = path.parent
    with CANDIDATES[orders["candidate"]].launch(options, folder) as launch:
        run = Run(launch, schedule, options, lambda step, seconds: print(f"{step} {seconds:.1f}", flush=True))
        failure = None
        try:
            run.run_candidate()
        except LaunchError as error:
            failure = str(error)
    tokens = options.batch * options.sequence
    outcome = measure(
        run.events,
        began=run.began,
        tokens=tokens,
        assignments=tokens * options.top_k * options.layers,
        sent_bytes=loopback.sent_bytes() if is_counted else None,
        peak_memory_bytes=run.peak,
    )
    found = {
        "failure": failure,
        "outcome": asdict(outcome),
        "progress": [(at - run.began, step) for at, step in progress(run.events)],
        "kills": [event["time"] - run.began for event in in_order(run.events) if event["event"] == "killed"],
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(Path(sys.argv[1]))
