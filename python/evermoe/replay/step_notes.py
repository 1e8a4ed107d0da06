"""What an optimizer's step does to units, noted right before it: enough to repeat the step where their state is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe.replay.calibrate import Arithmetic
from evermoe.replay.source import Row, Rule, Source, StepNumbers
from evermoe.replay.step_counts import StepCounts


class NotedStep(NamedTuple):
    """One step of a parameter, or of a row of one."""

    t: int
    """Steps that the parameter has taken then."""
    numbers: list[float]
    """Of the step: see `Arithmetic.numbers`."""
    gradient: NDArray[np.float32] | NDArray[np.uint16]
    """As the optimizer sees it: float32, or the bits of bfloat16; from a GPU it is whole after `wait_for_gradients`."""


UnitSteps = Mapping[str, list[NotedStep | None]]
"""By unit, the step of each of its parameters; None for one that the optimizer leaves as it is."""


class StepNotes:
    """The latest step of some units.

    A gradient on the CPU is copied only where the step itself changes it: it must stay as it is while its note is used.

    Args:
        optimizer: that takes the steps.
        arithmetic: of the optimizer.
        units: for each unit its parameters by name, whole or as a `Row`, all of them in the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arithmetic: Arithmetic,
        units: Mapping[str, Mapping[str, Tensor | Row]],
    ) -> None:
        self._optimizer, self._counts, self._numbers = optimizer, StepCounts(optimizer), StepNumbers(optimizer)
        self._units = {
            unit: [Source(unit, name, of, self._counts) for name, of in named.items()] for unit, named in units.items()
        }
        groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for source in (each for sources in self._units.values() for each in sources):
            source.rule = Rule(arithmetic, groups[id(source.parameter)])
        self._latest: UnitSteps = {}

    def note(self) -> None:
        """The optimizer is about to take a step, with the gradients that are there."""
        self._counts.forget()
        self._numbers.forget()
        self._latest = {unit: [self._step(each) for each in some] for unit, some in self._units.items()}

    def _step(self, source: Source) -> NotedStep | None:
        gradient = source.gradient()
        if gradient is None:
            return None
        assert source.rule is not None
        t, group = source.next_step(self._optimizer), self._optimizer.param_groups[source.rule.group]
        try:
            numbers = self._numbers.of(t, source)
        except ValueError:  # of a rate below 0, say, with which the optimizer may go on: the state travels
            return None
        if group.get("foreach") and group.get("nesterov") and source.parameter.device.type == "cpu":
            gradient = gradient.copy()  # torch adds the momentum to it in place
        return NotedStep(t, numbers, gradient)

    def take(self) -> UnitSteps:
        """What was noted since it was taken last; nothing if no step was."""
        found, self._latest = self._latest, {}
        return found
