"""The latest steps of a member, each with the operations that kept the network busy in it."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import NamedTuple

Operation = tuple[str, int, int]
"""Name, start and end of an operation that kept the network busy. Times are of `time.perf_counter_ns`."""


class TimedStep(NamedTuple):
    """A recorded step. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    busy: list[Operation]
    """Ordered by end."""


class _Step(NamedTuple):
    """A step that has begun."""

    number: int
    start: int
    busy: list[Operation]


class TimedSteps:
    """Records steps, at first the current one and the previous one.

    Args:
        now: time at which the first one begins.
    """

    def __init__(self, now: int) -> None:
        self._steps = deque([_Step(0, now, [])], maxlen=2)
        """The current one is the last."""
        self._first = math.inf
        """Number of the first step that is recorded."""

    @property
    def number(self) -> int:
        """Number of steps that have begun."""
        return self._steps[-1].number

    @property
    def start(self) -> int:
        """Time at which the current step began."""
        return self._steps[-1].start

    @property
    def nanoseconds(self) -> int:
        """Duration of the previous step; 0 without one."""
        return self._steps[-1].start - self._steps[-2].start if len(self._steps) > 1 else 0

    def begin_step(self, now: int) -> None:
        """End the current step, and begin the next one."""
        self._steps.append(_Step(self.number + 1, now, []))

    def add(self, operation: Operation, step: int) -> None:
        """Add an operation of the current step or, as a GPU's last ones may be reported late, of the previous one."""
        ago = self.number - step
        if ago <= 1:
            self._steps[-1 - ago].busy.append(operation)

    def record(self, steps: int, left_out: int) -> None:
        """Record the latest `steps` steps, after the current one and `left_out` more; discard earlier records."""
        self._steps = deque(self._steps, maxlen=max(1, steps) + 1)
        self._first = self.number + 1 + left_out

    def recorded(self) -> list[TimedStep]:
        """Return the completed steps recorded so far."""
        return [
            TimedStep(step.start, following.start, list(step.busy))
            for step, following in pairwise(self._steps)
            if step.number >= self._first
        ]
