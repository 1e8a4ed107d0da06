"""Base class of evermoe's optimizers: float32 masters of 16-bit parameters, and a factor of the gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

HALF = torch.bfloat16, torch.float16
"""Dtypes of parameters that have a master."""
MASTER = "master_param"
"""Name of the master in the state."""


class MasterOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers: checks their groups, keeps masters, and steps with a factor."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; missing options default to the constructor's.

        Raises:
            ValueError: as the constructor; TypeError, too. The group is not added then.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            _check_parameters(self.param_groups[-1]["params"])
        except Exception:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """Step all parameters that have a gradient; if it raises, none.

        Args:
            closure: recomputes the loss and its gradients before the step.
            factor: multiplies the gradients, in float32; their tensors keep their values.

        Returns:
            The result of the closure.

        Raises:
            ValueError: an option was set to a value out of range, or the factor is not a finite number of 0 or more.
            RuntimeError: a gradient has another dtype or device, or is sparse; or a CUDA graph is being captured, which
                would replay the learning rate and the step number of this step.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"evermoe.optim.{type(self).__name__}: expected no capture of a CUDA graph: the learning rate and the "
                "number of the step are read on the host. Call step() outside of the graph"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(factor)
        return loss

    def _target(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the step updates: the parameter, or its master, a float32 copy at first."""
        if parameter.dtype not in HALF:
            return parameter
        state = self.state[parameter]
        if MASTER not in state:
            state[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format)
        master: Tensor = state[MASTER]
        return master

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; torch's method would round the float32 state of bfloat16 and float16 parameters."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items() if parameter.dtype in HALF else ():
                if isinstance(value, Tensor) and name != "step":
                    self.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the options of a group, and raise ValueError if one is out of range."""
        raise NotImplementedError

    def _step(self, factor: float) -> None:
        """Step all parameters that have a gradient, which is multiplied by a factor."""
        raise NotImplementedError


def takes_factor(optimizer: torch.optim.Optimizer) -> TypeGuard[MasterOptimizer]:
    """Return whether the step of the optimizer's class is the one of this module, which has the argument `factor`."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(MasterOptimizer.step)


def _check_parameters(parameters: list[Tensor]) -> None:
    for number, parameter in enumerate(parameters):
        is_known = parameter.dtype in (torch.float32, *HALF)
        if not is_known or parameter.is_sparse or not parameter.is_contiguous():
            strides = "" if parameter.is_sparse else f" with strides {parameter.stride()}"
            raise ValueError(
                "params: expected contiguous tensors in float32, bfloat16 or float16, got number "
                f"{number} of the group as {parameter.dtype} of shape {tuple(parameter.shape)}, "
                f"{parameter.layout}{strides}; train a contiguous float32 copy of it"
            )
