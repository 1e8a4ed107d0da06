"""Events as lines of JSON, and lines as events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from evermoe.events import ChunkSent, Event, GradientsLogged, SnapshotReceived
from evermoe.events.base_event import name_of
from evermoe.events.step_events import Protocol
from evermoe.process.warn import warn

INNER = (Protocol, ChunkSent, SnapshotReceived, GradientsLogged)
"""Events of a session's internals, many of them in each step."""
_KINDS = {name_of(kind): kind for kind in Event.__subclasses__()}


class JsonLines:
    """Appends each event to a file: its kind, the time, the process and the event's fields, as JSON in a line.

        {"event": "commit", "time": 1700000000.1, "pid": 4711, "step": 3, "loss": 2.1, "members": 4, "generation": 1}

    Each line is written in one piece, so several processes may share a file. If writing fails later, for example on a
    full disk, a warning is issued once and training continues.

    Args:
        path: path of the file; a missing file is created, with its folders.
        without: kinds of events to leave out; by default those of a session's internals.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, without: Collection[type[Event]] = INNER) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._without = tuple(without)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        """Write a line."""
        if isinstance(event, self._without):
            return
        head = {"event": event.name, "time": time.time(), "pid": os.getpid()}
        try:
            os.write(self._file, json.dumps(head | event.fields()).encode() + b"\n")
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"events cannot be written to {self.path}: {error}. Training continues")


def read_line(line: str) -> tuple[int, float, Event] | None:
    """Return process, time and event of a line that `JsonLines` has written; None for any other line.

    >>> read_line('{"event": "begin", "time": 1.5, "pid": 7, "step": 3}')
    (7, 1.5, Begin(step=3))
    """
    try:
        found = json.loads(line)
        kind = _KINDS.get(found["event"])
        if kind is None:
            return None
        names = {field.name for field in fields(kind)}
        event = kind(**{name: value for name, value in found.items() if name in names})
        return int(found["pid"]), float(found["time"]), event
    except (ValueError, TypeError, KeyError):
        return None
