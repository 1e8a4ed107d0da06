"""Calls of torch's and torchft's native code in background threads, which end before the interpreter does.

A daemon thread that returns from native code while the interpreter ends is cancelled by CPython (before 3.14), by
`pthread_exit`. That unwinds the thread's stack. torchft's frames of Rust and torch's frames of C++ do not let it pass,
and the process aborts by SIGABRT ("exception not rethrown", "terminate called without an active exception"). The exit
code of the script is lost then.

So such calls are marked. When the script has ended, an exit handler closes what is still open, which ends most of them,
and waits for the others. A thread that is about to begin a call then never does. A call that cannot return before the
process has ended is left alone: that is harmless. This package's own native code needs no mark: its threads stay in it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

EXIT_SECONDS = 10.0
"""Time that calls get to return before the interpreter ends."""


class Closable(Protocol):
    """Owner of connections for which background threads wait."""

    def close(self) -> None:
        """Closes the connections; twice is fine."""


class _Calls:
    """The marked calls of all background threads of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There are no calls, and nothing is open: as in a child of this process, which has none of its threads."""
        self._changed = threading.Condition()
        self._until: dict[int, list[float]] = {}
        """By thread, when each of its calls may return at the earliest, on the clock of `time.monotonic`."""
        self._is_ending = False
        self.open: weakref.WeakSet[Closable] = weakref.WeakSet()

    def begin(self, until: float) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        with self._changed:
            if not self._is_ending:
                self._until.setdefault(threading.get_ident(), []).append(until)
                return
        threading.Event().wait()  # without end: the process is about to be over

    def end(self) -> None:
        with self._changed:
            mine = self._until.get(threading.get_ident(), [])
            if mine:
                mine.pop()
            if not mine:
                self._until.pop(threading.get_ident(), None)
            self._changed.notify_all()

    def finish(self) -> None:
        """Closes what is open, and waits until no call is under way that returns before the process has ended."""
        for each in list(self.open):
            each.close()
        end = time.monotonic() + EXIT_SECONDS
        with self._changed:
            self._is_ending = True
            self._changed.wait_for(lambda: all(max(calls) > end for calls in self._until.values()), EXIT_SECONDS)


_calls = _Calls()

os.register_at_fork(after_in_child=_calls.forget)
atexit.register(_calls.finish)


@contextmanager
def native_call(seconds: float = 0.0) -> Iterator[None]:
    """Marks a call of native code in a background thread.

    Args:
        seconds: that it takes at least if nobody ends it.
    """
    _calls.begin(time.monotonic() + seconds)
    try:
        yield
    finally:
        _calls.end()


def close_at_exit(owner: Closable) -> None:
    """Closes `owner` when the interpreter ends, unless it is freed before."""
    _calls.open.add(owner)
