"""Notes of an optimizer's step, taken right before it: enough to repeat the step where the units' state is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe.copies.replay.calibrate import Arithmetics
from evermoe.copies.replay.source import Row, Source, StepNumbers, rules_of
from evermoe.copies.replay.step_counts import StepCounts


class NotedStep(NamedTuple):
    """One step of a parameter, or of a row of one."""

    t: int
    """Number of steps that the parameter has taken then."""
    numbers: list[float]
    """Of the step: see `Arithmetic.numbers`."""
    gradient: NDArray[np.float32] | NDArray[np.uint16]
    """As the optimizer gets it: float32, or the bits of bfloat16; complete after `wait_for_gradients` if from a GPU."""


UnitSteps = Mapping[str, list[NotedStep | None]]
"""Step of each parameter, by unit; None for a parameter that the optimizer does not change."""


class StepNotes:
    """The latest step of some units.

    A gradient on the CPU is copied only if the step itself changes it: it must stay unchanged while its note is used.

    Args:
        optimizer: takes the steps.
        arithmetics: of the optimizer.
        units: parameters of each unit by name, complete or as a `Row`, all of them in the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arithmetics: Arithmetics,
        units: Mapping[str, Mapping[str, Tensor | Row]],
    ) -> None:
        self._optimizer, self._counts, self._numbers = optimizer, StepCounts(optimizer), StepNumbers(optimizer)
        self._units = {
            unit: [Source(unit, name, of, self._counts) for name, of in named.items()] for unit, named in units.items()
        }
        rules = rules_of(optimizer, arithmetics)
        for source in (each for sources in self._units.values() for each in sources):
            source.rule = rules[id(source.parameter)]
        self._latest: UnitSteps = {}

    def note_step(self, factor: float = 1.0) -> None:
        """Note the step that the optimizer is about to take with the current gradients, which it multiplies."""
        self._counts.forget_counts()
        self._numbers.forget_numbers()
        self._latest = {unit: [self._step(each, factor) for each in some] for unit, some in self._units.items()}

    def _step(self, source: Source, factor: float) -> NotedStep | None:
        gradient = source.gradient()
        if gradient is None:
            return None
        assert source.rule is not None
        t, group = source.next_step(self._optimizer), self._optimizer.param_groups[source.rule.group]
        try:
            numbers = self._numbers.numbers_of(t, source, clip=factor)
        except ValueError:  # a negative rate, say, which the optimizer may accept: the state is sent instead
            return None
        if group.get("foreach") and group.get("nesterov") and source.parameter.device.type == "cpu":
            gradient = gradient.copy()  # torch adds the momentum to it in place
        return NotedStep(t, numbers, gradient)

    def take_steps(self) -> UnitSteps:
        """Return the steps that were noted since the previous call; empty if none was."""
        found, self._latest = self._latest, {}
        return found
