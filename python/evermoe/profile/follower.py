"""A thread that notices when a GPU's streams, which lag behind the host, reach a point."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from evermoe.process.native_calls import native_call
from evermoe.profile.clocks import Event

CLOSE_SECONDS = 5.0
"""Seconds for a GPU to reach the last points."""
DRIFT = 1e-4
"""Fraction by which a GPU's clock may be slower than the host's."""

RELAXED = 2
"""CUDA's `cudaStreamCaptureModeRelaxed`."""


class StreamFollower:
    """Waits in a thread for events on a GPU's streams, in the order of their registration.

    An event that is reached before earlier ones is reported with them. Captures of other streams into CUDA graphs are
    not disturbed.
    """

    def __init__(self) -> None:
        self._reached: queue.SimpleQueue[tuple[Event | None, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._last: tuple[Event, int] | None = None
        """The latest mark and its time."""
        self._thread = threading.Thread(target=self._run, name="evermoe-follower", daemon=True)
        self._thread.start()

    def follow(self, event: Event, notify: Callable[[int], None]) -> None:
        """Call `notify` in the thread, with the time of `time.perf_counter_ns`, when an event is reached."""
        self._reached.put((event, notify))

    def mark(self, notify: Callable[[int], None]) -> None:
        """Call `notify` in the thread, with the time at which the current stream reaches this point.

        Between marks of one GPU the time is that of its own clock: the thread may be late to wake. A stream that is
        captured into a CUDA graph has no such points.
        """
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record()
            self.follow(event, partial(self._tell_mark, event, notify))

    def wait_for_marks(self) -> None:
        """Wait until all points so far are reported; for a limited time, as a GPU may never reach them."""
        told = threading.Event()
        self._reached.put((None, lambda _: told.set()))
        told.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """End the thread once all points are reached, within the limit of `wait`."""
        self._reached.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        _allow_waits_during_captures()
        while (each := self._reached.get()) is not None:
            event, notify = each
            with (
                native_call(),
                suppress(RuntimeError),
            ):  # the GPU has failed; the thread that computes on it gets the error
                if event is not None:
                    event.synchronize()
                notify(time.perf_counter_ns())

    def _tell_mark(self, event: Event, notify: Callable[[int], None], now: int) -> None:
        at = now
        if self._last is not None:
            before, then = self._last
            at = min(now, then + round(before.elapsed_time(event) * 1e6 * (1 + DRIFT)))
        self._last = event, at
        notify(at)


def _allow_waits_during_captures() -> None:
    """Allow this thread's waits while another thread captures a stream into a CUDA graph, which they would
    invalidate."""
    exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)  # torch has loaded its runtime
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(RELAXED)))
