"""Request for another machine from a cloud or a scheduler, by a command or a function, when a member is lost."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from evermoe.events import MemberLost

logger = logging.getLogger(__name__)

COMMAND_SECONDS = 600.0
"""Seconds that a command may take; then it is killed."""
CLOSE_SECONDS = 5.0
"""Seconds for which the end of a session waits for a running call."""

Hook = Callable[[MemberLost], object]
"""Function that is called with each lost member, in a separate thread."""


class OnLost:
    """Calls a hook for lost members, one after the other, in a separate thread; training never waits for it.

    If a hook fails, a warning is logged, and it is not called again for that loss.

    Args:
        hook: a shell command or a function of the event. A command gets the environment of this process, extended by
            `variables`, and the event as JSON on its standard input.
    """

    def __init__(self, hook: str | Hook) -> None:
        self._hook = hook
        self._queue: queue.SimpleQueue[MemberLost | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over: set[str] = set()

    def call(self, gone: MemberLost) -> None:
        """Queue a call of the hook for a loss."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="evermoe-on-lost", daemon=True)
            self._thread.start()
        self._queue.put(gone)

    def is_over(self, key: str) -> bool:
        """Return whether the call for the loss with this `MemberLost.key` has ended, successfully or not."""
        return key in self._over

    def close(self) -> None:
        """Wait a little for the queued calls; later ones are ignored."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (gone := self._queue.get()) is not None:
            began = time.monotonic()
            try:
                problem = self._ask(gone)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                logger.warning("on_lost failed for %s and is not called again for it: %s", gone.key, problem)
            else:
                logger.warning("on_lost was called for %s, in %.1f s", gone.key, time.monotonic() - began)
            self._over.add(gone.key)

    def _ask(self, gone: MemberLost) -> str:
        """Call the hook. Return what went wrong; empty for success."""
        if isinstance(self._hook, str):
            return _run(self._hook, gone)
        self._hook(gone)
        return ""


def _run(command: str, gone: MemberLost) -> str:
    """Run a command that may outlive this process. Return what went wrong; empty for success."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env=os.environ | variables(gone),
        stdin=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        with suppress(BrokenPipeError):  # the command need not read its input
            process.communicate(json.dumps(gone.fields()), COMMAND_SECONDS)
        code = process.wait(COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the command was killed, as it took longer than {COMMAND_SECONDS:g} s"
    return f"the command was killed by signal {-code}" if code < 0 else f"the command ended with {code}" if code else ""


def variables(gone: MemberLost) -> Mapping[str, str]:
    """Return the environment variables of a command: `EVERMOE_LOST_KIND` for the field `kind`, and so on.

    >>> event = MemberLost("a-1-3", "big", "a-1", "a", "", "train", "host", 7, 3, "a reason", 3, 4, 1)
    >>> found = variables(event)
    >>> found["EVERMOE_LOST_KIND"], found["EVERMOE_LOST_WANTED"]
    ('host', '4')
    """
    return {f"EVERMOE_LOST_{name.upper()}": str(value) for name, value in gone.fields().items()}
