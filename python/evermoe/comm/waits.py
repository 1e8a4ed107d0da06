"""Waits for gloo's messages that another thread can end.

If a connection breaks after part of a message has been sent or received, gloo does not report that to the thread that
waits for the message. So a second thread waits for gloo. If the group is dropped, that thread is abandoned with the
message.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.tags import NEVER_SENT
from evermoe.process.native_calls import native_call

EXCESS = 1.25
"""Longest wait, in multiples of its limit. Gloo's own timeout comes first, unless the wall clock is set back."""


class Clocks(NamedTuple):
    """A point in time on two clocks."""

    steady: float
    """Seconds of `time.monotonic`."""
    wall: float
    """Seconds of `time.time`, which gloo's timed waits follow."""

    @classmethod
    def now(cls) -> Clocks:
        """Return the current time."""
        return cls(time.monotonic(), time.time())

    def seconds(self) -> float:
        """Return the seconds since then."""
        return time.monotonic() - self.steady

    def set_back(self) -> float:
        """Return the seconds by which the wall clock was set back since then; negative if it was set forward."""
        now = Clocks.now()
        return (now.steady - self.steady) - (now.wall - self.wall)


def end_waits(group: Any, rank: int, size: int) -> None:
    """End all threads' waits for messages of a gloo group, on this member and its peers.

    Gloo has no call for that, and its sockets stay open while a thread waits. But a wait that times out closes them
    all. A wait for a peer that has closed its side fails at once instead, and ends no others, so the next is tried.
    """
    for step in range(1, size):
        if _times_out(group, (rank + step) % size):
            return


def _times_out(group: Any, peer: int) -> bool:
    try:
        never = group.recv([torch.empty(1)], peer, NEVER_SENT)
        never.wait(timedelta(milliseconds=1))
    except (RuntimeError, AssertionError) as error:
        return "timed out" in str(error).lower()
    return False


class Wait:
    """A wait for one work of gloo, split over a thread that waits for gloo and a thread that can be released.

    Args:
        work: the work. Keep no other reference, as a live work keeps sockets open.
    """

    _own = threading.local()
    """Each thread's waiter; replaced after one was abandoned."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._over, self._lock = threading.Event(), threading.Lock()
        self._is_ended = False
        self._failure: str | None = None

    def run(self, limit: timedelta) -> str | None:
        """Wait until the work is done or `end_wait` is called; return the failure, or None."""
        waiter = getattr(self._own, "waiter", None)
        if waiter is None:
            waiter = self._own.waiter = _Waiter()
        waiter.submit(self, limit)
        if not self._over.wait(EXCESS * limit.total_seconds() + 1.0):
            self.end_wait()
            self._own.waiter = None
            return f"timed out after {limit.total_seconds():g} s; gloo did not, as the wall clock was set back"
        if self._is_ended:
            self._own.waiter = None
            return "the wait was ended"
        return self._failure

    def end_wait(self) -> None:
        """Release the waiting thread without the work, as the group is dropped."""
        with self._lock:
            if not self._over.is_set():
                self._is_ended = True
                self._over.set()

    def finish_work(self, limit: timedelta) -> bool:
        """Wait for gloo; return whether the other thread still waits for this work."""
        work, self._work = self._work, None
        failure = None
        with native_call(limit.total_seconds()):
            try:
                work.wait(limit)
            except Exception as error:  # of any kind: the group is dropped, and the thread that waits is released
                failure = plain_reason(error)
            del work
        with self._lock:
            self._failure = failure
            still_waits = not self._over.is_set()
            self._over.set()
        return still_waits


class _Waiter:
    """A thread that waits for one work after the other, until it is abandoned or the thread that it serves ends."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[tuple[Wait, timedelta] | None] = queue.SimpleQueue()
        threading.Thread(target=_finish_all, args=[self._waits], name="evermoe-wait", daemon=True).start()

    def submit(self, wait: Wait, limit: timedelta) -> None:
        self._waits.put((wait, limit))

    def __del__(self) -> None:
        self._waits.put(None)


def _finish_all(waits: queue.SimpleQueue[tuple[Wait, timedelta] | None]) -> None:
    """Finish each submitted wait. The function refers to no `_Waiter`, which lives as long as the thread it serves."""
    while (each := waits.get()) is not None:
        wait, limit = each
        del each
        if not wait.finish_work(limit):
            return
        del wait
