"""An optimizer's state before its first step, and whether it can be divided into units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state now, as its first step would, without changing any parameter.

    Optimizers that have state already are left alone.

    Raises:
        UnsupportedState: the state is of a kind that units cannot hold, or does not start from zeros.
    """
    if not any(optimizer.state.values()):
        _check_start(optimizer)
        _start_from_zeros(optimizer)
    _check_optimizer_state(optimizer)


def _start_from_zeros(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients and a zero learning rate, then all state back to zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    saved = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with torch.no_grad():
        for parameter, value in saved.items():
            parameter.copy_(value)
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for key in [key for key, value in state.items() if value is None]:
            del state[key]
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def _check_start(optimizer: torch.optim.Optimizer) -> None:
    """Two steps on scratch tensors: an optimizer whose state starts otherwise than from zeros is refused."""
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        options = {key: value for key, value in group.items() if key != "params"}
        like = group["params"][0]
        drawn = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        results = []
        for prepared in (False, True):
            scratch = nn.Parameter(drawn[0].clone())
            try:
                fresh = type(optimizer)([{"params": [scratch], **options}])  # type: ignore[call-arg]
            except TypeError:
                return  # an optimizer with a constructor of its own: nothing to compare with
            try:
                _try_two_steps(fresh, scratch, drawn[1:], prepared)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UnsupportedState(
                    f"{type(optimizer).__name__} cannot step on a dense vector with a gradient alone: {error}"
                ) from None
            results.append(scratch.detach())
        if not torch.equal(*results):
            raise UnsupportedState(
                f"{type(optimizer).__name__} with {options} starts from other state than zeros, which a session cannot "
                "set up before the first step. Use e.g. torch.optim.AdamW(fused=True), or SGD without dampening."
            )


def _try_two_steps(optimizer: torch.optim.Optimizer, scratch: nn.Parameter, gradients: Tensor, prepared: bool) -> None:
    if prepared:
        _start_from_zeros(optimizer)
    for gradient in gradients:
        scratch.grad = gradient.clone()
        optimizer.step()


def _check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or (value.dim() > 0 and value.shape != parameter.shape):
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UnsupportedState(
                    f"{type(optimizer).__name__} keeps '{key}' as {found} for a parameter of shape "
                    f"{tuple(parameter.shape)}; expected tensors of the parameter's shape or scalar tensors. "
                    "Use an elementwise optimizer such as torch.optim.AdamW(fused=True) or SGD."
                )
