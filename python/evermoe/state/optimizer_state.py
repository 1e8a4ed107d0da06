"""An optimizer's state before its first step, and whether it can be divided into units."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState
from evermoe.moe.expert import ROW_ALIGNMENT, Expert
from evermoe.moe.experts import Experts
from evermoe.optim.combined import each_of

_ROWS, _ROW = 4, ROW_ALIGNMENT
"""Shape on which an optimizer is tried: rows of complete SIMD registers, so that it steps all of them the same way."""
_EXPERT = Expert(4, 4)
"""Whose row has that size."""
_TRIAL_RATE = 1e-2
_BATCHES = 16
"""Steps in which the state of all parameters is made, about, where none of them is larger than such a part."""
_LARGEST_DIFFERENCE = 1e-3
"""Part of the largest update by which updates may differ that should be the same: more than rounding."""
_ADVICE = "Use an elementwise optimizer such as torch.optim.AdamW(fused=True) or SGD."


def create_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Collection[Tensor],
    *,
    experts: Collection[Tensor],
    divided: Collection[Tensor] = (),
) -> Masters:
    """Makes the optimizer create its state now, as its first step would, without changing any parameter.

    Each tensor of the state starts from zeros, or from the parameter itself, as float32 masters do: trials on small
    tensors show which. Optimizers that have state already keep it.

    Args:
        optimizer: of the model.
        parameters: of the model; it steps some of them.
        experts: those of them that are stacks of experts, one in each row.
        divided: parts of parameters of which other processes have the others.

    Returns:
        Which of the state starts from the parameters; nothing if there was state already.

    Raises:
        ValueError: it steps a parameter of another model.
        UnsupportedState: it treats experts of one stack otherwise than each alone, or a part of a parameter otherwise
            than in the complete one; or its state is of a kind that units cannot hold, or starts neither from zeros nor
            from the parameter.
    """
    stacks, parts, found = {id(stack) for stack in experts}, {id(part) for part in divided}, {}
    for each in each_of(optimizer):
        _check_parameters(each, parameters)
        for group in each.param_groups:
            if any(id(parameter) in stacks for parameter in group["params"]):
                _check_rows(each, group)
            if any(id(parameter) in parts for parameter in group["params"]):
                _check_parts(each, group)
        found[each] = {} if any(each.state.values()) else _find_masters(each)
        if not any(each.state.values()):
            _start(each, Masters({each: found[each]}))
        _check_optimizer_state(each)
    return Masters(found)


def _check_parameters(optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]) -> None:
    own = {id(parameter) for parameter in parameters}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"the optimizer's group {number} has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's: make the optimizer from this model's parameters, once it is on its device, and after "
                    "fully_shard"
                )


class Masters:
    """Find the tensors of optimizers' state that start from the parameter itself; all others start from zeros.

    Args:
        names: of such tensors, by optimizer and kind of parameter.
    """

    def __init__(self, names: Mapping[torch.optim.Optimizer, Mapping[_Kind, Collection[str]]]) -> None:
        self._names = names

    def of(self, parameters: Collection[Tensor]) -> list[Collection[str]]:
        """The names of such tensors for each of some parameters of the optimizers; none for others."""
        found: dict[int, Collection[str]] = {
            id(p): names.get(kind, ())
            for optimizer, names in self._names.items()
            for kind, each in _by_kind(optimizer).items()
            for p in each
        }
        return [found.get(id(p), ()) for p in parameters]


def _start(optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    """Steps with zero gradients and a zero learning rate, then all state to what it starts from.

    A few parameters at a time have a gradient, so that this takes little memory in addition to the state.
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
    names = masters.of(list(optimizer.state))
    for (parameter, state), of_parameter in zip(optimizer.state.items(), names, strict=True):
        for key in [key for key, value in state.items() if value is None]:
            del state[key]
        for key, value in state.items():
            if is_plain(value):
                value.copy_(parameter.detach()) if key in of_parameter else value.zero_()


class _Kind(NamedTuple):
    """Parameters whose state an optimizer treats the same way."""

    group: int
    dtype: torch.dtype
    is_matrix: bool


def _by_kind(optimizer: torch.optim.Optimizer) -> dict[_Kind, list[Tensor]]:
    found: dict[_Kind, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            found.setdefault(_Kind(number, parameter.dtype, parameter.dim() == 2), []).append(parameter)
    return found


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
    together, alone = _try_rows(optimizer, group, are_experts=True)
    if not together.count_nonzero():
        raise UnsupportedState(
            f"{type(optimizer).__name__} does not step the parameters of its groups: give the session the optimizer "
            "that steps them itself"
        )
    if _differ(together, alone):
        raise UnsupportedState(
            f"{type(optimizer).__name__} mixes the rows of a parameter: it steps the experts of a layer otherwise "
            f"together than one by one, so that replicas of an expert would differ. {_ADVICE} "
            "evermoe.optim.Muon steps each expert's matrices on their own. Another optimizer may step the parameters "
            "that are no experts, where a session gets a list of them."
        )


def _check_parts(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Steps on a matrix, and on each of its rows alone: each process of an island steps a part of a parameter."""
    if _differ(*_try_rows(optimizer, group, are_experts=False)):
        raise UnsupportedState(
            f"{type(optimizer).__name__} mixes the rows of a parameter, of which each process of an island has a part: "
            f"it would step the parts otherwise than the complete parameter. {_ADVICE}"
        )


def _try_rows(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, are_experts: bool
) -> tuple[Tensor, Tensor]:
    """The updates of a matrix's rows that it steps together, and one by one."""
    drawn = _drawn(group["params"][0], (_ROWS, _ROW))
    together, alone = (
        _two_steps(optimizer, group, drawn, parts, are_experts=are_experts)[""] - drawn[0]
        for parts in ([_ROWS], [1] * _ROWS)
    )
    return together, alone


def _differ(together: Tensor, alone: Tensor) -> bool:
    return bool((together - alone).abs().max() > _LARGEST_DIFFERENCE * together.abs().max())


def _find_masters(optimizer: torch.optim.Optimizer) -> dict[_Kind, Collection[str]]:
    """By kind of parameter, names of the state that starts from the parameter itself.

    Two steps on scratch tensors must have equal results, whether the optimizer makes the state in the first or `_start`
    has made it: one whose state starts otherwise is refused.
    """
    found: dict[_Kind, Collection[str]] = {}
    for kind, parameters in _by_kind(optimizer).items():
        group = optimizer.param_groups[kind.group]
        drawn = _drawn(parameters[0], (_ROWS, _ROW) if kind.is_matrix else (_ROW,))
        alone = _two_steps(optimizer, group, drawn, [len(drawn[0])])
        for names in _choices(alone, drawn[0]):
            prepared = _two_steps(optimizer, group, drawn, [len(drawn[0])], masters=names)
            if prepared.keys() == alone.keys() and all(torch.equal(prepared[key], alone[key]) for key in alone):
                found[kind] = names
                break
        else:
            options = {key: value for key, value in group.items() if key != "params"}
            raise UnsupportedState(
                f"{type(optimizer).__name__} with {options} starts from other state than zeros or the parameter, which "
                "a session cannot set up before the first step. Use e.g. torch.optim.AdamW(fused=True), or SGD without "
                "dampening."
            )
    return found


def _choices(results: Mapping[str, Tensor], parameter: Tensor) -> Iterator[tuple[str, ...]]:
    """Names of state that may start from the parameter, the likeliest choice first: none of it, all of it, ..."""
    names = [name for name, value in results.items() if name and value.shape == parameter.shape]
    yield ()
    for number in range(1, len(names) + 1):
        yield from itertools.combinations(names, number)


def _drawn(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float `[3, *shape]`: a parameter and two gradients."""
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _two_steps(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    drawn: Tensor,
    parts: list[int],
    *,
    masters: Collection[str] | None = None,
    are_experts: bool = False,
) -> dict[str, Tensor]:
    """Take two steps of an optimizer like this one on a parameter that is divided into parts of `parts` rows each.

    Args:
        optimizer: any.
        group: of it, with the options.
        drawn: a parameter and two gradients.
        parts: rows of each parameter.
        masters: names of the state that is made to start from the parameter, as the rest is from zeros; None to leave
            that to the optimizer.
        are_experts: whether each part is a layer's stack of experts.

    Returns:
        The parameter under "", and its state by name.

    Raises:
        UnsupportedState: it cannot step it.
    """
    scratch = [nn.Parameter(part.clone()) for part in drawn[0].split(parts)]
    layers = [Experts(_EXPERT, len(stack), device="meta") for stack in scratch] if are_experts else []
    for layer, stack in zip(layers, scratch, strict=False):
        layer.weights = stack
    try:
        twin = _twin(optimizer, group, scratch)
        if masters is not None:
            _start(twin, Masters({twin: dict.fromkeys(_by_kind(twin), masters)}))
        for gradient in drawn[1:]:
            for parameter, part in zip(scratch, gradient.split(parts), strict=True):
                parameter.grad = part.clone()
            twin.step()
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedState(
            f"{type(optimizer).__name__} cannot step on a dense tensor with a gradient alone: {error}. {_ADVICE}"
        ) from None
    state = {key: value for key, value in twin.state.get(scratch[0], {}).items() if is_plain(value)}
    return {"": torch.cat([part.detach() for part in scratch])} | state


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
