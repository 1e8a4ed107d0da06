"""An optimizer's state before its first step, and whether it can be divided into units."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState
from evermoe.expert import ROW_ALIGNMENT

_ROWS, _ROW = 4, ROW_ALIGNMENT
"""Shape of what an optimizer is tried on: rows of whole SIMD registers, so that it steps all of them alike."""
_TRIAL_RATE = 1e-2
_BATCHES = 16
"""Steps in which the state of all parameters is made, about, where none of them is larger than such a part."""
_LARGEST_DIFFERENCE = 1e-3
"""Part of the largest update by which updates may differ that should be the same: more than rounding."""
_ADVICE = "Use an elementwise optimizer such as torch.optim.AdamW(fused=True) or SGD."


def create_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, experts: Collection[Tensor]) -> None:
    """Makes the optimizer create its state now, as its first step would, without changing any parameter.

    Optimizers that have state already keep it.

    Args:
        optimizer: of the model.
        model: whose parameters it steps.
        experts: those of them that are stacks of experts, one in each row.

    Raises:
        ValueError: it steps a parameter of another model.
        UnsupportedState: it treats experts of one stack otherwise than each alone, or its state is of a kind that units
            cannot hold, or does not start from zeros.
    """
    _check_parameters(optimizer, model)
    stacks = {id(stack) for stack in experts}
    for group in optimizer.param_groups:
        if any(id(parameter) in stacks for parameter in group["params"]):
            _check_rows(optimizer, group)
    if not any(optimizer.state.values()):
        _check_start(optimizer)
        _start_from_zeros(optimizer)
    _check_optimizer_state(optimizer)


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"the optimizer's group {number} has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's: make the optimizer from this model's parameters, after the model is on its device"
                )


def _start_from_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Steps with zero gradients and a zero learning rate, then all state back to zero.

    A few parameters at a time have a gradient, so that this takes little memory beside the state.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for batch in _batches([parameter for group in optimizer.param_groups for parameter in group["params"]]):
        saved = [parameter.detach().clone() for parameter in batch]
        for parameter in batch:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(batch, saved, strict=True):
                parameter.copy_(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for key in [key for key, value in state.items() if value is None]:
            del state[key]
        for value in state.values():
            if is_plain(value):
                value.zero_()


def _batches(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters, together at most as large as the largest of them or a part of all."""
    sizes = [parameter.nbytes for parameter in parameters]
    limit = max([sum(sizes) // _BATCHES, *sizes])
    batches: list[list[Tensor]] = [[]]
    room = limit
    for parameter in parameters:
        if parameter.nbytes > room:
            batches.append([])
            room = limit
        batches[-1].append(parameter)
        room -= parameter.nbytes
    return batches


# ---- trials on scratch tensors


def _check_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Steps on a stack of rows, and on each row alone: experts come and go, and have replicas in other stacks."""
    drawn = _drawn(group["params"][0], (_ROWS, _ROW))
    whole, alone = (_stepped(optimizer, group, drawn, parts) - drawn[0] for parts in ([_ROWS], [1] * _ROWS))
    if not whole.count_nonzero():
        raise UnsupportedState(
            f"{type(optimizer).__name__} does not step the parameters of its groups: give the session the optimizer "
            "that steps them itself"
        )
    if (whole - alone).abs().max() > _LARGEST_DIFFERENCE * whole.abs().max():
        raise UnsupportedState(
            f"{type(optimizer).__name__} mixes the rows of a parameter: it steps the experts of a layer otherwise "
            f"together than one by one, so that replicas of an expert would differ. {_ADVICE} Such an optimizer may "
            "step other parameters than the experts'."
        )


def _check_start(optimizer: torch.optim.Optimizer) -> None:
    """Two steps on scratch tensors: an optimizer whose state starts otherwise than from zeros is refused."""
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        like = group["params"][0]
        drawn = _drawn(like, (_ROWS, _ROW) if like.dim() == 2 else (_ROW,))
        results = [_stepped(optimizer, group, drawn, [len(drawn[0])], prepared=prepared) for prepared in (False, True)]
        if not torch.equal(*results):
            options = {key: value for key, value in group.items() if key != "params"}
            raise UnsupportedState(
                f"{type(optimizer).__name__} with {options} starts from other state than zeros, which a session cannot "
                "set up before the first step. Use e.g. torch.optim.AdamW(fused=True), or SGD without dampening."
            )


def _drawn(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float `[3, *shape]`: a parameter and two gradients."""
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    drawn: Tensor,
    parts: list[int],
    *,
    prepared: bool = False,
) -> Tensor:
    """What two steps of an optimizer like this one make of a parameter that is divided into so many rows each.

    Raises:
        UnsupportedState: it cannot step it.
    """
    scratch = [nn.Parameter(part.clone()) for part in drawn[0].split(parts)]
    try:
        twin = _twin(optimizer, group, scratch)
        if prepared:
            _start_from_zeros(twin)
        for gradient in drawn[1:]:
            for parameter, part in zip(scratch, gradient.split(parts), strict=True):
                parameter.grad = part.clone()
            twin.step()
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedState(
            f"{type(optimizer).__name__} cannot step on a dense tensor with a gradient alone: {error}. {_ADVICE}"
        ) from None
    return torch.cat([part.detach() for part in scratch])


def _twin(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], scratch: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A second optimizer with the class of one and the options of a group of it, for scratch parameters."""
    rate = torch.full_like(group["lr"], _TRIAL_RATE) if isinstance(group["lr"], Tensor) else _TRIAL_RATE
    own = {key: value for key, value in group.items() if key != "param_names"} | {"params": scratch, "lr": rate}
    kind: Any = type(optimizer)
    try:
        return kind([own])
    except TypeError:  # its constructor wants more: take over what it has made of that
        twin: Any = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler has wrapped that of the optimizer
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups, twin.state = [own], defaultdict(dict)
    return twin


def _check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not is_plain(value) or (value.dim() > 0 and value.shape != parameter.shape):
                found = tuple(value.shape) if is_plain(value) else type(value).__name__
                raise UnsupportedState(
                    f"{type(optimizer).__name__} keeps '{key}' as {found} for a parameter of shape "
                    f"{tuple(parameter.shape)}; expected tensors of the parameter's shape or scalar tensors. {_ADVICE}"
                )


def is_plain(value: object) -> bool:
    """Whether it is a tensor whose bytes are its elements, not a subclass that stores them in another way."""
    return type(value) in (Tensor, nn.Parameter)
