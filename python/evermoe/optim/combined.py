"""Several optimizers of one model as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that step one after the other. Groups and state are theirs, so a change of either is one of theirs."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Without the base class's constructor, which would copy the groups and keep a state of its own.
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups of all optimizers, in their order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> _States:  # type: ignore[override]
        """Return the state of all parameters."""
        return _States(self.optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free or zero the gradients of all parameters."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all optimizers."""
        for each in self.optimizers:
            each.step()

    def register_step_pre_hook(self, hook: Any) -> _Handles:  # type: ignore[override]
        """Call a hook before the step of each optimizer."""
        return _Handles([each.register_step_pre_hook(hook).remove for each in self.optimizers])

    def __repr__(self) -> str:
        """Return the names of the classes."""
        return ", ".join(type(each).__name__ for each in self.optimizers)


class _States(MutableMapping[Tensor, Any]):
    """The state of each parameter that any of some optimizers steps."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for each in self._optimizers:
            if parameter in each.state:
                return each.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        for each in self._optimizers:
            if any(own is parameter for group in each.param_groups for own in group["params"]):
                each.state[parameter] = state
                return
        raise KeyError(parameter)

    def __delitem__(self, parameter: Tensor) -> None:
        for each in self._optimizers:
            if parameter in each.state:
                del each.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        for each in self._optimizers:
            yield from each.state

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


class _Handles:
    """Handles of one hook on several optimizers."""

    def __init__(self, removals: Sequence[Callable[[], None]]) -> None:
        self._removals = removals

    def remove(self) -> None:
        """Remove the hook from all of them."""
        for remove in self._removals:
            remove()


def as_one(given: Any) -> Any:
    """Return one optimizer for one or a sequence of them; anything else is returned as it is."""
    if isinstance(given, Sequence) and given and all(isinstance(each, torch.optim.Optimizer) for each in given):
        return given[0] if len(given) == 1 else CombinedOptimizer(given)
    return given


def each_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of a combined one; any other alone."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
