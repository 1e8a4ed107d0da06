"""Ends calls of torch's and torchft's native code in background threads before the interpreter ends.

CPython before 3.14 cancels a daemon thread that returns from native code while the interpreter ends, with
`pthread_exit`, which unwinds the thread's stack. torchft's Rust frames and torch's C++ frames do not permit that, and
the process aborts with SIGABRT ("exception not rethrown", "terminate called without an active exception"). The exit
code of the script is then lost.

So such calls are marked. When the script has ended, an exit handler closes all open connections, which ends most calls,
and waits for the others. A thread that is about to begin a call then blocks forever. This package's own native code
needs no mark in threads that never return to Python.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

EXIT_SECONDS = 10.0
"""Maximum time to wait for calls to return before the interpreter ends."""


class Closable(Protocol):
    """Owner of connections for which background threads wait."""

    def close(self) -> None:
        """Close the connections; may be called twice."""


class _Calls:
    """The marked calls of all background threads of this process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all calls and open connections: a forked child has none of this process's threads."""
        self._changed = threading.Condition()
        self._calls: collections.Counter[int] = collections.Counter()
        """Calls under way, by thread."""
        self._is_ending = False
        self.open: weakref.WeakSet[Closable] = weakref.WeakSet()

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        with self._changed:
            if not self._is_ending:
                self._calls[threading.get_ident()] += 1
                return
        threading.Event().wait()  # forever: the process is about to end

    def end(self) -> None:
        with self._changed:
            self._calls -= collections.Counter([threading.get_ident()])
            self._changed.notify_all()

    def finish(self) -> None:
        """Close all open connections, and wait for the calls under way."""
        for each in list(self.open):
            each.close()
        with self._changed:
            self._is_ending = True
            self._changed.wait_for(lambda: not self._calls, EXIT_SECONDS)


_calls = _Calls()

os.register_at_fork(after_in_child=_calls.reset)
atexit.register(_calls.finish)


@contextmanager
def native_call() -> Iterator[None]:
    """Mark a call of native code in a background thread."""
    _calls.begin()
    try:
        yield
    finally:
        _calls.end()


def close_at_exit(owner: Closable) -> None:
    """Close `owner` when the interpreter ends, unless it is freed earlier."""
    _calls.open.add(owner)
