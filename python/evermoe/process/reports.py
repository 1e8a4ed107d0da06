"""Events and logs of the workers of a job: files that are read while the workers append to them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

Report = dict[str, Any]
"""An event as a worker has written it, with `event`, its name, and `time`."""


class EventFile:
    """Lines of JSON that a process appends to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0

    def read_lines(self) -> list[bytes]:
        """Return the lines that were completed since the previous call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read_bytes += end
        return data[:end].splitlines()

    def read(self) -> list[Report]:
        """Return the events that were written since the previous call."""
        return [json.loads(line) for line in self.read_lines()]


class Reports:
    """Events and logs of workers, each by the worker's number.

    Args:
        folder: folder of the files; it is created.
        kinds: names of the events to keep; None for all.
    """

    def __init__(self, folder: Path, kinds: Collection[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kinds = folder, kinds
        self._files: dict[int, EventFile] = {}
        self.events: dict[int, list[Report]] = {}
        """Events that were read, by worker."""

    def add(self, worker: int) -> Path:
        """Add a worker; return the path of the file for its events."""
        self.events[worker], self._files[worker] = [], EventFile(self._folder / f"events-{worker}.jsonl")
        return self._files[worker].path

    def log(self, worker: int) -> Path:
        """Return the path of a worker's log."""
        return self._folder / f"worker-{worker}.log"

    def log_end(self, worker: int, length: int = 2000) -> str:
        """Return the last characters of a worker's log."""
        return self.log(worker).read_text(errors="replace")[-length:]

    def read(self) -> list[tuple[int, Report]]:
        """Read the new events of all workers; return them with their workers."""
        new = []
        for worker, file in self._files.items():
            kept = [event for event in file.read() if self._kinds is None or event["event"] in self._kinds]
            self.events[worker] += kept
            new += [(worker, event) for event in kept]
        return new
