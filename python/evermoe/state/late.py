"""Optimizer state that is still on its way to this rank.

A step needs weights for its gradients, and the optimizer's state only for its update. So after a change of members a
rank begins to compute as soon as it has the weights; the rest, two thirds of the bytes with AdamW in float32 and six
sevenths with bfloat16 weights and masters, comes while it computes, and arrives before it votes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from evermoe.comm.task import Task, prepare_thread
from evermoe.errors import PeerLost
from evermoe.state.stored import RetainedUnits
from evermoe.state.unit import Unit, read_tensors


def _nothing(task: Task[None]) -> None:
    pass


class LateState:
    """Units of this rank whose optimizer state is on its way.

    Args:
        tensors: of a unit that this rank trains, in the order of its specs.
        retained: units that this rank has trained until now.
        devices: where parameters are.
    """

    def __init__(
        self,
        tensors: Callable[[Unit], Iterable[Tensor]],
        retained: RetainedUnits,
        devices: Callable[[], Iterable[torch.device]],
    ) -> None:
        self._tensors, self._retained, self._devices = tensors, retained, devices
        self._task: Task[None] | None = None
        self._complete: Callable[[Task[None]], None] = _nothing
        self._run: Callable[[], None] | None = None
        """Starts the task; None where that has been done."""
        self._starting = threading.Lock()
        self.missing: set[str] = set()
        """Units whose state is not here, as it is on its way or has got lost with its sender."""

    @property
    def is_under_way(self) -> bool:
        """Whether any member may still get state; the same on all."""
        return self._task is not None

    def begin(self, units: Collection[str], task: Task[None], complete: Callable[[Task[None]], None]) -> None:
        """Takes a task for a thread of its own, which `start` or whoever waits for it starts.

        Args:
            units: that lack their state here.
            task: it `take`s the state of these, and `read`s that of others. What it reads from a GPU is what the
                caller's stream will have written by now.
            complete: waits for the tasks of all members; collective.
        """
        self.missing, self._task, self._complete = set(units), task, complete
        self._run = prepare_thread(task, "evermoe-late-state", self._devices())

    def start(self) -> None:
        """Starts the task, unless it was, or there is none: not before, as it is in the way of what all wait for."""
        with self._starting:
            if self._run is not None:
                self._run()
                self._run = None

    @torch.no_grad()
    def read(self, unit: Unit, version: int, out: Tensor) -> None:
        """Copies the optimizer's state of a unit that this rank has at a version to `out`, uint8 on the CPU."""
        held = next((each for each in self._retained.stored(version) if each.unit == unit.name), None)
        tensors = self._tensors(unit) if held is None else held.tensors
        read_tensors([t for spec, t in zip(unit.specs, tensors, strict=True) if spec.is_state], out)

    @torch.no_grad()
    def take(self, unit: Unit, data: Tensor) -> None:
        """Takes over the optimizer's state of a unit, uint8 `[unit.state_nbytes]` on the CPU."""
        views = unit.state_tensors(data)
        targets = {spec.name: tensor for spec, tensor in zip(unit.specs, self._tensors(unit), strict=True)}
        for name, value in views.items():
            targets[name].copy_(value)
            if targets[name].is_cuda:
                torch.cuda.current_stream(targets[name].device).synchronize()
        self.missing.discard(unit.name)

    def finish(self) -> None:
        """Waits until nothing is on its way to any member; collective.

        However long it takes, all wait for each other as long as anything moves anywhere.

        Raises:
            PeerLost: a member is gone or silent, or what came is damaged; the group is dropped.
        """
        self.start()
        task, self._task = self._task, None
        if task is not None:
            self._complete(task)

    def end(self) -> None:
        """Waits until nothing is on its way any more, which is at once in a dropped group."""
        task, self._task = self._task, None
        with self._starting:
            if task is not None and self._run is not None:
                task.cancel("the members have changed before it began")
            self._run = None
        if task is not None:
            task.wait()

    def wait(self, names: Collection[str]) -> None:
        """Wait until the state of units that this rank trains has arrived.

        Raises:
            PeerLost: it has got lost on its way.
        """
        task = self._task
        if task is not None and self.missing.intersection(names):
            self.start()
            task.wait()
        if lost := self.missing.intersection(names):
            raise PeerLost(f"the optimizer's state of {min(lost)} has not arrived")
