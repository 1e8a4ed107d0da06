"""The steps of a profile, as a pacer sees them."""

from __future__ import annotations

from typing import NamedTuple

Busy = list[tuple[str, int, int]]
"""Name, start and end of what the training thread kept the network busy with, in the order of their ends."""


class TimedStep(NamedTuple):
    """A step as the pacer saw it. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    busy: Busy


class StepRecord:
    """Records some steps. Its user lets one thread in at a time."""

    def __init__(self) -> None:
        self._wanted = self._left_out = 0
        self._recorded: list[TimedStep] = []
        self._step: tuple[int, Busy] | None = None
        self._last: Busy | None = None
        """Of the step before, of which a GPU's last collectives may be told late."""

    def record(self, steps: int, left_out: int) -> None:
        """Records so many steps, of those that begin now without the first `left_out`; forgets those of before."""
        self._wanted, self._left_out, self._recorded, self._step, self._last = steps, left_out, [], None, None

    def recorded(self) -> list[TimedStep]:
        """The steps recorded so far that are over."""
        return [each._replace(busy=list(each.busy)) for each in self._recorded]

    def begin_step(self, now: int) -> None:
        """A step begins, and the one before it ends."""
        self._last = None if self._step is None else self._step[1]
        if self._step is not None:
            self._recorded.append(TimedStep(self._step[0], now, self._step[1]))
        is_wanted = not self._left_out and len(self._recorded) < self._wanted
        self._step = (now, []) if is_wanted else None
        self._left_out = max(0, self._left_out - 1)

    def note(self, name: str, since: int, until: int, *, steps_ago: int = 0) -> None:
        """The network was busy: in the step that runs, or 1 step ago; what is told later than that is not recorded."""
        busy = (None if self._step is None else self._step[1]) if steps_ago == 0 else self._last
        if busy is not None and steps_ago <= 1:
            busy.append((name, since, until))
