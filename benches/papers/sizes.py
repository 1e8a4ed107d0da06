"""Bytes of a copy under each policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from evermoe.planning._arguments import count

SizePolicy = Literal["full", "pec", "moetion", "gradients"]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model, and bytes for each of them."""

    non_expert_parameters: int
    """Parameters that every token passes: attention, norms, embeddings, routers."""
    layers: int
    """Number of MoE layers."""
    experts: int
    """Experts of each layer."""
    expert_parameters: int
    """Parameters of one expert."""
    weight_bytes: int = 2
    """Bytes of a weight in the running model; bf16."""
    optimizer_bytes: int = 12
    """Bytes of a parameter's optimizer state: fp32 master weight and two moments."""
    gradient_bytes: int = 2
    """Bytes of a gradient as it is sent."""

    def __post_init__(self) -> None:
        for field in fields(self):
            count(field.name, getattr(self, field.name))
        if self._state(self.layers * self.experts)[2] == 0:
            raise ValueError("non_expert_parameters: the model has no bytes; expected parameters and bytes above 0")

    def _state(self, experts: int) -> tuple[int, int, int]:
        """Return the bytes of the state of `experts` experts, of the rest, and of both."""
        each = self.weight_bytes + self.optimizer_bytes
        parts = experts * self.expert_parameters * each, self.non_expert_parameters * each
        return *parts, sum(parts)


@dataclass(frozen=True)
class CopySize:
    """Bytes of one copy of a model."""

    expert_bytes: int
    non_expert_bytes: int
    total_bytes: int
    ratio: float
    """Ratio of the total to a full checkpoint."""


def checkpoint_bytes(
    model: ModelSize, policy: SizePolicy, *, experts_per_layer: int | None = None, selected: int | None = None
) -> CopySize:
    """Bytes of one copy of the model under a policy, over all ranks, each unit counted once.

    With b = weight_bytes + optimizer_bytes and P parameters of an expert:

    - `"full"`: non_expert_parameters * b + layers * experts * P * b.
    - `"pec"`: the same with `experts_per_layer`, at most all, in the place of experts.
    - `"moetion"`: the same with `selected` experts in all layers together, with all their state; of the others
      nothing is sent.
    - `"gradients"`: what replay needs at each step: gradient_bytes for each parameter that is not an expert's, and
      of each of the `selected` experts that received a token, or of all; an idle expert needs nothing.

        >>> model = ModelSize(non_expert_parameters=1000, layers=2, experts=4, expert_parameters=500)
        >>> checkpoint_bytes(model, "full")
        CopySize(expert_bytes=56000, non_expert_bytes=14000, total_bytes=70000, ratio=1.0)
        >>> checkpoint_bytes(model, "pec", experts_per_layer=1).ratio  # (14000 + 56000 / 4) / 70000
        0.4
        >>> checkpoint_bytes(model, "gradients", selected=5).total_bytes  # 2 * (1000 + 5 * 500)
        7000

    Args:
        model: parameters and bytes.
        policy: one of the four.
        experts_per_layer: K; `"pec"` only, which needs it.
        selected: experts in all layers together; `"moetion"` needs it, `"gradients"` may have it.

    Raises:
        ValueError: an unknown policy, an argument that is missing or not of this policy, more experts than there are.
    """
    if policy not in ("full", "pec", "moetion", "gradients"):
        raise ValueError(f'policy: expected "full", "pec", "moetion" or "gradients", got {policy!r}')
    if (experts_per_layer is not None) != (policy == "pec"):
        raise ValueError(f'experts_per_layer: "pec" needs it and no other policy takes it; the policy is "{policy}"')
    if selected is None and policy == "moetion":
        raise ValueError('selected: "moetion" needs the number of experts in all layers together')
    if selected is not None and policy in ("full", "pec"):
        raise ValueError(f'selected: only "moetion" and "gradients" take it; the policy is "{policy}"')
    experts = model.layers * model.experts
    chosen = experts if selected is None else count("selected", selected)
    if experts_per_layer is not None:
        chosen = model.layers * min(count("experts_per_layer", experts_per_layer), model.experts)
    if chosen > experts:
        raise ValueError(f"selected: expected at most {experts}, all experts of all layers, got {chosen}")
    full = model._state(experts)[2]
    expert, non_expert, total = model._state(chosen)
    if policy == "gradients":
        expert = chosen * model.expert_parameters * model.gradient_bytes
        non_expert = model.non_expert_parameters * model.gradient_bytes
        total = expert + non_expert
    return CopySize(expert, non_expert, total, total / full)
