"""Listeners of a session's events: a file of JSON lines, metrics for Prometheus.

session = evermoe.Session(..., on_event=[JsonLines("events.jsonl"), Metrics(port=9400)])
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evermoe import environment
from evermoe.events import (
    Arranged,
    Begin,
    Checkpoint,
    Chunk,
    Commit,
    Damaged,
    Event,
    Held,
    Listener,
    Protocol,
    Published,
    Recovered,
    Skipped,
)
from evermoe.options import checked

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

INNER = (Protocol, Chunk, Published, Held)
"""Events of a session's insides, of which there are many in each step."""
MOST_PORT = 65535
STEP_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Bounds of the histogram of steps, seconds."""


def combined(given: Listener | Sequence[Listener], more: Sequence[Listener] = ()) -> Listener:
    """One listener that tells all of those given, and some more, in their order."""
    listeners = (*([given] if callable(given) else given), *more)
    for each in listeners:
        if not callable(each):
            raise TypeError(f"on_event: expected functions of an event, got {type(each).__name__}")

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


def from_environment() -> list[Listener]:
    """The metrics that EVERMOE_METRICS asks for: its port is that of the first process here; others have the next ones.

    Raises:
        ValueError: it is no port.
        OSError: the port is taken; the message names it.
    """
    text = os.environ.get("EVERMOE_METRICS")
    if not text:
        return []
    port = checked("EVERMOE_METRICS", int(text) if text.isdecimal() else text, int, least=1, most=MOST_PORT)
    port += environment.local_rank()
    try:
        return [Metrics(port)]
    except OSError as error:
        raise OSError(error.errno, f"port {port} (EVERMOE_METRICS): {error.strerror}") from None


class JsonLines:
    """Appends each event to a file: its kind, the time, the process and the event's fields, as JSON in a line.

        {"event": "commit", "time": 1700000000.1, "pid": 4711, "step": 3, "loss": 2.1, "members": 4, "generation": 1}

    A line is written whole, so several processes may share a file. If it cannot be written to later, for example as
    the disk is full, a warning says so once, and training continues.

    Args:
        path: of the file; made if it is missing, with the folders above it.
        without: kinds of events that are left out; by default those of a session's insides.

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
        """Writes a line."""
        if isinstance(event, self._without):
            return
        head = {"event": event.name, "time": time.time(), "pid": os.getpid()}
        try:
            os.write(self._file, json.dumps(head | event.fields()).encode() + b"\n")
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"events cannot be written to {self.path}: {error}. Training continues", stacklevel=3)


class Metrics:
    """Metrics of this member for Prometheus, by its official client.

    | metric | kind | what |
    |---|---|---|
    | `evermoe_step` | gauge | steps taken that no failure which the preset covers undoes |
    | `evermoe_loss` | gauge | mean loss of the last of them |
    | `evermoe_members` | gauge | members that train |
    | `evermoe_step_seconds` | histogram | from the begin of a step to that of the next |
    | `evermoe_recoveries_total` | counter | recoveries and other changes of members, the start included |
    | `evermoe_recovery_seconds_total` | counter, by `phase` | what they took |
    | `evermoe_steps_lost_total` | counter | committed steps that were undone |
    | `evermoe_tokens_lost_total` | counter | tokens whose updates experts have lost |
    | `evermoe_skipped_total` | counter | updates left out, as a loss or a gradient was not finite |
    | `evermoe_fetched_bytes_total` | counter | what this member got in recoveries |
    | `evermoe_copied_bytes_total` | counter | snapshots that this member sent |
    | `evermoe_damaged_total` | counter | copies that were not what they should have been |
    | `evermoe_survives_losses` | gauge, by `nodes` | probability that a loss of one, or two at once, is survived |
    | `evermoe_checkpoint_step` | gauge | steps in the newest checkpoint |

    Args:
        port: serves them at `http://…:port/metrics`, on all interfaces; None: does not serve them, as where `registry`
            is served already.
        registry: where the metrics are registered; None for one of its own.

    Raises:
        ModuleNotFoundError: there is no `prometheus_client`: `pip install 'evermoe[observe]'`.
        OSError: the port is taken.
    """

    def __init__(self, port: int | None = None, *, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client as prometheus

        self.registry = prometheus.CollectorRegistry() if registry is None else registry

        def make(kind: Any, name: str, what: str, *labels: str, **options: Any) -> Any:
            return kind(f"evermoe_{name}", what, labels, registry=self.registry, **options)

        gauge, counter = prometheus.Gauge, prometheus.Counter
        self._step = make(gauge, "step", "Steps taken that no failure which the preset covers undoes")
        self._loss = make(gauge, "loss", "Mean loss of the last committed step")
        self._members = make(gauge, "members", "Members that train")
        self._step_seconds = make(
            prometheus.Histogram, "step_seconds", "From the begin of a step to that of the next", buckets=STEP_BUCKETS
        )
        self._recoveries = make(counter, "recoveries", "Recoveries and other changes of members")
        self._recovery_seconds = make(counter, "recovery_seconds", "Time that they took", "phase")
        self._steps_lost = make(counter, "steps_lost", "Committed steps that were undone")
        self._tokens_lost = make(counter, "tokens_lost", "Tokens whose updates experts have lost")
        self._skipped = make(counter, "skipped", "Updates left out, as a loss or a gradient was not finite")
        self._fetched = make(counter, "fetched_bytes", "What this member got in recoveries")
        self._copied = make(counter, "copied_bytes", "Snapshots that this member sent")
        self._damaged = make(counter, "damaged", "Copies that were not what they should have been")
        self._survives = make(gauge, "survives_losses", "Probability that a loss of so many nodes is survived", "nodes")
        self._checkpoint = make(gauge, "checkpoint_step", "Steps in the newest checkpoint")
        self._notes: dict[type[Event], Callable[[Any], None]] = {
            Begin: self._note_begin,
            Commit: self._note_commit,
            Skipped: self._note_skipped,
            Arranged: self._note_arranged,
            Recovered: self._note_recovered,
            Chunk: self._note_chunk,
            Damaged: self._note_damaged,
            Checkpoint: self._note_checkpoint,
        }
        self._begun: float | None = None
        self._sent = 0
        self._lock = threading.Lock()
        """Events come from several threads."""
        if port is not None:
            prometheus.start_http_server(port, registry=self.registry)

    def __call__(self, event: Event) -> None:
        """Counts an event."""
        note = self._notes.get(type(event))
        if note is not None:
            with self._lock:
                note(event)

    def _note_begin(self, event: Begin) -> None:
        now = time.monotonic()
        if self._begun is not None:
            self._step_seconds.observe(now - self._begun)
        self._begun = now

    def _note_commit(self, event: Commit) -> None:
        self._step.set(event.step + 1)
        self._loss.set(event.loss)
        self._members.set(event.members)

    def _note_skipped(self, event: Skipped) -> None:
        self._skipped.inc()

    def _note_arranged(self, event: Arranged) -> None:
        self._survives.labels(nodes="1").set(event.survives_one)
        self._survives.labels(nodes="2").set(event.survives_two)

    def _note_recovered(self, event: Recovered) -> None:
        self._begun = None  # the step that it interrupted does not count
        self._recoveries.inc()
        for phase, seconds in event.seconds.items():
            self._recovery_seconds.labels(phase=phase).inc(seconds)
        self._steps_lost.inc(event.steps_lost)
        self._tokens_lost.inc(sum(event.lost_tokens.values()))
        self._fetched.inc(event.fetched_bytes)
        self._step.set(event.step)
        self._members.set(event.members)

    def _note_chunk(self, event: Chunk) -> None:
        self._copied.inc(event.sent - self._sent if event.sent > self._sent else event.sent)
        self._sent = event.sent if event.sent < event.total else 0

    def _note_damaged(self, event: Damaged) -> None:
        self._damaged.inc()

    def _note_checkpoint(self, event: Checkpoint) -> None:
        self._checkpoint.set(event.step)
