"""Leaving on notice: what SIGTERM and SIGUSR1 mean to a member of a job.

Schedulers and clouds send SIGTERM before they take a node. At SIGUSR1 a member leaves likewise, and its process begins
its program anew in the other role: a replica node is promoted to train, a worker demoted to keep copies. So the
protocol knows no change of roles: a member leaves, which repeats no step, and another one joins.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from evermoe.comm.membership_options import Role
from evermoe.errors import LEFT_CODE

logger = logging.getLogger(__name__)

ONE_NOTICE_SECONDS = 2.0
"""Time in which further signals are the same notice: schedulers send it to each process, and launchers pass it on."""


class Notice:
    """Asks to leave when SIGTERM comes, and ends the process if that takes too long; at SIGUSR1 it begins anew.

    Args:
        leave: asks to leave after the step.
        limit: seconds that this may take; 0: neither signal is listened to.
        has_begun: whether this member takes part in the job; until then it is ended at once.
        role: of this member.
        turn: asks whether it may come back in the other role; returns why not, empty if it may.
    """

    def __init__(
        self,
        leave: Callable[[], None],
        limit: float,
        has_begun: Callable[[], bool],
        role: Role,
        turn: Callable[[], str],
    ) -> None:
        self._leave, self._limit, self._has_begun, self._turn = leave, limit, has_begun, turn
        self._other: Role = "replica" if role == "train" else "train"
        self._turns = False
        self._has_come = False
        self._came = 0.0
        self._timer: threading.Timer | None = None

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Listens meanwhile, unless this is not the main thread or the script has handlers of its own."""
        handlers = {signal.SIGTERM: self._comes, signal.SIGUSR1: self._asks_to_turn}
        is_main = threading.current_thread() is threading.main_thread()
        own = [each for each in handlers if is_main and self._limit and signal.getsignal(each) is signal.SIG_DFL]
        for each in own:
            signal.signal(each, handlers[each])
        try:
            yield
        finally:
            for each in own:
                signal.signal(each, signal.SIG_DFL)
            if self._timer is not None:
                self._timer.cancel()

    def obey(self) -> None:
        """Once this member has left its job: ends the process, or begins it anew, if a signal has asked for that.

        Raises:
            SystemExit: SIGTERM has come.
        """
        if self._has_come:
            raise SystemExit(LEFT_CODE)
        if self._turns:
            _begin_anew(self._other)

    def _comes(self, number: int, frame: FrameType | None) -> None:
        if self._has_come:
            if time.monotonic() - self._came > ONE_NOTICE_SECONDS:
                os._exit(LEFT_CODE)
            return
        self._has_come, self._came = True, time.monotonic()
        if not self._has_begun():
            raise SystemExit(LEFT_CODE)
        logger.warning("SIGTERM: this process leaves its job after the step")
        self._leave()
        self._timer = threading.Timer(self._limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _asks_to_turn(self, number: int, frame: FrameType | None) -> None:
        if self._has_come or self._turns:
            return
        begun = self._has_begun()
        problem = self._turn() if begun else "it does not take part in the job yet"
        if problem:
            logger.warning("SIGUSR1: this process keeps its role: %s", problem)
            return
        self._turns = True
        logger.warning("SIGUSR1: this process leaves its job after the step, and comes back with role %r", self._other)
        self._leave()

    def _give_up(self) -> None:
        logger.warning(
            "SIGTERM came %g s ago (leave_limit), and no step was completed since: this process ends", self._limit
        )
        os._exit(LEFT_CODE)


def _begin_anew(role: Role) -> NoReturn:
    """Runs this process's program from its beginning, in another role."""
    os.environ |= {"EVERMOE_ROLE": role, "EVERMOE_SPARE": "0"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
