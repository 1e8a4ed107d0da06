"""Steps of a profile, as recorded by a pacer."""

from __future__ import annotations

from typing import NamedTuple

Busy = list[tuple[str, int, int]]
"""Name, start and end of each operation that kept the network busy, ordered by end."""


class TimedStep(NamedTuple):
    """A recorded step. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    busy: Busy


class StepRecord:
    """Recorder of steps. It is not thread-safe: its user holds a lock."""

    def __init__(self) -> None:
        self._wanted = self._left_out = 0
        self._recorded: list[TimedStep] = []
        self._step: tuple[int, Busy] | None = None
        self._last: Busy | None = None
        """The previous step's operations: a GPU's last collectives may be reported late."""

    def record_steps(self, steps: int, left_out: int) -> None:
        """Record the next `steps` steps after skipping `left_out`; discard earlier records."""
        self._wanted, self._left_out, self._recorded, self._step, self._last = steps, left_out, [], None, None

    def recorded_steps(self) -> list[TimedStep]:
        """Return the completed steps recorded so far."""
        return [each._replace(busy=list(each.busy)) for each in self._recorded]

    def begin_step(self, now: int) -> None:
        """End the current step and begin the next."""
        self._last = None if self._step is None else self._step[1]
        if self._step is not None:
            self._recorded.append(TimedStep(self._step[0], now, self._step[1]))
        is_wanted = not self._left_out and len(self._recorded) < self._wanted
        self._step = (now, []) if is_wanted else None
        self._left_out = max(0, self._left_out - 1)

    def note_busy(self, name: str, since: int, until: int, *, steps_ago: int = 0) -> None:
        """Record that the network was busy, in the current step or the previous one; later reports are dropped."""
        busy = (None if self._step is None else self._step[1]) if steps_ago == 0 else self._last
        if busy is not None and steps_ago <= 1:
            busy.append((name, since, until))
