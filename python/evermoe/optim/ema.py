"""Exponential moving average of the weights, which sessions place, copy and restore with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

AVERAGE, STEPS = "ema", "ema_steps"
"""Names of the average and of its number of steps in the optimizer's state of a parameter."""


class EMA:
    """Averages all parameters of an optimizer after each of its steps: `average ← decay · average + (1 − decay) · p`.

    The first step copies the parameters, as `torch.optim.swa_utils.AveragedModel` does. The averages are part of the
    optimizer's state, so that a session places, copies and restores them with their experts. Create it before the
    session. Replicas cannot repeat its steps from gradients alone, so they get the state after each step.

        ema = evermoe.optim.EMA(optimizer, decay=0.999)
        session = evermoe.Session(model, optimizer, sampler)
        for step in session.steps(1000):
            ...
            if session.step % 100 == 0:
                with ema.applied(), session.evaluation():
                    evaluate(model)

    Args:
        optimizer: updates the averages in its `step`.
        decay: factor of the previous average, in [0, 1).

    Raises:
        ValueError: decay is out of range, or the optimizer already has such an average.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA: expected 0 <= decay < 1, got {decay}")
        if is_averaged(optimizer):
            raise ValueError("EMA: expected an optimizer without an average of its weights, but this one has one")
        self._optimizer, self._decay = optimizer, decay
        optimizer.register_step_post_hook(self._after_step)
        optimizer.param_groups[0][AVERAGE] = decay  # kept with the other settings, and the same on all members

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Update the averages of all parameters that have ever had a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if AVERAGE not in state:
                    if parameter.grad is None:  # torch's optimizers assume that a state that is not empty is theirs
                        continue
                    kind = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
                    state[AVERAGE], state[STEPS] = torch.zeros_like(parameter, dtype=kind), torch.zeros(())
                if state[STEPS] == 0:
                    state[AVERAGE].copy_(parameter)
                else:
                    state[AVERAGE].lerp_(parameter.to(state[AVERAGE].dtype), 1 - self._decay)
                state[STEPS] += 1

    def averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that this process holds, and its average; nothing before the first step."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                if AVERAGE in state and state[STEPS] > 0:
                    yield parameter, state[AVERAGE]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by their averages for the block, between two steps.

        No memory is overwritten: copies of the state that are under way still contain the parameters.
        """
        values = [(parameter, parameter.data) for parameter, _ in self.averages()]
        try:
            for parameter, average in self.averages():
                parameter.data = average.to(parameter.dtype)
            yield
        finally:
            for parameter, value in values:
                parameter.data = value


def is_averaged(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an `EMA` averages the weights of an optimizer."""
    return any(AVERAGE in group for group in optimizer.param_groups)
