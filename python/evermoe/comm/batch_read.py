"""A member's current read of its batch, as seen by another thread."""

from __future__ import annotations

import time
from collections.abc import Callable


class BatchRead:
    """Tracks since when the training thread has waited for its batch, and reports a wait that is long."""

    def __init__(self) -> None:
        self._current: tuple[float, Callable[[float], None]] | None = None
        """Time at which the read in progress began, and what to call once if it is long."""
        self._is_reported = False

    @property
    def is_on(self) -> bool:
        """Whether the training thread reads its batch now."""
        return self._current is not None

    def begin_read(self, on_long: Callable[[float], None]) -> None:
        """Begin a read; `on_long` is called with its seconds so far, once, if it turns out to be long."""
        self._is_reported = False
        self._current = time.monotonic(), on_long

    def end_read(self) -> float:
        """End the read, and return its seconds."""
        assert self._current is not None
        (began, _), self._current = self._current, None
        return time.monotonic() - began

    def report_long(self, limit: float) -> None:
        """Report the read in progress if it has taken more than `limit` seconds, and is not reported yet."""
        current = self._current
        if current is None or self._is_reported:
            return
        began, on_long = current
        seconds = time.monotonic() - began
        if seconds > limit:
            self._is_reported = True
            on_long(seconds)
