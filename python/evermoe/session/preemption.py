"""Leaving on notice: the signals with which schedulers announce that a process must end soon.

Schedulers and clouds send SIGTERM before they take a node. SLURM, submitit and Lightning send SIGUSR1 or SIGUSR2 to all
processes of a job before its time limit. A member leaves on each of them after its step, which no other member repeats.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from evermoe.errors import LEFT_CODE, REQUEUE_CODE
from evermoe.session.training_driver import TrainingDriver

logger = logging.getLogger(__name__)

ONE_NOTICE_SECONDS = 2.0
"""Time in which a second SIGTERM counts as the first: schedulers send it to each process, and launchers forward it."""
CODES = {signal.SIGTERM: LEFT_CODE, signal.SIGUSR1: REQUEUE_CODE, signal.SIGUSR2: REQUEUE_CODE}
"""Exit code of a process that has left on each signal."""


class PreemptionHandler:
    """Asks to leave when a signal of `CODES` comes, and ends the process if that takes too long.

    The first signal decides about the exit code. A second SIGTERM ends the process at once, unless it comes with the
    first one.

    Args:
        leave: asks to leave after the step.
        limit: seconds that this may take; 0: signals are ignored.
        driver: of the member; before it takes part in the job a signal ends it at once.
    """

    def __init__(self, leave: Callable[[], None], limit: float, driver: TrainingDriver) -> None:
        self._leave, self._limit, self._history = leave, limit, driver.history
        driver.obey_before_job = self._obey_before_job
        self._came: signal.Signals | None = None
        self._terminated = 0.0
        """Time of the first SIGTERM; 0 before it."""
        self._timer: threading.Timer | None = None

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Handle signals in the block, unless this is not the main thread or the script has handlers of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        own = [each for each in CODES if is_main and self._limit and signal.getsignal(each) is signal.SIG_DFL]
        for each in own:
            signal.signal(each, self._comes)
        try:
            yield
        finally:
            for each in own:
                signal.signal(each, signal.SIG_DFL)
            if self._timer is not None:
                self._timer.cancel()

    def evict(self) -> None:
        """Leave after the step as on SIGTERM, without a time limit. No-op after a signal."""
        if self._came is None:
            self._came = signal.SIGTERM
            self._leave()

    def obey(self) -> None:
        """End the process of a member that has left its job, if a signal or `evict` has requested it.

        Raises:
            SystemExit: one has.
        """
        if self._came is not None:
            raise SystemExit(CODES[self._came])

    def _obey_before_job(self) -> None:
        if self._came is not None and not self._history.reports:
            raise SystemExit(CODES[self._came])

    def _comes(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._came is not None and self._terminated and now - self._terminated > ONE_NOTICE_SECONDS:
                os._exit(CODES[self._came])
            self._terminated = self._terminated or now
        if self._came is not None:
            return
        self._came = signal.Signals(number)
        self._obey_before_job()
        logger.warning("%s: this process leaves its job after the step", self._came.name)
        self._leave()
        self._timer = threading.Timer(self._limit, self._give_up, [self._came])
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, came: signal.Signals) -> None:
        logger.warning(
            "%s came %g s ago (drain_timeout), and no step was completed since: this process ends",
            came.name,
            self._limit,
        )
        os._exit(CODES[came])
