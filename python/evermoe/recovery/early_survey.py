"""What a survey needs of this member alone, done while the members agree and connect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from evermoe.comm.task import Task, run_beside
from evermoe.state.training_state import TrainingState


class EarlySurvey:
    """Brings replicas to their newest step, and computes digests of what is trained here, in a thread of its own.

    What it finds is void once the state is written: a step that others have seen pass may still be taken before the
    recovery. Nothing of it has to succeed: what is missing the survey does itself.

    Args:
        state: of this member.
        catch_up: brings the replicas that are kept here to their newest step.
    """

    def __init__(self, state: TrainingState, catch_up: Callable[[], None]) -> None:
        self._state, self._catch_up = state, catch_up
        self._task: Task[dict[str, int]] | None = None

    def begin(self) -> None:
        """Begins, unless it has, or optimizer state is still on its way to any member."""
        if self._task is not None or self._state.late.is_under_way:
            return
        task = self._task = Task(self._look)
        run_beside(task, "evermoe-survey", self._state.devices())

    def _look(self) -> dict[str, int]:
        self._catch_up()
        units = self._state.held()
        return dict(zip(units, self._state.digests(units), strict=True))

    def take(self) -> Mapping[str, int]:
        """The digests of units, by name, once they are there; empty if it was not begun, or failed. Once."""
        task, self._task = self._task, None
        if task is None:
            return {}
        task.is_over_within(threading.TIMEOUT_MAX)
        return task.result or {}

    def drop(self) -> None:
        """Waits until nothing is read any more: the state is about to be written."""
        self.take()
