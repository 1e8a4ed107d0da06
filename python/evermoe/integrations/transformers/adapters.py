"""peft's adapters of experts, `LoraConfig(target_parameters=...)`, around elastic experts.

peft wraps an experts module in a `ParamWrapper` for each adapted stack. Its two matrices have the adapters of all
experts. They stay as peft made them: modules that every member trains, copies and saves as it does attention. The
experts use the parts that belong to those of the member. They look these up themselves, as a member also computes for
others without a forward of its own model, in evaluations. So peft's functions for adapters find what they know. What is
several times as large, the experts themselves, stays spread over the members.

A wrapper gets a class of its own here, derived from its own, so that nothing of peft is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState
from evermoe.moe.experts import Experts
from evermoe.state.unit import own_tensors

Layer = TypeVar("Layer", bound=nn.Module)


class LowRank(NamedTuple):
    """A change of a stack of local experts' matrices: `scaling · left @ right`."""

    left: Tensor
    """`[e, rows, rank]`."""
    right: Tensor
    """`[e, rank, columns]`."""
    scaling: float


class Wrapper(Protocol):
    """A wrapper around elastic experts."""

    parameter_name: str
    """Transformers' name of the matrix."""

    def active_changes(self) -> list[LowRank]:
        """Return the changes by all active adapters."""


class _ElasticWrapper:
    """The methods of peft's `ParamWrapper` that differ around elastic experts."""

    parameter_name: str
    lora_A: nn.ModuleDict
    active_adapters: Sequence[str]
    disable_adapters: bool
    merged: bool
    get_base_layer: Any

    def _local(self, stack: Tensor) -> Tensor:
        """Return the rows of this member's experts, of those of all experts."""
        ids = self.get_base_layer().ids
        return stack if len(ids) == len(stack) else stack[ids]

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        left, right, scaling = super().get_delta_factors(adapter_name)  # type: ignore[misc]
        return self._local(left), self._local(right), scaling

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        return self._local(super().get_delta_weight(adapter_name, *args, **kwargs))  # type: ignore[misc]

    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        stack = getattr(self.get_base_layer(), self.parameter_name)
        for each in (adapter_names or self.active_adapters) if safe_merge else ():
            if each in self.lora_A and not torch.isfinite(stack + self.get_delta_weight(each)).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {each} seems to be broken")
        super().merge(safe_merge=False, adapter_names=adapter_names)  # type: ignore[misc]

    def _activate_lora(self, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()  # the experts apply `active_changes`

    def active_changes(self) -> list[LowRank]:
        """Return the changes by all active adapters."""
        if self.disable_adapters or self.merged:
            return []
        return [LowRank(*self.get_delta_factors(each)) for each in self.active_adapters if each in self.lora_A]

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
        self.get_base_layer().wrappers = []
        return super().unload_and_optionally_merge_module(*args, **kwargs)  # type: ignore[misc]


def adapt(model: nn.Module, experts: Mapping[Layer, Sequence[str]]) -> list[tuple[Layer, Wrapper]]:
    """Make peft's wrappers around elastic experts work with a part of the experts.

    Args:
        model: has the wrappers.
        experts: the elastic experts, with the names of their matrices, which can be adapted.

    Returns:
        The wrappers, each with the experts in it.

    Raises:
        UnsupportedState: an adapter is one of biases, or of another kind than `ParamWrapper`.
    """
    found = []
    for path, module in model.named_modules():
        base: Any = module.get_base_layer() if "base_layer" in module._modules else None
        if base not in experts:
            continue
        kind, name = type(module), str(getattr(module, "parameter_name", ""))
        if name not in experts[base] or not hasattr(kind, "_activate_lora"):
            raise UnsupportedState(
                f"make_elastic: {path} is an adapter ({kind.__name__}) of {name or 'experts as one module'}, expected "
                f"peft's LoRA of {' or '.join(experts[base])}, as LoraConfig(target_parameters=[...]) makes it"
            )
        if not isinstance(module, _ElasticWrapper):
            module.__class__ = type(kind.__name__, (_ElasticWrapper, kind), {})  # peft finds it by this name
        found.append((base, module))
    return found


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is peft's, around another one."""
    return hasattr(type(model), "get_base_model") and isinstance(getattr(model, "peft_config", None), dict)


def state_outside_experts(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by their keys in its state dict, without those of experts, on each member.

    Raises:
        UnsupportedState: experts are trained, which no member has all of.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            found |= {f"{path}.{name}": tensor.detach() for name, tensor in own_tensors(module)}
        elif module.weights.requires_grad:
            raise UnsupportedState(
                f"expected adapters of experts that are frozen, but {path} is trained, of which a member has a part: "
                "session.full_state_dict() has all of it, for a model of your own that peft saves"
            )
    return found


class BestAdapters:
    """Adapters from a folder that peft has written, in place of those that a session trains."""

    def __init__(self, model: Any, folder: str) -> None:
        self._model, self._folder = model, Path(folder)
        self.tensors: Sequence[Tensor] = [each for each in model.parameters() if each.requires_grad]
        """Tensors that `load` writes."""

    def load(self) -> None:
        """Read the adapters into the model."""
        for name in self._model.peft_config:
            place = self._folder if name == "default" else self._folder / name
            self._model.load_adapter(str(place), name, is_trainable=True)


def changed(views: dict[str, Tensor], wrappers: Mapping[str, Wrapper]) -> dict[str, Tensor]:
    """Return the matrices of experts with the changes by active adapters, by name."""
    found = dict(views)
    for name, each in ((name, each) for name, wrapper in wrappers.items() for each in wrapper.active_changes()):
        dtype = found[name].dtype
        found[name] = torch.baddbmm(found[name], each.left.to(dtype), each.right.to(dtype), alpha=each.scaling)
    return found
