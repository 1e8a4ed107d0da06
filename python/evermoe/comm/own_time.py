"""Time of a member's training thread for its own work, without its waits for other members."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("compute", "loader", "checkpoint", "processor")
"""Parts of a member's own time. `processor`: the thread could run and had no processor, as other processes of its
machine had them. `compute`: all that the other parts do not have."""


class OwnTime:
    """Measures the seconds of the training thread without those in which it waits for other members.

    Only that thread calls it.
    """

    def __init__(self) -> None:
        self.latest_wait = math.inf
        """Seconds of the latest wait; infinite before the first one."""
        self._clock = _Clock()
        self._waited = 0.0, 0.0
        """Seconds of all waits so far, and the part of them without a processor."""
        self._wait_began = self._step_began = self._clock.now()
        self._waited_before = self._waited
        self._parts = dict.fromkeys(PARTS[1:-1], 0.0)
        """Seconds of the parts since the step began, without those for which it had no processor."""
        self.latest: list[float] = [0.0] * len(PARTS)
        """The latest result of `seconds`."""

    def begin_wait(self) -> None:
        """Begin a wait for other members."""
        self._wait_began = self._clock.now()

    def end_wait(self) -> None:
        """End the wait."""
        (wall, without), (began, before), waited = self._clock.now(), self._wait_began, self._waited
        self.latest_wait = wall - began
        self._waited = waited[0] + wall - began, waited[1] + without - before

    def restart(self) -> None:
        """Begin to measure a step."""
        self._step_began, self._waited_before = self._clock.now(), self._waited
        self._parts = dict.fromkeys(self._parts, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block, without its waits for other members, as a part of `PARTS`."""
        began, waited = self._clock.now(), self._waited
        try:
            yield
        finally:
            wall, without = self._since(began, waited)
            self._parts[name] += wall - without

    def seconds(self) -> list[float]:
        """Return the seconds of each part of `PARTS` since the step began."""
        wall, without = self._since(self._step_began, self._waited_before)
        compute = max(0.0, wall - without - sum(self._parts.values()))
        self.latest = [compute, *self._parts.values(), without]
        return self.latest

    def _since(self, began: tuple[float, float], waited: tuple[float, float]) -> tuple[float, float]:
        """Return the own seconds since then, and the part of them without a processor."""
        wall, without = self._clock.now()
        return (
            wall - began[0] - (self._waited[0] - waited[0]),
            without - began[1] - (self._waited[1] - waited[1]),
        )


class _Clock:
    """The time, and how much of it the calling thread could have run without getting a processor."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._file = -1

    def now(self) -> tuple[float, float]:
        """Return both in seconds; the second is 0 on a system that does not say."""
        if self._thread != (thread := threading.get_ident()):
            self._close()
            self._thread = thread
            try:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._file = -1
        wall = time.monotonic()
        if self._file < 0:
            return wall, 0.0
        try:
            return wall, int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return wall, 0.0

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self._close()
