"""peft's adapters of experts, `LoraConfig(target_parameters=...)`, around elastic experts.

peft wraps an experts module in a `ParamWrapper` for each adapted stack. Its two matrices have the adapters of all
experts. They stay as peft made them: modules that every member trains, copies and saves as it does attention. A forward
uses the parts that belong to the member's own experts. So peft's functions for adapters find what they know. What is
several times as large, the experts themselves, stays spread over the members.

A wrapper gets a class of its own here, derived from its own, so that nothing of peft is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState

Layer = TypeVar("Layer", bound=nn.Module)


class LowRank(NamedTuple):
    """A change of a stack of local experts' matrices: `scaling · left @ right`."""

    left: Tensor
    """`[e, rows, rank]`."""
    right: Tensor
    """`[e, rank, columns]`."""
    scaling: float


class _ElasticWrapper:
    """The methods of peft's `ParamWrapper` that differ around elastic experts."""

    parameter_name: str
    lora_A: nn.ModuleDict
    active_adapters: Sequence[str]
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

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        changes = self.get_base_layer().changes
        found = [LowRank(*self.get_delta_factors(each)) for each in active_adapters if each in self.lora_A]
        changes[self.parameter_name] = found
        try:
            yield
        finally:
            del changes[self.parameter_name]


def adapt(model: nn.Module, experts: Mapping[Layer, Sequence[str]]) -> list[tuple[Layer, str]]:
    """Make peft's wrappers around elastic experts work with a part of the experts.

    Args:
        model: has the wrappers.
        experts: the elastic experts, with the names of their matrices, which can be adapted.

    Returns:
        The experts and the name of the matrix of each wrapper.

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
        found.append((base, name))
    return found


def changed(views: dict[str, Tensor], changes: dict[str, Sequence[LowRank]]) -> dict[str, Tensor]:
    """Return the matrices of experts with the changes of active adapters, by name."""
    found = dict(views)
    for name, each in ((name, each) for name, some in changes.items() for each in some):
        dtype = found[name].dtype
        found[name] = torch.baddbmm(found[name], each.left.to(dtype), each.right.to(dtype), alpha=each.scaling)
    return found
