"""Time that a member waits for its batches, and what to report of a loader that is slow or stuck."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from evermoe.comm.membership import MembershipManager
from evermoe.data.sampler import Sampler, Share
from evermoe.events import SlowLoader
from evermoe.events.base_event import Listener

logger = logging.getLogger(__name__)

RECENT_STEPS = 16
"""Steps over which the waits are judged, by their median: a single long wait, such as that of the first batch, of a new
epoch or after a recovery, counts as little as any other."""
SLOW_FRACTION = 0.25
"""Part of a step from which on its wait is long; a loader counts as fast again below half of it."""
SLOW_SECONDS = 0.01
"""Seconds below which no wait is long: with steps of milliseconds everything takes a large part of them."""


class LoaderWatch:
    """Measures how long this member waits for its batches, and names a loader that is slow or stuck.

    Any sampler is measured the same way: its shares, and its states, for which many read the next batch.

    Args:
        sampler: reads the batches.
        membership: publishes that this member reads, for those that wait for it.
        emit: of the session.
    """

    def __init__(self, sampler: Sampler, membership: MembershipManager, emit: Listener) -> None:
        self._sampler, self._membership, self._emit = sampler, membership, emit
        self._seconds = 0.0
        """Seconds of waits since `take_seconds`."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Seconds and fraction of the waits of the latest steps."""
        self._is_slow = self._has_warned = False

    def share(self, step: int, rank: int, size: int) -> Share:
        """Return the sampler's share of `rank` among `size` members in a step."""
        with self.reading(step):
            return self._sampler.share(rank, size)

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Count the block as a wait for the batch of a step."""
        began = time.monotonic()
        try:
            activity = self._membership.failure_detector.activity
            with activity.own_time.part("loader"), activity.reading(partial(self._report_stuck, step)):
                yield
        finally:
            self._seconds += time.monotonic() - began

    def restart(self) -> None:
        """Judge only the steps that follow: a recovery has ended."""
        self._recent.clear()
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return the seconds of the waits since the previous call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def end_step(self, step: int, waited: float, seconds: float) -> None:
        """Judge the loader after a step of some seconds, in `waited` of which this member waited for its batch."""
        self._recent.append((waited, waited / seconds if seconds else 0.0))
        if len(self._recent) < RECENT_STEPS:
            return
        typical, fraction = (median(each) for each in zip(*self._recent, strict=True))
        if self._is_slow:
            self._is_slow = fraction >= SLOW_FRACTION / 2
        elif fraction >= SLOW_FRACTION and typical >= SLOW_SECONDS:
            self._is_slow = True
            self._emit(SlowLoader(step, self._membership.id, self._loader, typical, fraction, "slow"))
            self._warn_slow(typical, fraction)

    @property
    def _loader(self) -> str:
        return type(self._sampler).__name__

    def _warn_slow(self, seconds: float, fraction: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s waits %.3g s for its batch in each step, %.0f %% of the step's time (median of %d steps), and the "
            "others wait for it: its %s is slow. Read ahead with worker processes (num_workers), or do less for each "
            "sample",
            self._membership.id,
            seconds,
            100 * fraction,
            RECENT_STEPS,
            self._loader,
        )

    def _report_stuck(self, step: int, seconds: float) -> None:
        """Report a wait that is long, in the thread that has noticed it."""
        self._emit(SlowLoader(step, self._membership.id, self._loader, seconds, 1.0, "stuck"))
        logger.warning(
            "%s has waited %.3g s for its batch of step %d, and its %s has not returned: members that wait for it "
            "continue without it after hang_timeout",
            self._membership.id,
            seconds,
            step,
            self._loader,
        )
