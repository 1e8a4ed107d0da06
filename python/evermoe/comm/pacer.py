"""When the network is idle: windows between the collectives of the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple, Protocol

from evermoe.comm.group import Group
from evermoe.comm.step_record import StepRecord, TimedStep

ANY_TIME = -1
"""In place of a window's number: beside compute, whether a window of the step is open or not."""
AT_ONCE = -2
"""In place of a window's number: now, whatever runs; such a message waits for no pacer."""
PAUSED_STEPS, PAUSED_SECONDS = 3, 10.0
"""Training has paused where no collective has begun or ended for as long as so many steps, and for so many seconds."""
POLL_SECONDS = 0.5
"""Time between two looks whether it has."""

When = Literal["window", "idle", "background", "vote", "recovery"]
"""When a message begins.

`window`: in an idle window that was expected. `idle`: between two collectives, as windows are not known or training has
paused. `background`: at any time, as planned. `vote`: training waits for it, before a vote or for room. `recovery`: it
waits in any case, as the members change or all steps are taken.
"""


class Opening(NamedTuple):
    """When a message may begin."""

    when: When
    window: int | None
    """Number of the window that is open; None outside of all."""
    at: int
    """Now: no collective had begun yet."""


class Follower(Protocol):
    """Says when a GPU's stream, which the host runs ahead of, comes to a point."""

    def mark(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` in another thread, with the time at which the current stream has come to this point."""

    def wait(self) -> None:
        """Waits until all marks so far are told of."""


class _Streamed:
    """A collective on a GPU's stream."""

    def __init__(self, name: str, step: int, is_counted: bool) -> None:
        self.name, self.step, self.is_counted = name, step, is_counted
        self.since = 0
        """When the stream came to it."""


class _Followed:
    """Tells a pacer of a group's collectives: of those on a GPU's stream when it comes to them and has passed them."""

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


def _ignore(is_idle: bool) -> None:
    pass


class Pacer:
    """Knows when the network is idle, from what the training thread's group tells of its collectives.

    A collective on a GPU's stream lasts from when the stream comes to it until it is past it. Windows open when a
    collective ends and close when the next one begins, early or late as the step may be. After
    `expect` it also knows their numbers and how long they last, and lets no message begin that would not end in time.

    A step lasts from one `begin_step` to the next: from when a version of the state is there to the next one.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._change = threading.Condition()
        self._running, self._is_counting = 0, True
        self._busy_since = 0
        self._began = self._changed = now()
        self._step_lasts = 0
        self.step = 0
        """Steps that have begun."""
        self._hurry: When | None = None
        """Why the training thread waits; None while it does not."""
        self._awaits_some = False
        """Whether it waits for the messages of its step's vote alone."""
        self._seen: dict[str, int] = {}
        self.places: Mapping[tuple[str | None, int], tuple[int, float]] = {}
        """The windows of a step, as `expect` was told them; empty while they are not known."""
        self._window: int | None = None
        self._reached = -1
        self._closes = 0.0
        self._record = StepRecord()
        self._follower: Follower | None = None
        self.on_idle: Callable[[bool], None] = _ignore
        """When a collective begins (False), and when none runs any more, or training waits for copies (True)."""
        self._is_idle, self._is_waiting = True, False

    def attach(self, group: Group, follower: Follower | None = None) -> None:
        """Follows the collectives of a group.

        `follower`: of its GPU's stream, where a collective runs later than it is begun.
        """
        self._follower = follower
        if follower is None:
            group.on_begin, group.on_end = (lambda name, _: self._begins(name)), (lambda name, _: self._ends(name))
        else:
            followed = _Followed(self, follower)
            group.on_begin, group.on_end = followed.begins, followed.ends

    def expect(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Sets the windows of a step: (collective, how often it has ended in the step) → (number, seconds)."""
        with self._change:
            self.places = dict(places)
            self._window = None
            self._change.notify_all()

    # ---- the training thread

    def begin_step(self, at: int | None = None) -> None:
        """A step begins, and with it the window that follows no collective, if there is one.

        `at`: when it began, of `time.perf_counter_ns`; None: now.
        """
        with self._change:
            now = self._now() if at is None else at
            self._step_lasts, self._began, self._changed = now - self._began, now, now
            self.step += 1
            self._record.begin_step(now)
            self._seen, self._reached, self._hurry, self._awaits_some = {}, -1, None, False
            self._open((None, 0), now)
            self._tell()

    def begin_forward(self) -> None:
        """Collectives since the step's beginning, of an evaluation for example, are none of an ordinary step's."""
        with self._change:
            if self._seen:
                self._seen, self._reached = {}, -1
                self._open((None, 0), self._now())
                self._change.notify_all()

    def hurry(self, why: Literal["vote", "recovery"] = "vote", *, everything: bool = True) -> None:
        """The training thread waits: everything may be sent until the next step begins.

        `everything`: False where only what is `for_vote` may, as the rest has time.
        """
        with self._change:
            if everything:
                self._hurry = why
                self._tell()
            else:
                self._awaits_some = True
                self._change.notify_all()

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """The training thread keeps the network busy, or waits for it; like a collective of this name."""
        self._is_waiting = True
        self._begins(name)
        try:
            yield
        finally:
            self._is_waiting = False
            self._ends(name)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Collectives meanwhile are none of an ordinary step's: they open no window, and are not recorded."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

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

    def _begins(self, name: str, at: int | None = None, of: _Streamed | None = None) -> None:
        with self._change:
            self._running += 1
            self._changed = self._now() if at is None else at
            if of is None:
                self._busy_since = self._changed
            else:
                of.since = self._changed
            self._tell()

    def _ends(self, name: str, at: int | None = None, of: _Streamed | None = None) -> None:
        with self._change:
            now = self._now() if at is None else at
            self._running, self._changed = max(0, self._running - 1), now
            since, ago = (self._busy_since, 0) if of is None else (of.since, self.step - of.step)
            if self._is_counting if of is None else of.is_counted:
                self._record.note(name, since, now, steps_ago=ago)
                if ago == 0:
                    occurrence = self._seen.get(name, 0)
                    self._seen[name] = occurrence + 1
                    self._open((name, occurrence), now)
            self._tell()

    def _tell(self) -> None:
        is_idle = self._hurry is not None or self._is_waiting or not self._running
        if is_idle != self._is_idle:
            self._is_idle = is_idle
            self.on_idle(is_idle)
        self._change.notify_all()

    def _open(self, place: tuple[str | None, int], now: int) -> None:
        self._window, seconds = self.places.get(place, (None, 0.0))
        if self._window is not None:
            self._reached = max(self._reached, self._window)
            self._closes = now + seconds * 1e9

    # ---- profiles

    def record(self, steps: int, left_out: int = 0) -> None:
        """Records so many steps, of those that begin now without the first `left_out`; 0 to stop.

        What was recorded before is forgotten.
        """
        with self._change:
            self._record.record(steps, left_out)

    def recorded(self) -> list[TimedStep]:
        """The steps recorded so far that are over; waits until a GPU has come to all that they have launched."""
        if self._follower is not None:
            self._follower.wait()
        with self._change:
            return self._record.recorded()

    # ---- the couriers' threads

    def wait(self, window: int | None, seconds: float, step: int | None = None, *, for_vote: bool = False) -> Opening:
        """Waits until a message of so many seconds may begin.

        `window`: `ANY_TIME`, or the one of `step` (None: of any) that it was planned for; it may also go later, and at
        any time once training has paused: the network is idle then, and no window would open. `for_vote`: the step's
        vote waits for it.
        """
        with self._change:
            while not self._may_begin(window, seconds, step, for_vote, now := self._now()):
                self._change.wait(POLL_SECONDS)
            if self._hurry is not None or (for_vote and self._awaits_some):
                return Opening(self._hurry or "vote", None, now)
            if window == ANY_TIME:
                return Opening("background", None, now)
            window = self._window if self._is_open(seconds, now) else None
            return Opening("idle" if window is None else "window", window, now)

    def may_begin(self, window: int | None, seconds: float, step: int | None = None, *, for_vote: bool = False) -> bool:
        """Whether `wait` would return at once."""
        with self._change:
            return self._may_begin(window, seconds, step, for_vote, self._now())

    def _may_begin(self, window: int | None, seconds: float, step: int | None, for_vote: bool, now: int) -> bool:
        if self._hurry is not None or (for_vote and self._awaits_some):
            return True
        if self._running:
            return False
        has_paused = now - self._changed > max(PAUSED_STEPS * self._step_lasts, PAUSED_SECONDS * 1e9)
        planned = self.step if step is None else step
        if not self.places or has_paused or (window == ANY_TIME and self.step >= planned):
            return True
        is_due = window is None or (self.step, self._reached) >= (planned, window)
        return is_due and self._is_open(seconds, now)

    def _is_open(self, seconds: float, now: int) -> bool:
        return self._window is not None and now + seconds * 1e9 <= self._closes
