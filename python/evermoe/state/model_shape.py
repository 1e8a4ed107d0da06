"""Sizes of an existing model, as the planner of memory takes them."""

from __future__ import annotations

from torch import nn

from evermoe.moe.experts import expert_layers
from evermoe.planning.models import ModelShape
from evermoe.state.unit import dense_tensors


def shape_of(model: nn.Module, source: str = "") -> ModelShape:
    """Sizes of a model with evermoe's experts; one on the `meta` device will do.

    Args:
        model: holds all its experts.
        source: what it is.

    Raises:
        ValueError: it has no MoE layer, or layers of different sizes.
    """
    layers = expert_layers(model)
    sizes = {(layer.num_experts, layer.weights.shape[1]) for layer in layers.values()}
    if len(sizes) != 1:
        found = ", ".join(f"{number} of {each:,} parameters" for number, each in sorted(sizes)) or "no MoE layer"
        raise ValueError(
            f"{type(model).__name__}: expected MoE layers with equally many experts of one size, got {found}"
        )
    ((experts, parameters),) = sizes
    dense = [
        sum(tensor.numel() for tensor in tensors.values() if isinstance(tensor, nn.Parameter))
        for tensors in dense_tensors(model).values()
    ]
    return ModelShape(
        dense_parameters=sum(dense),
        largest_module=max(dense, default=0),
        layers=len(layers),
        experts=experts,
        expert_parameters=parameters,
        source=source,
    )
