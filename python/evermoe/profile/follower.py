"""A thread that says when a GPU's streams, which the host runs ahead of, come to a point."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from evermoe.native_calls import native_call
from evermoe.profile.clocks import Event

CLOSE_SECONDS = 5.0
"""Time for a GPU to reach the last points."""
DRIFT = 1e-4
"""Part by which a GPU's clock may be slower than the host's."""

RELAXED = 2
"""CUDA's `cudaStreamCaptureModeRelaxed`."""


class StreamFollower:
    """Waits in a thread for events on a GPU's streams, in the order in which they come here.

    One that is reached before those that came earlier is told of with them. A capture of another stream into a CUDA
    graph goes on meanwhile.
    """

    def __init__(self) -> None:
        self._reached: queue.SimpleQueue[tuple[Event | None, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._last: tuple[Event, int] | None = None
        """The latest mark, and when it was."""
        self._thread = threading.Thread(target=self._run, name="evermoe-follower", daemon=True)
        self._thread.start()

    def follow(self, event: Event, tell: Callable[[int], None]) -> None:
        """Calls `tell` in the thread, with the time of `time.perf_counter_ns`, when an event is reached."""
        self._reached.put((event, tell))

    def mark(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` in the thread, with the time at which the current stream has come to this point.

        Between marks of one GPU the time is that of its own clock: the thread may be late to wake. A stream that is
        captured into a CUDA graph has no such points.
        """
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record()
            self.follow(event, partial(self._tell_mark, event, tell))

    def wait(self) -> None:
        """Waits until all points so far are told of; for a while, as a GPU may never reach them."""
        told = threading.Event()
        self._reached.put((None, lambda _: told.set()))
        told.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the thread, once all points are reached; waits for that as `wait` does."""
        self._reached.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        _wait_beside_captures()
        while (each := self._reached.get()) is not None:
            event, tell = each
            with (
                native_call(),
                suppress(RuntimeError),
            ):  # the GPU has failed: the thread that computes on it gets the error
                if event is not None:
                    event.synchronize()
                tell(time.perf_counter_ns())

    def _tell_mark(self, event: Event, tell: Callable[[int], None], now: int) -> None:
        at = now
        if self._last is not None:
            before, then = self._last
            at = min(now, then + round(before.elapsed_time(event) * 1e6 * (1 + DRIFT)))
        self._last = event, at
        tell(at)


def _wait_beside_captures() -> None:
    """Allows this thread's waits while another one captures a stream into a CUDA graph, which they would spoil."""
    exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)  # torch has loaded its runtime
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(RELAXED)))
