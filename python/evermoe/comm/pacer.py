"""Windows in which the network is idle: those between the collectives of the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple, Protocol

from evermoe.comm.group import Group
from evermoe.comm.timed_steps import TimedStep, TimedSteps

ANY_TIME = -1
"""In place of a window's number: concurrently with compute, whether or not a window is open."""
AT_ONCE = -2
"""In place of a window's number: immediately, without the pacer."""
PAUSED_STEPS, PAUSED_SECONDS = 3, 10.0
"""Training has paused if no collective began or ended for as long as this number of steps, and for these seconds."""
WAKE_SECONDS = 1e-3
"""Time that a thread sleeps beyond the moment at which training has paused."""

When = Literal["window", "idle", "background", "vote", "recovery"]
"""Reason why a message may begin.

`window`: an expected idle window is open. `idle`: no collective runs, and windows are unknown or training has paused.
`background`: it was planned for any time. `vote`: training waits for it, before a vote or for memory. `recovery`:
training waits in any case, as the members change or all steps are done.
"""


class Opening(NamedTuple):
    """Start of a message, and the reason for it."""

    when: When
    window: int | None
    """Number of the open window; None outside all windows."""
    at: int
    """Current time, taken before a collective could begin."""


class Follower(Protocol):
    """Reports when a GPU's stream, which lags behind the host, reaches a point."""

    def mark(self, notify: Callable[[int], None]) -> None:
        """Call `notify` in another thread, with the time at which the current stream reached this point."""

    def wait_for_marks(self) -> None:
        """Wait until all marks so far are reported."""


class _Streamed:
    """A collective on a GPU's stream."""

    def __init__(self, name: str, step: int, is_counted: bool) -> None:
        self.name, self.step, self.is_counted = name, step, is_counted
        self.since = 0
        """Time at which the stream reached it."""


class _Followed:
    """Reports a group's collectives to a pacer; those on a GPU's stream when the stream reaches and has passed them."""

    def __init__(self, pacer: Pacer, follower: Follower) -> None:
        self._pacer, self._follower = pacer, follower
        self._latest = _Streamed("", 0, False)

    def begins(self, name: str, on_stream: bool) -> None:
        if on_stream:
            self._latest = _Streamed(name, self._pacer.step, self._pacer._is_counting)
            self._follower.mark(partial(self._pacer._begins, name, of=self._latest))
        else:
            self._pacer._begins(name)

    def ends(self, name: str, on_stream: bool) -> None:
        if on_stream:
            self._follower.mark(partial(self._pacer._ends, name, of=self._latest))
        else:
            self._pacer._ends(name)


class _StepWindows:
    """The windows of a step, and the one that is open."""

    def __init__(self) -> None:
        self.places: Mapping[tuple[str | None, int], tuple[int, float]] = {}
        """As set by `Pacer.expect_windows`; empty while they are unknown."""
        self.reached = -1
        """Largest number of a window that has opened in the step."""
        self.is_closed = False
        """Whether a transfer has closed the window, and none has opened since."""
        self._window: tuple[int, float] | None = None
        """Number of the open window, and the time at which it closes."""
        self._seen: dict[str, int] = {}
        """Number of times that each collective has ended in the step."""

    def expect(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Replace the windows; none is open."""
        self.places = dict(places)
        self._window, self.is_closed = None, False

    @property
    def has_seen_any(self) -> bool:
        """Whether a collective has ended in the step."""
        return bool(self._seen)

    def restart(self, now: int) -> None:
        """Begin a step, and with it the window before its first collective, if there is one."""
        self._seen, self.reached = {}, -1
        self._open((None, 0), now)

    def close(self) -> None:
        """Close the open window, as a transfer begins."""
        self._window, self.is_closed = None, bool(self.places)

    def collective_ended(self, name: str, now: int) -> None:
        """Open the window after a collective, if there is one."""
        occurrence = self._seen.get(name, 0)
        self._seen[name] = occurrence + 1
        self._open((name, occurrence), now)

    def _open(self, place: tuple[str | None, int], now: int) -> None:
        number, seconds = self.places.get(place, (None, 0.0))
        self._window = None if number is None else (number, now + seconds * 1e9)
        if number is not None:
            self.reached, self.is_closed = max(self.reached, number), False

    def with_room(self, seconds: float, now: int) -> int | None:
        """Return the number of the open window if a message of these seconds would end in it, else None."""
        if self._window is None or now + seconds * 1e9 > self._window[1]:
            return None
        return self._window[0]


def _ignore(is_idle: bool) -> None:
    pass


class Pacer:
    """Tracks when the network is idle, by the collectives of the training thread's group.

    A collective on a GPU's stream lasts from when the stream reaches it until the stream has passed it. A window opens
    when a collective ends and closes when the next one begins, whenever that is in the step. After `expect_windows` the
    pacer also knows the windows' numbers and durations, and begins no message that would not end in time.

    A step lasts from one `begin_step` to the next, that is, from one version of the state to the next.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._change = threading.Condition()
        self._running, self._is_counting = 0, True
        self._busy_since = 0
        self._changed = now()
        self._steps = TimedSteps(now())
        self.windows = _StepWindows()
        self._hurry: When | None = None
        """Reason why the training thread waits; None while it does not."""
        self._awaits_some = False
        """Whether it waits only for the messages of its step's vote."""
        self._follower: Follower | None = None
        self.on_idle: Callable[[bool], None] = _ignore
        """Callback: False when a collective begins, or a transfer closes a window. True when no collective runs and the
        next window opens, or training waits for copies."""
        self._is_idle, self._is_waiting = True, False
        self._wanted: list[tuple[int | None, float, int | None, bool]] = []
        """Arguments of `_may_begin` for each message whose thread waits."""

    @property
    def step(self) -> int:
        """Number of steps that have begun."""
        return self._steps.number

    def attach_group(self, group: Group, follower: Follower | None = None) -> None:
        """Follow the collectives of a group.

        Args:
            group: group of the training thread.
            follower: follows its GPU's stream, on which a collective runs later than the host begins it.
        """
        self._follower = follower
        if follower is None:
            group.on_begin, group.on_end = (lambda name, _: self._begins(name)), (lambda name, _: self._ends(name))
        else:
            followed = _Followed(self, follower)
            group.on_begin, group.on_end = followed.begins, followed.ends

    def expect_windows(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Set the windows of a step: (collective, number of times it has ended in the step) → (number, seconds)."""
        with self._change:
            self.windows.expect(places)
            self._wake()

    # ---- the training thread

    def begin_step(self, at: int | None = None) -> None:
        """Begin a step, and with it the window before its first collective, if there is one.

        Args:
            at: time of `time.perf_counter_ns` at which it began; None: now.
        """
        with self._change:
            now = self._now() if at is None else at
            self._changed = now
            self._steps.begin_step(now)
            self._hurry, self._awaits_some = None, False
            self.windows.is_closed = False
            self.windows.restart(now)
            self._notify()

    def begin_forward(self) -> None:
        """Ignore the collectives since the step began, such as those of an evaluation: an ordinary step has none."""
        with self._change:
            if self.windows.has_seen_any:
                self.windows.restart(self._now())
                self._wake()

    def hurry(self, why: Literal["vote", "recovery"] = "vote", *, everything: bool = True) -> None:
        """Let all messages begin until the next step begins, as the training thread waits for them.

        Args:
            why: reason of the wait.
            everything: False to let only messages with `for_vote` begin.
        """
        with self._change:
            if everything:
                self._hurry = why
                self._notify()
            else:
                self._awaits_some = True
                self._wake()

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Treat the block like a collective of this name: training keeps the network busy, or waits for it."""
        self._is_waiting = True
        self._begins(name)
        try:
            yield
        finally:
            self._is_waiting = False
            self._ends(name)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore collectives in the block, which no ordinary step has: they open no window and are not recorded."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def transfer_begins(self) -> None:
        """Close the open window, as this member sends something, perhaps earlier than planned.

        For concurrent transfers, such as those of a pipeline, in place of an attached group.
        """
        with self._change:
            self.windows.close()
            self._notify()

    def transfer_ends(self, name: str, at: int) -> None:
        """Record that such a transfer ended at `at`, of `time.perf_counter_ns`, and open the window after it, if any.

        The call may come late: a transfer that ended before the step began does not count for this step.
        """
        with self._change:
            if at >= self._steps.start:
                self._ends(name, at)

    def _begins(self, name: str, at: int | None = None, of: _Streamed | None = None) -> None:
        with self._change:
            self._running += 1
            self._changed = self._now() if at is None else at
            if of is None:
                self._busy_since = self._changed
            else:
                of.since = self._changed
            self._notify()

    def _ends(self, name: str, at: int | None = None, of: _Streamed | None = None) -> None:
        with self._change:
            now = self._now() if at is None else at
            self._running, self._changed = max(0, self._running - 1), now
            since, step = (self._busy_since, self.step) if of is None else (of.since, of.step)
            if self._is_counting if of is None else of.is_counted:
                self._steps.add((name, since, now), step)
                if step == self.step:
                    self.windows.collective_ended(name, now)
            self._notify()

    def _notify(self) -> None:
        is_idle = self._hurry is not None or self._is_waiting or not (self._running or self.windows.is_closed)
        if is_idle != self._is_idle:
            self._is_idle = is_idle
            self.on_idle(is_idle)
        self._wake()

    def _wake(self) -> None:
        """Wake the waiting threads if one of their messages may begin: most collectives change nothing for them."""
        if self._wanted and any(self._may_begin(*wanted, self._now()) for wanted in self._wanted):
            self._change.notify_all()

    # ---- profiles

    def record_steps(self, steps: int, left_out: int = 0) -> None:
        """Record the latest `steps` steps, after the current one and `left_out` more; discard earlier records."""
        with self._change:
            self._steps.record(steps, left_out)

    def recorded_steps(self) -> list[TimedStep]:
        """Return the completed steps recorded so far, once a GPU has reached everything that they launched."""
        if self._follower is not None:
            self._follower.wait_for_marks()
        with self._change:
            return self._steps.recorded()

    # ---- the couriers' threads

    def wait_for_window(
        self, window: int | None, seconds: float, step: int | None = None, *, for_vote: bool = False
    ) -> Opening:
        """Wait until a message may begin.

        Args:
            window: `ANY_TIME`, or the window that it was planned for. It may also begin in a later window, and at any
                time once training has paused: the network is idle then, and no window would open.
            seconds: duration of the message.
            step: the window's step; None: any step.
            for_vote: whether the step's vote waits for the message.
        """
        wanted = window, seconds, step, for_vote
        with self._change:
            self._wanted.append(wanted)
            try:
                while not self._may_begin(*wanted, now := self._now()):
                    self._change.wait(self._until_paused(now) / 1e9 + WAKE_SECONDS)
            finally:
                self._wanted.remove(wanted)
            if self._hurry is not None or (for_vote and self._awaits_some):
                return Opening(self._hurry or "vote", None, now)
            if window == ANY_TIME:
                return Opening("background", None, now)
            opened = self.windows.with_room(seconds, now)
            return Opening("idle" if opened is None else "window", opened, now)

    def may_begin(self, window: int | None, seconds: float, step: int | None = None, *, for_vote: bool = False) -> bool:
        """Return whether `wait_for_window` would return at once."""
        with self._change:
            return self._may_begin(window, seconds, step, for_vote, self._now())

    def _may_begin(self, window: int | None, seconds: float, step: int | None, for_vote: bool, now: int) -> bool:
        if self._hurry is not None or (for_vote and self._awaits_some):
            return True
        if self._running:
            return False
        planned = self.step if step is None else step
        if not self.windows.places or self._until_paused(now) < 0 or (window == ANY_TIME and self.step >= planned):
            return True
        is_reached = window is None or (self.step, self.windows.reached) >= (planned, window)
        return is_reached and self.windows.with_room(seconds, now) is not None

    def _until_paused(self, now: int) -> float:
        """Return the nanoseconds until training counts as paused, unless a collective begins or ends; below 0 then."""
        pause = max(PAUSED_STEPS * self._steps.nanoseconds, PAUSED_SECONDS * 1e9)
        return pause if self._running else pause - (now - self._changed)
