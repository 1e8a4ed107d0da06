"""Marks in time: nanoseconds of the host's monotonic clock, and CUDA events that become such nanoseconds later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> Any:
        """Marks the current stream."""

    def synchronize(self) -> Any:
        """Waits until the mark is reached."""

    def query(self) -> bool:
        """Whether it is reached."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from this mark to the other."""


Mark = int | Event
"""A point in time: nanoseconds of `time.perf_counter_ns`, or an event on a stream."""


class Clock:
    """Makes marks, on the host or on a GPU's current stream, and says when they were.

    An event is placed on the host's clock by an anchor: an event that was waited for, and the host's time then. The
    anchor moves along (`advance`), because `elapsed_time` is milliseconds in float32: after a minute it knows no more
    than 4 microseconds. `anchor` takes a new one, as the two clocks drift apart.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        self.device = device
        # `blocking`: a thread that waits for an event leaves its processor to others.
        self._new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True, blocking=True))
        self._anchor: tuple[Event, float] | None = None
        self._on_gpu = device.type == "cuda"
        self.anchor()

    def anchor(self) -> None:
        """Waits for the current stream and notes the time of an event on both clocks. Nothing without a GPU."""
        if self._on_gpu:
            event = self._record()
            event.synchronize()
            self._anchor = (event, float(time.perf_counter_ns()))

    def mark(self, device: torch.device | None = None) -> Mark:
        """Now: on the stream, if the device (by default this clock's) is a GPU, else on the host."""
        on_gpu = self._on_gpu if device is None else device.type == "cuda"
        return self._record() if on_gpu else time.perf_counter_ns()

    def is_capturing(self) -> bool:
        """Whether the stream records a CUDA graph, where marks would be nodes of the graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _record(self) -> Event:
        event = self._new_event()
        event.record()
        return event

    def nanoseconds(self, mark: Mark) -> float:
        """When the mark was, on the host's clock. Waits for an event that is not reached yet."""
        if isinstance(mark, int):
            return float(mark)
        if self._anchor is None:  # work on a GPU in a run whose own device is the CPU
            self._anchor = (mark, 0.0)
            mark.synchronize()
            self._anchor = (mark, float(time.perf_counter_ns()))
        if not mark.query():
            mark.synchronize()
        event, at = self._anchor
        return at + event.elapsed_time(mark) * 1e6

    def advance(self, mark: Mark) -> None:
        """Takes a mark that is reached as the new anchor."""
        if not isinstance(mark, int):
            self._anchor = (mark, self.nanoseconds(mark))
