"""Optimizers whose steps other members can repeat bit for bit: on another CPU, on a GPU, in another batch.

A parameter in bfloat16 or float16 has a float32 master in its state. The step updates the master, and the parameter is
the master rounded to nearest, ties to even.

One pass over the memory multiplies the gradients by a factor, such as that of clipping, steps, and writes the rounded
parameters. The product stays in float32, whatever the gradient's dtype.

`Muon` multiplies matrices, and has masters and the factor, but its steps are not repeated elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from evermoe.ops.optim import adamw_all_, adamw_step, sgd_all_, sgd_step
from evermoe.optim.ema import EMA
from evermoe.optim.masters import HALF, MasterOptimizer
from evermoe.optim.muon import Muon

__all__ = ["EMA", "SGD", "AdamW", "Muon"]


class _Kernels(MasterOptimizer):
    """Base class of the optimizers that step all parameters in one call of a kernel."""

    def _check_group(self, group: dict[str, Any]) -> None:
        self._numbers(group, 1, 1.0)

    def _step(self, factor: float) -> None:
        parameters, gradients, rows = [], [], []
        for group in self.param_groups:
            numbers: dict[int, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                t = self._next_step(parameter)
                if t not in numbers:
                    numbers[t] = self._numbers(group, t, factor)
                parameters.append(parameter)
                gradients.append(parameter.grad)
                rows.append(numbers[t])
        if parameters:
            self._step_all(parameters, [_readable(gradient) for gradient in gradients], torch.stack(rows))

    def _next_step(self, parameter: Tensor) -> int:
        """Return the number of the parameter's next step, from 1, as far as `_numbers` depends on it."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], t: int, factor: float) -> Tensor:
        """Return the kernel's scalars for step `t` of the group, with gradients multiplied by a factor."""
        raise NotImplementedError

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        """Step all parameters in one call, and count the step."""
        raise NotImplementedError


class AdamW(_Kernels):
    """`torch.optim.AdamW` with one arithmetic on CPU and CUDA (`evermoe.ops.adamw_all_`).

    A drop-in replacement: it has the same arguments, state names and `state_dict`, and each class can load the other's.
    On an x86 CPU the results equal torch's with `fused=True` bit for bit if a parameter's size is a multiple of 8.

        optimizer = evermoe.optim.AdamW(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()

    A parameter whose gradient is None takes no step; a gradient of zeros is a step. A step that `torch.amp.GradScaler`
    skips changes nothing.

    Args:
        params: parameters, or groups of them: contiguous; float32, or bfloat16 or float16, which get float32 masters in
            the state (`master_param`). Gradients may be float32, bfloat16 or float16.
        lr: learning rate; a scheduler may change it, a tensor is read at each step.
        betas: decay of the first and the second moment, each 0 to below 1.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend rather than descend.

    Raises:
        ValueError: an option is out of range, or a parameter cannot be stepped; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state, also those of torch's class without AMSGrad.

        Raises:
            ValueError: the groups use AMSGrad.
        """
        if any(group.get("amsgrad") for group in state["param_groups"]):
            raise ValueError("amsgrad: expected False, as evermoe.optim.AdamW has no AMSGrad; use torch.optim.AdamW")
        super().__setstate__(state)

    def _next_step(self, parameter: Tensor) -> int:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        return int(state["step"]) + 1

    def _numbers(self, group: dict[str, Any], t: int, factor: float) -> Tensor:
        options = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
        return adamw_step(t=t, lr=float(group["lr"]), clip=factor, **options)

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        states = [self.state[parameter] for parameter in parameters]
        m, v = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        targets = [self._target(parameter) for parameter in parameters]
        adamw_all_(targets, m, v, gradients, numbers, _rounded(parameters))
        # A sixth of the time of `+= 1` for each; a number would be converted for each.
        torch._foreach_add_([state["step"] for state in states], torch.ones((), device="cpu"), alpha=1.0)


class SGD(_Kernels):
    """`torch.optim.SGD` with one arithmetic on CPU and CUDA (`evermoe.ops.sgd_all_`).

    A drop-in replacement: it has the same arguments, state names and `state_dict`, and each class can load the other's.
    On an x86 CPU the results equal torch's bit for bit; with `fused=True`, if a parameter's size is a multiple of 8.

        optimizer = evermoe.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    A parameter whose gradient is None takes no step; a gradient of zeros is a step. A parameter's first step fills its
    momentum buffer with the gradient. A step that `torch.amp.GradScaler` skips changes nothing.

    Args:
        params: parameters, or groups of them: contiguous; float32, or bfloat16 or float16, which get float32 masters in
            the state (`master_param`). Gradients may be float32, bfloat16 or float16.
        lr: learning rate; a scheduler may change it, a tensor is read at each step.
        momentum: factor of the momentum buffer; 0 for no buffer.
        dampening: fraction of the gradient that is not added to the buffer.
        weight_decay: factor of the parameters that is added to the gradient.
        nesterov: Nesterov momentum; needs momentum > 0 and dampening 0.
        maximize: ascend rather than descend.

    Raises:
        ValueError: an option is out of range, or a parameter cannot be stepped; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, options | {"nesterov": nesterov, "maximize": maximize})

    def _next_step(self, parameter: Tensor) -> int:
        return 1 if self.state[parameter].get("momentum_buffer") is None else 2

    def _numbers(self, group: dict[str, Any], t: int, factor: float) -> Tensor:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        options = {name: group[name] for name in names}
        return sgd_step(is_first=t == 1, lr=float(group["lr"]), clip=factor, **options)

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        momenta = numbers[:, 4].tolist()
        moving = [parameter for parameter, momentum in zip(parameters, momenta, strict=True) if momentum != 0]
        buffers = [self._buffer(parameter) for parameter in moving]
        targets = [self._target(parameter) for parameter in parameters]
        sgd_all_(targets, buffers, gradients, numbers, _rounded(parameters))
        for parameter, buffer in zip(moving, buffers, strict=True):
            self.state[parameter]["momentum_buffer"] = buffer

    def _buffer(self, parameter: Tensor) -> Tensor:
        """Return the parameter's momentum; before its first step, uninitialized memory for it."""
        buffer: Tensor | None = self.state[parameter].get("momentum_buffer")
        if buffer is None:
            return torch.empty_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        return buffer


def _rounded(parameters: list[Tensor]) -> list[Tensor | None]:
    """Return the parameters that the kernel writes next to their masters, None in place of the others."""
    return [parameter if parameter.dtype in HALF else None for parameter in parameters]


def _readable(gradient: Tensor) -> Tensor:
    """Return the gradient in a dtype that the ops read: float32 or bfloat16."""
    return gradient.float() if gradient.dtype == torch.float16 else gradient
