"""The part of a survey that needs this member alone, done while the members agree and connect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from evermoe.comm.task import Task, run_in_thread
from evermoe.state.training_state import TrainingState

GROUP_BYTES = 256 << 20
"""Bytes of units whose digests are computed together, before it checks whether to continue: tens of milliseconds."""


class EarlySurvey:
    """Computes digests of what is trained here, and repeats steps of replicas, in threads of its own.

    What it finds is void once the state is written: a step that others have seen pass may still be taken before the
    recovery. Nothing of it has to succeed: what is missing the survey does itself.

    Args:
        state: of this member.
        catch_up: brings the replicas that are kept here, and that the members who have agreed may need, to their newest
            step, some at a time.
    """

    def __init__(self, state: TrainingState, catch_up: Callable[[], Iterable[None]]) -> None:
        self._state, self._catch_up = state, catch_up
        self._tasks: list[Task[None]] = []
        """Threads of the digests, then of the replicas."""
        self._found: dict[str, int] = {}
        self._is_dropped = threading.Event()

    def begin(self) -> None:
        """Begins with the digests, unless it has, or optimizer state is still on its way to any member."""
        if not self._tasks and not self._state.late.is_under_way:
            self._found = {}
            self._is_dropped.clear()
            self._start(self._look)

    def agreed(self, *, begins: bool) -> None:
        """Continue with the replicas, as the members are known; if it `begins`, also where it has not begun."""
        if begins:
            self.begin()
        if len(self._tasks) == 1:
            self._start(self._repeat)

    def _start(self, work: Callable[[], None]) -> None:
        task = Task(work)
        with suppress(RuntimeError):  # no thread or no stream: all is left to the survey
            run_in_thread(task, "evermoe-survey", self._state.devices())
            self._tasks.append(task)

    def _look(self) -> None:
        for units in self._groups():
            if self._is_dropped.is_set():
                return
            self._found |= zip(units, self._state.digests(units), strict=True)

    def _groups(self) -> Iterator[list[str]]:
        group, nbytes = [], 0
        for unit in self._state.held():
            group.append(unit)
            nbytes += self._state.catalog.by_name[unit].nbytes
            if nbytes >= GROUP_BYTES:
                yield group
                group, nbytes = [], 0
        yield group

    def _repeat(self) -> None:
        for _ in () if self._is_dropped.is_set() else self._catch_up():
            if self._is_dropped.is_set():
                return

    def take(self) -> Mapping[str, int]:
        """Wait for the survey; return the digests of units by name, once. Empty if it was not begun."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.is_over_within(threading.TIMEOUT_MAX)
        return self._found if tasks else {}

    def drop(self) -> None:
        """Waits until nothing is read any more: the state is about to be written."""
        self._is_dropped.set()
        self.take()
        self._found = {}
