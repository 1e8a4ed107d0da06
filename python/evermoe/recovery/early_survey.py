"""What a survey needs of this member alone, done while the members agree and connect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from evermoe.comm.task import Task, run_beside
from evermoe.state.training_state import TrainingState

GROUP_BYTES = 256 << 20
"""Of units whose digests are computed together, before it looks whether it is to go on: tens of milliseconds."""


class EarlySurvey:
    """Computes digests of what is trained here, and repeats steps of replicas, in a thread of its own.

    What it finds is void once the state is written: a step that others have seen pass may still be taken before the
    recovery. Nothing of it has to succeed: what is missing the survey does itself.

    Args:
        state: of this member.
        catch_up: brings the replicas that are kept here, and that the members who have agreed may need, to their newest
            step, some at a time.
    """

    def __init__(self, state: TrainingState, catch_up: Callable[[], Iterable[None]]) -> None:
        self._state, self._catch_up = state, catch_up
        self._task: Task[None] | None = None
        self._found: dict[str, int] = {}
        self._is_dropped, self._is_agreed = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Begins, unless it has, or optimizer state is still on its way to any member."""
        if self._task is not None or self._state.late.is_under_way:
            return
        self._found, task = {}, Task(self._look)
        self._is_dropped.clear()
        self._is_agreed.clear()
        with suppress(RuntimeError):  # no thread or no stream: all is left to the survey
            run_beside(task, "evermoe-survey", self._state.devices())
            self._task = task

    def agreed(self, *, begins: bool) -> None:
        """Goes on with the replicas, as it is known who is there; if it `begins`, also where it has not begun."""
        if begins:
            self.begin()
        self._is_agreed.set()

    def _look(self) -> None:
        for units in self._groups():
            if self._is_dropped.is_set():
                return
            self._found |= zip(units, self._state.digests(units), strict=True)
        self._is_agreed.wait()
        for _ in () if self._is_dropped.is_set() else self._catch_up():
            if self._is_dropped.is_set():
                return

    def _groups(self) -> Iterator[list[str]]:
        group, nbytes = [], 0
        for unit in self._state.held():
            group.append(unit)
            nbytes += self._state.catalog.by_name[unit].nbytes
            if nbytes >= GROUP_BYTES:
                yield group
                group, nbytes = [], 0
        yield group

    def take(self) -> Mapping[str, int]:
        """Digests of units, by name, once it is over; those of before an error, none if it was not begun. Once."""
        task, self._task = self._task, None
        if task is None:
            return {}
        self._is_agreed.set()
        task.is_over_within(threading.TIMEOUT_MAX)
        return self._found

    def drop(self) -> None:
        """Waits until nothing is read any more: the state is about to be written."""
        self._is_dropped.set()
        self.take()
        self._found = {}
