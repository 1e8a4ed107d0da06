"""When the network is idle: windows between the collectives of the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from evermoe.comm.group import Group

ANY_TIME = -1
"""In place of a window's number: beside compute, whether a window is open or not."""
PAUSED_STEPS, PAUSED_SECONDS = 3, 10.0
"""Training has paused where no collective has begun or ended for as long as so many steps, and for so many seconds."""
POLL_SECONDS = 0.5
"""Time between two looks whether it has."""


class TimedStep(NamedTuple):
    """A step as the pacer saw it. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    busy: list[tuple[str, int, int]]
    """Name, start and end of what the training thread kept the network busy with, one after the other."""


class Opening(NamedTuple):
    """When a message may begin."""

    window: int | None
    """Number of the window that is open; None if the training thread is in a hurry, or any time is right."""
    at: int
    """Now: no collective had begun yet."""


class Pacer:
    """Knows when the network is idle, from what the training thread's group tells of its collectives.

    Windows open when a collective ends and close when the next one begins, early or late as the step may be. After
    `expect` it also knows their numbers and how long they last, and lets no message begin that would not end in time.

    A step lasts from one `begin_step` to the next: from when a version of the state is there to the next one.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._change = threading.Condition()
        self._is_busy = False
        self._busy_since = 0
        self._began = self._changed = now()
        self._step_lasts = 0
        self.step = 0
        """Steps that have begun."""
        self._is_hurried = False
        self._seen: dict[str, int] = {}
        self._places: Mapping[tuple[str | None, int], tuple[int, float]] = {}
        self._window: int | None = None
        self._reached = -1
        self._closes = 0.0
        self._wanted = 0
        self._recorded: list[TimedStep] = []
        self._step: tuple[int, list[tuple[str, int, int]]] | None = None

    def attach(self, group: Group) -> None:
        """Follows the collectives of a group."""
        group.on_begin, group.on_end = self._begins, self._ends

    def expect(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Sets the windows of a step: (collective, how often it has ended in the step) → (number, seconds)."""
        with self._change:
            self._places = dict(places)
            self._window = None
            self._change.notify_all()

    # ---- the training thread

    def begin_step(self) -> None:
        """A step begins, and with it the window that follows no collective, if there is one."""
        with self._change:
            now = self._now()
            self._step_lasts, self._began, self._changed = now - self._began, now, now
            self.step += 1
            self._record_step(now)
            self._seen, self._reached, self._is_hurried = {}, -1, False
            self._open((None, 0), now)
            self._change.notify_all()

    def begin_forward(self) -> None:
        """Collectives since the step's beginning, of an evaluation for example, are none of an ordinary step's."""
        with self._change:
            if self._seen:
                self._seen, self._reached = {}, -1
                self._open((None, 0), self._now())
                self._change.notify_all()

    def hurry(self) -> None:
        """The training thread waits: everything may be sent until the next step begins."""
        with self._change:
            self._is_hurried = True
            self._change.notify_all()

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """The training thread keeps the network busy, or waits for it; like a collective of this name."""
        self._begins(name)
        try:
            yield
        finally:
            self._ends(name)

    def transfer_begins(self) -> None:
        """Something is sent from here, earlier perhaps than planned: the window that is open closes.

        For transfers that run side by side, such as those of a pipeline, in place of an attached group.
        """
        with self._change:
            self._window = None

    def transfer_ends(self, name: str, at: int) -> None:
        """Such a transfer is over since `at`, of `time.perf_counter_ns`; the window after it opened then, if any.

        A thread may be late to say so: what was over before the step began is none of this step's.
        """
        with self._change:
            if at >= self._began:
                self._ends(name, at)

    def _begins(self, name: str) -> None:
        with self._change:
            self._is_busy, self._busy_since = True, self._now()
            self._changed = self._busy_since

    def _ends(self, name: str, at: int | None = None) -> None:
        with self._change:
            now = self._now() if at is None else at
            self._is_busy, self._changed = False, now
            occurrence = self._seen.get(name, 0)
            self._seen[name] = occurrence + 1
            if self._step is not None:
                self._step[1].append((name, self._busy_since, now))
            self._open((name, occurrence), now)
            self._change.notify_all()

    def _open(self, place: tuple[str | None, int], now: int) -> None:
        self._window, seconds = self._places.get(place, (None, 0.0))
        if self._window is not None:
            self._reached = max(self._reached, self._window)
            self._closes = now + seconds * 1e9

    # ---- profiles

    def record(self, steps: int) -> None:
        """Records so many steps, from the next one on; 0 to stop. What was recorded before is forgotten."""
        with self._change:
            self._wanted, self._recorded, self._step = steps, [], None

    def recorded(self) -> list[TimedStep]:
        """The steps recorded so far that are over."""
        with self._change:
            return list(self._recorded)

    def _record_step(self, now: int) -> None:
        if self._step is not None:
            self._recorded.append(TimedStep(self._step[0], now, self._step[1]))
        self._step = (now, []) if len(self._recorded) < self._wanted else None

    # ---- the couriers' threads

    def wait(self, window: int | None, seconds: float, step: int | None = None) -> Opening:
        """Waits until a message of so many seconds may begin.

        `window`: `ANY_TIME`, or the one of `step` (None: of any) that it was planned for; it may also go later, and at
        any time once training has paused: the network is idle then, and no window would open.
        """
        with self._change:
            while not self._may_begin(window, seconds, step, now := self._now()):
                self._change.wait(POLL_SECONDS)
            return Opening(None if self._is_hurried or window == ANY_TIME else self._window, now)

    def may_begin(self, window: int | None, seconds: float, step: int | None = None) -> bool:
        """Whether `wait` would return at once."""
        with self._change:
            return self._may_begin(window, seconds, step, self._now())

    def _may_begin(self, window: int | None, seconds: float, step: int | None, now: int) -> bool:
        if self._is_hurried:
            return True
        if self._is_busy:
            return False
        has_paused = now - self._changed > max(PAUSED_STEPS * self._step_lasts, PAUSED_SECONDS * 1e9)
        if not self._places or window == ANY_TIME or has_paused:
            return True
        in_time = self._window is not None and now + seconds * 1e9 <= self._closes
        planned = self.step if step is None else step
        return in_time and (window is None or (self.step, self._reached) >= (planned, window))
