"""Step counts and stamps of an optimizer's parameters, read between two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each tensor of a state."""


class StepCounts:
    """The optimizer's step counts and the stamps of its state, cached until `forget_counts`.

    A fused or capturable optimizer keeps a count on the GPU for each parameter, and to read one makes the host wait
    for the GPU. With one wait for each parameter, or each expert, the host would never run ahead, so all are read at
    once. Tensor versions do not reveal a step: such optimizers write without incrementing them.

    Args:
        optimizer: the optimizer whose state is read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._on_gpus: dict[int, int] = {}
        self._counts: dict[int, int | None] = {}
        self._stamps: dict[int, Stamp] = {}

    def forget_counts(self) -> None:
        """Read everything again when it is needed next: a step may have been taken, or the state written."""
        self._on_gpus, self._counts, self._stamps = {}, {}, {}

    def steps_of(self, parameter: Tensor) -> int | None:
        """Return the number of a parameter's steps; None if the optimizer does not count them."""
        if (known := id(parameter)) not in self._counts:
            self._counts[known] = self._read(self._kept(parameter).get("step"))
        return self._counts[known]

    def stamp_of(self, parameter: Tensor) -> Stamp:
        """Return a stamp that changes when the parameter or its optimizer state is written or replaced."""
        if (known := id(parameter)) not in self._stamps:
            tensors = [parameter, *(value for value in self._kept(parameter).values() if isinstance(value, Tensor))]
            self._stamps[known] = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
        return self._stamps[known]

    def _kept(self, parameter: Tensor) -> dict[str, Any]:
        return self._optimizer.state.get(parameter, {})

    def _read(self, step: Any) -> int | None:
        if step is None:
            return None
        if not isinstance(step, Tensor) or not step.is_cuda:
            return int(step)
        if step.data_ptr() not in self._on_gpus:
            self._on_gpus = self._read_gpus()
        return self._on_gpus[step.data_ptr()]

    def _read_gpus(self) -> dict[int, int]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for state in list(self._optimizer.state.values()):
            step = state.get("step")
            if isinstance(step, Tensor) and step.is_cuda:
                by_device.setdefault(step.device, []).append(step)
        found: dict[int, int] = {}
        for steps in by_device.values():
            values = torch.stack([step.reshape(()).double() for step in steps]).tolist()
            found |= {step.data_ptr(): int(value) for step, value in zip(steps, values, strict=True)}
        return found
