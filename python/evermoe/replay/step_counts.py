"""How many steps parameters have taken, as their optimizer counts them."""

from __future__ import annotations

import torch
from torch import Tensor


class StepCounts:
    """The optimizer's counts; those that lie on a GPU are read all at once, and kept until they are forgotten.

    A fused or capturable optimizer keeps a count on the GPU for each parameter, and to read one makes the host wait
    until the GPU is there: with one wait for each parameter, or each expert, the host would never run ahead. Versions
    of tensors do not tell that they have changed: such optimizers write without counting these up.

    Args:
        optimizer: whose state has them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, int] = {}
        """By address of the tensor on a GPU."""

    def forget(self) -> None:
        """A step may have been taken: counts are read again."""
        self._known = {}

    def of(self, parameter: Tensor) -> int | None:
        """Steps of a parameter; None where the optimizer does not count them."""
        step = self._optimizer.state.get(parameter, {}).get("step")
        if step is None:
            return None
        if not isinstance(step, Tensor) or not step.is_cuda:
            return int(step)
        if step.data_ptr() not in self._known:
            self._known = self._read()
        return self._known[step.data_ptr()]

    def _read(self) -> dict[int, int]:
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
