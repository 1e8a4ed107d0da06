"""Sizes of an existing model, as the planner of memory takes them."""

from __future__ import annotations

from torch import nn

from evermoe.moe.experts import expert_layers
from evermoe.planning.models import ModelShape
from evermoe.state.unit import dense_tensors


def shape_of(model: nn.Module, source: str = "") -> ModelShape:
    """Sizes of a model with evermoe's experts; one on the `meta` device that holds all its experts will do.

    Parameters that require no gradient are frozen. They are taken for parameters that no optimizer has.

    Raises:
        ValueError: it has no MoE layer, or layers of different sizes, or nothing of it is trained.
    """
    layers = expert_layers(model)
    sizes = {(layer.num_experts, layer.weights.shape[1]) for layer in layers.values()}
    if len(sizes) != 1:
        found = ", ".join(f"{number} of {each:,} parameters" for number, each in sorted(sizes)) or "no MoE layer"
        raise ValueError(
            f"{type(model).__name__}: expected MoE layers with equally many experts of one size, got {found}"
        )
    ((experts, parameters),) = sizes
    trained, frozen = (
        [
            sum(
                each.numel()
                for each in tensors.values()
                if isinstance(each, nn.Parameter) and each.requires_grad == is_trained
            )
            for tensors in dense_tensors(model).values()
        ]
        for is_trained in (True, False)
    )
    return ModelShape(
        dense_parameters=sum(trained) + sum(frozen),
        largest_module=max(trained, default=0),
        layers=len(layers),
        experts=experts,
        expert_parameters=parameters,
        source=source,
        frozen_layers=sum(not layer.weights.requires_grad for layer in layers.values()),
        frozen_dense_parameters=sum(frozen),
        largest_frozen_module=max(frozen, default=0),
        adapted_expert_parameters=max(getattr(layer, "adapted_parameters", 0) for layer in layers.values()),
    )
