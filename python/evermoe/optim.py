"""Optimizers whose steps can be repeated bit for bit elsewhere: on another CPU, on a GPU, in another batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from evermoe import ops


class _Optimizer(torch.optim.Optimizer):
    """What the optimizers share: checks of their groups, and one call for all parameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own; those not given are the constructor's.

        Raises:
            ValueError: as the constructor's, or TypeError; nothing is added then.
        """
        super().add_param_group(param_group)
        try:
            self._numbers(self.param_groups[-1], 1)
            _check_parameters(self.param_groups[-1]["params"])
        except Exception:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the gradients that there are; where it raises, none.

        Args:
            closure: computes the loss and its gradients anew, before the step.

        Returns:
            What the closure returned.

        Raises:
            ValueError: an option that was changed since is out of its range.
            RuntimeError: a gradient is of another dtype or device, or sparse; or a CUDA graph is being captured, which
                would repeat this step's numbers for ever.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"evermoe.optim.{type(self).__name__}: expected no capture of a CUDA graph: the learning rate and the "
                "number of the step are read on the host. Take the step outside of the graph"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters, gradients, rows = [], [], []
        for group in self.param_groups:
            numbers: dict[int, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                t = self._next_step(parameter)
                if t not in numbers:
                    numbers[t] = self._numbers(group, t)
                parameters.append(parameter)
                gradients.append(parameter.grad)
                rows.append(numbers[t])
        if parameters:
            self._step_all(parameters, gradients, torch.stack(rows))
        return loss

    def _next_step(self, parameter: Tensor) -> int:
        """The number of the step that the parameter takes next, from 1, as far as the numbers depend on it."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], t: int) -> Tensor:
        """The numbers of the group's step `t`."""
        raise NotImplementedError

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        """Takes a step of each parameter, of all in one call, and counts it."""
        raise NotImplementedError


class AdamW(_Optimizer):
    """`torch.optim.AdamW` with one arithmetic on CPU and CUDA (`evermoe.ops.adamw_all_`).

    A drop-in: the same arguments, state names and `state_dict`, which both classes can load from each other. On an x86
    CPU the results equal torch's with `fused=True` bit for bit, where a parameter's size is a multiple of 8.

        optimizer = evermoe.optim.AdamW(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()

    A parameter whose gradient is None takes no step; a gradient of zeros is a step. A step that `torch.amp.GradScaler`
    skips changes nothing.

    Args:
        params: parameters, or groups of them: float32, contiguous. Gradients may be float32 or bfloat16.
        lr: learning rate; a scheduler may change it, a tensor is read at each step.
        betas: decay of the first and the second moment, each 0 to below 1.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend rather than descend.

    Raises:
        ValueError: an option is out of its range, or a parameter cannot be stepped; the message says which.
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
        """Takes over groups and state; also those of torch's class, without its AMSGrad.

        Raises:
            ValueError: the groups ask for AMSGrad.
        """
        if any(group.get("amsgrad") for group in state["param_groups"]):
            raise ValueError("amsgrad: expected False, as evermoe.optim.AdamW has no AMSGrad; use torch.optim.AdamW")
        super().__setstate__(state)

    def _next_step(self, parameter: Tensor) -> int:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return int(state["step"]) + 1

    def _numbers(self, group: dict[str, Any], t: int) -> Tensor:
        options = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
        return ops.adamw_step(t=t, lr=float(group["lr"]), **options)

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        states = [self.state[parameter] for parameter in parameters]
        m, v = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        ops.adamw_all_(parameters, m, v, gradients, numbers)
        for state in states:
            state["step"] += 1


class SGD(_Optimizer):
    """`torch.optim.SGD` with one arithmetic on CPU and CUDA (`evermoe.ops.sgd_all_`).

    A drop-in: the same arguments, state names and `state_dict`, which both classes can load from each other. On an x86
    CPU the results equal torch's bit for bit; with `fused=True`, where a parameter's size is a multiple of 8.

        optimizer = evermoe.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    A parameter whose gradient is None takes no step; a gradient of zeros is a step. A parameter's first step fills its
    momentum buffer with the gradient. A step that `torch.amp.GradScaler` skips changes nothing.

    Args:
        params: parameters, or groups of them: float32, contiguous. Gradients may be float32 or bfloat16.
        lr: learning rate; a scheduler may change it, a tensor is read at each step.
        momentum: how much of the buffer is kept; 0 for no buffer.
        dampening: how much of the gradient does not go into the buffer.
        weight_decay: times the parameters, added to the gradient.
        nesterov: look ahead by one more step of momentum; needs momentum, and no dampening.
        maximize: ascend rather than descend.

    Raises:
        ValueError: an option is out of its range, or a parameter cannot be stepped; the message says which.
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

    def _numbers(self, group: dict[str, Any], t: int) -> Tensor:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return ops.sgd_step(is_first=t == 1, lr=float(group["lr"]), **{name: group[name] for name in names})

    def _step_all(self, parameters: list[Tensor], gradients: list[Tensor], numbers: Tensor) -> None:
        momenta = numbers[:, 4].tolist()
        moving = [parameter for parameter, momentum in zip(parameters, momenta, strict=True) if momentum != 0]
        buffers = [self._buffer(parameter) for parameter in moving]
        ops.sgd_all_(parameters, buffers, gradients, numbers)
        for parameter, buffer in zip(moving, buffers, strict=True):
            self.state[parameter]["momentum_buffer"] = buffer

    def _buffer(self, parameter: Tensor) -> Tensor:
        """The parameter's momentum; before its first step, memory for it."""
        buffer: Tensor | None = self.state[parameter].get("momentum_buffer")
        return torch.empty_like(parameter, memory_format=torch.contiguous_format) if buffer is None else buffer


def _check_parameters(parameters: list[Tensor]) -> None:
    for number, parameter in enumerate(parameters):
        if parameter.dtype != torch.float32 or parameter.is_sparse or not parameter.is_contiguous():
            strides = "" if parameter.is_sparse else f" with strides {parameter.stride()}"
            raise ValueError(
                f"params: expected contiguous float32 tensors, got number {number} of the group as {parameter.dtype} "
                f"of shape {tuple(parameter.shape)}, {parameter.layout}{strides}; train a contiguous float32 copy of it"
            )
