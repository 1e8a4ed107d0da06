"""Marks in time: nanoseconds of the host's monotonic clock, and CUDA events that convert to such nanoseconds later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """The methods of `torch.cuda.Event` that are used."""

    def record(self) -> Any:
        """Mark the current stream."""

    def synchronize(self) -> Any:
        """Wait until the stream has reached the mark."""

    def query(self) -> bool:
        """Return whether the stream has reached the mark."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this mark to the other."""


Mark = int | Event
"""A point in time: nanoseconds of `time.perf_counter_ns`, or an event on a stream."""


class Clock:
    """Makes marks, on the host or on a GPU's current stream, and converts them to the host's time.

    An anchor, an event with a known time of the host, relates the two clocks. It must be recent: `elapsed_time` returns
    float32 milliseconds, whose resolution after a minute is 4 microseconds. `advance` moves the anchor along; `anchor`
    takes a new one, as the clocks drift apart.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        self.device = device
        # `blocking`: a thread that waits for an event does not spin.
        self._new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True, blocking=True))
        self._anchor: tuple[Event, float] | None = None
        self._on_gpu = device.type == "cuda"
        self.anchor()

    def anchor(self) -> None:
        """Wait for the current stream and record the time of an event on both clocks. No-op without a GPU."""
        if self._on_gpu:
            event = self._record()
            event.synchronize()
            self._anchor = (event, float(time.perf_counter_ns()))

    def mark(self, device: torch.device | None = None) -> Mark:
        """Return a mark of now: on the stream, if the device (by default this clock's) is a GPU, else on the host."""
        on_gpu = self._on_gpu if device is None else device.type == "cuda"
        return self._record() if on_gpu else time.perf_counter_ns()

    def is_capturing(self) -> bool:
        """Return whether the stream records a CUDA graph, in which marks would become nodes of the graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _record(self) -> Event:
        event = self._new_event()
        event.record()
        return event

    def nanoseconds(self, mark: Mark) -> float:
        """Return the time of a mark on the host's clock. Waits for an event that is not reached yet."""
        if isinstance(mark, int):
            return float(mark)
        if self._anchor is None:  # an event of a GPU, although the profiler's device is the CPU
            self._anchor = (mark, 0.0)
            mark.synchronize()
            self._anchor = (mark, float(time.perf_counter_ns()))
        if not mark.query():
            mark.synchronize()
        event, at = self._anchor
        return at + event.elapsed_time(mark) * 1e6

    def advance(self, mark: Mark) -> None:
        """Use a reached mark as the new anchor."""
        if not isinstance(mark, int):
            self._anchor = (mark, self.nanoseconds(mark))
