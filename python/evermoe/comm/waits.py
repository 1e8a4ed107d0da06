"""Waits for gloo's messages that another thread can end.

Gloo does not tell the one that waits for a message that its connection is gone if part of the message has been sent or
has come. So a second thread waits for gloo, and is left behind with the message if the group is dropped meanwhile.
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
from evermoe.native_calls import native_call

EXCESS = 1.25
"""Largest duration of a wait, in multiples of its limit. Gloo's own limit comes first, unless the clock is set back."""


class Clocks(NamedTuple):
    """A moment, on two clocks."""

    steady: float
    """Seconds of `time.monotonic`."""
    wall: float
    """Seconds of `time.time`, which gloo's timed waits follow."""

    @classmethod
    def now(cls) -> Clocks:
        """This moment."""
        return cls(time.monotonic(), time.time())

    def seconds(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.steady

    def set_back(self) -> float:
        """Seconds by which the wall clock was set back since then; negative if it was set forward."""
        now = Clocks.now()
        return (now.steady - self.steady) - (now.wall - self.wall)


def end_waits(group: Any, rank: int, size: int) -> None:
    """Ends all threads' waits for messages of a gloo group, here and at the peers.

    Gloo has no call for that, and its sockets stay open while a thread waits. But a wait that times out closes them
    all. One for a peer that has closed its own side fails at once instead, and ends no others: then the next is tried.
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
    """One wait for one work of gloo's, in a thread that waits for it and in one that can be told to go on.

    Args:
        work: nobody else keeps a reference, as a work that lives keeps sockets open.
    """

    _own = threading.local()
    """Each thread's waiter; a new one after one was left behind."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._over, self._lock = threading.Event(), threading.Lock()
        self._is_ended = False
        self._failure: str | None = None

    def run(self, limit: timedelta) -> str | None:
        """Waits until the work is done or the wait is ended. Returns why it is not done; None if it is."""
        waiter = getattr(self._own, "waiter", None)
        if waiter is None:
            waiter = self._own.waiter = _Waiter()
        waiter.take(self, limit)
        if not self._over.wait(EXCESS * limit.total_seconds() + 1.0):
            self.end()
            self._own.waiter = None
            return f"timed out after {limit.total_seconds():g} s, as gloo has not: the wall clock was set back"
        if self._is_ended:
            self._own.waiter = None
            return "the wait was ended"
        return self._failure

    def end(self) -> None:
        """Lets the thread that waits go on without the work, whose group is dropped."""
        with self._lock:
            if not self._over.is_set():
                self._is_ended = True
                self._over.set()

    def finish(self, limit: timedelta) -> bool:
        """Waits for gloo. Returns whether the other thread is still there."""
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
            is_there = not self._over.is_set()
            self._over.set()
        return is_there


class _Waiter:
    """A thread that waits for one work after the other, until it is left behind or the one that it waits for ends."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[tuple[Wait, timedelta] | None] = queue.SimpleQueue()
        threading.Thread(target=_finish_all, args=[self._waits], name="evermoe-wait", daemon=True).start()

    def take(self, wait: Wait, limit: timedelta) -> None:
        self._waits.put((wait, limit))

    def __del__(self) -> None:
        self._waits.put(None)


def _finish_all(waits: queue.SimpleQueue[tuple[Wait, timedelta] | None]) -> None:
    """Keeps no reference to its waiter: that lives as long as the thread whose waiter it is."""
    while (each := waits.get()) is not None:
        wait, limit = each
        del each
        if not wait.finish(limit):
            return
        del wait
