"""Work of a courier's thread for the replicas of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from evermoe.comm.courier import Courier
from evermoe.comm.group import Group
from evermoe.comm.task import Task
from evermoe.copies.replay.exchange import ExchangeResult


@dataclass
class ReplayTasks:
    """Tasks that were begun since the members last had nothing in flight, in the order of these fields."""

    states: Task[ExchangeResult] | None = None
    """Sends the states with which the replicas of a plan begin; everything else follows it."""
    digests: Task[None] | None = None
    """Reads the state of some units; the rest of the step follows it."""
    early: Task[None] | None = None
    """Sends the states from before this step; the exchange follows it."""
    exchange: Task[ExchangeResult] | None = None
    """Sends the gradients of the step."""

    def begin_step(self) -> None:
        """Forget the tasks of the previous step, which are over."""
        self.exchange = self.early = self.digests = None

    def begun(self, gradients: Iterable[Task[Any]]) -> list[Task[Any]]:
        """Return the tasks that were begun, with those that send `gradients` during backward."""
        every = [self.states, self.digests, self.early, *gradients, self.exchange]
        return [each for each in every if each is not None]

    def wait_for_states(self, courier: Courier, group: Group) -> bool:
        """Wait until the states are sent, but not for a silent peer; return False if a member was lost.

        Args:
            courier: runs the tasks.
            group: members that train.
        """
        states: list[Task[Any] | None] = [self.states, self.early]
        return all(task is None or courier.wait_for_task(task, group) for task in states)

    def wait_for_all(self, group: Group, gradients: Iterable[Task[Any]]) -> bool:
        """Wait until all are over, which the group notes; return False if a member was lost."""
        is_done = False
        group.on_wait(True)
        try:
            is_done = all(task.wait() for task in self.begun(gradients))
        finally:
            group.on_wait(False, is_done)
        return is_done

    def results(self) -> Iterator[tuple[ExchangeResult, bool]]:
        """Yield the results of exchanges that are over, and whether it is that of the states that begin a plan."""
        for task in (self.states, self.exchange):
            if task is not None and task.result is not None:
                yield task.result, task is self.states
