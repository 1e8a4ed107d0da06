"""Optimizers whose steps can be repeated bit for bit elsewhere: on another CPU, on a GPU, in another batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from evermoe import ops


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with one arithmetic on CPU and CUDA (`evermoe.ops.adamw_`).

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own; those not given are the constructor's.

        Raises:
            ValueError: as the constructor's; nothing is added then.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over groups and state; also those of torch's class, without its AMSGrad.

        Raises:
            ValueError: the groups ask for AMSGrad.
        """
        if any(group.get("amsgrad") for group in state["param_groups"]):
            raise ValueError("amsgrad: expected False, as evermoe.optim.AdamW has no AMSGrad; use torch.optim.AdamW")
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the gradients that there are.

        Args:
            closure: computes the loss and its gradients anew, before the step.

        Returns:
            What the closure returned.

        Raises:
            ValueError: an option that was changed since is out of its range.
            RuntimeError: a gradient is of another dtype or device, or sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            numbers: dict[int, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group, numbers)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], numbers: dict[int, Tensor]) -> None:
        """`numbers` holds those of each step number that the group's parameters had so far."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        t = int(state["step"]) + 1
        if t not in numbers:
            numbers[t] = _numbers(group, t)[None]
        moments = _vector(state["exp_avg"]), _vector(state["exp_avg_sq"])
        ops.adamw_(_vector(parameter), *moments, [_vector(gradient)], numbers[t])
        state["step"] += 1


def _vector(tensor: Tensor) -> Tensor:
    """The tensor, or a view of it with a dimension: the op takes no number without one."""
    return tensor if tensor.dim() else tensor.view(1)


def _numbers(group: dict[str, Any], t: int) -> Tensor:
    options = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
    return ops.adamw_step(t=t, lr=float(group["lr"]), **options)


def _check_group(group: dict[str, Any]) -> None:
    _numbers(group, 1)
    for number, parameter in enumerate(group["params"]):
        if parameter.dtype != torch.float32 or parameter.is_sparse or not parameter.is_contiguous():
            strides = "" if parameter.is_sparse else f" with strides {parameter.stride()}"
            raise ValueError(
                f"params: expected contiguous float32 tensors, got number {number} of the group as {parameter.dtype} "
                f"of shape {tuple(parameter.shape)}, {parameter.layout}{strides}; train a contiguous float32 copy of it"
            )
