"""Leaving on notice: what SIGTERM means to a member of a job; schedulers and clouds send it before they take a node."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from evermoe.errors import LEFT_CODE

logger = logging.getLogger(__name__)

ONE_NOTICE_SECONDS = 2.0
"""Time in which further signals are the same notice: schedulers send it to each process, and launchers pass it on."""


class Notice:
    """Asks to leave when SIGTERM comes, and ends the process if that takes too long.

    Args:
        leave: asks to leave after the step.
        limit: seconds that this may take; 0: SIGTERM is not listened to.
        has_begun: whether this member takes part in the job; until then it is ended at once.
    """

    def __init__(self, leave: Callable[[], None], limit: float, has_begun: Callable[[], bool]) -> None:
        self._leave, self._limit, self._has_begun = leave, limit, has_begun
        self.has_come = False
        self._came = 0.0
        self._timer: threading.Timer | None = None

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Listens meanwhile, unless this is not the main thread or the script has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._limit == 0 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._comes)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._timer is not None:
                self._timer.cancel()

    def _comes(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            if time.monotonic() - self._came > ONE_NOTICE_SECONDS:
                os._exit(LEFT_CODE)
            return
        self.has_come, self._came = True, time.monotonic()
        if not self._has_begun():
            raise SystemExit(LEFT_CODE)
        logger.warning("SIGTERM: this process leaves its job after the step")
        self._leave()
        self._timer = threading.Timer(self._limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        logger.warning(
            "SIGTERM came %g s ago (leave_limit), and no step was completed since: this process ends", self._limit
        )
        os._exit(LEFT_CODE)
