"""Describes the units of a model: which tensors each has, with their shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from evermoe.moe.experts import Experts
from evermoe.state.shards import Shards
from evermoe.state.unit import MARKS, SESSION, TensorSpec, Unit, expert_unit

StateOf = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Returns the optimizer's state of a parameter, by the parameter's name, a slash and its own."""


def list_dense(
    dense: Mapping[str, Mapping[str, Tensor]],
    state_of: StateOf,
    shapes: Mapping[int, tuple[int, ...]],
    shards: Shards | None,
) -> list[Unit]:
    """Return the units that are no experts.

    Args:
        dense: tensors by unit and name; DTensors are described with the shapes of the complete tensors.
        state_of: of the optimizer.
        shapes: those that tensors without values will have, by their identity.
        shards: of an island; None without one.
    """
    return [Unit(name, tuple(_specs(name, tensors, state_of, shapes, shards))) for name, tensors in dense.items()]


def _specs(
    unit: str,
    tensors: Mapping[str, Tensor],
    state_of: StateOf,
    shapes: Mapping[int, tuple[int, ...]],
    shards: Shards | None,
) -> list[TensorSpec]:
    specs = []
    for key, tensor in tensors.items():
        local, extent = (tensor, None) if shards is None else (shards.local(tensor), shards.extent(tensor))
        for name, each in ({key: local} | dict(state_of(key, local))).items():
            specs.append(
                TensorSpec(
                    name,
                    shapes.get(id(tensor), tuple(tensor.shape)) if each.dim() else (),
                    each.dtype,
                    is_optional=(unit, name) == (SESSION, MARKS),
                    extent=extent if each.dim() else None,
                    is_state=name not in tensors and is_state(name, each),
                    is_buffer=name in tensors and not isinstance(each, nn.Parameter),
                )
            )
    return specs


def list_experts(path: str, layer: Experts, stacks: Mapping[str, Tensor]) -> list[Unit]:
    """Return the units of the layer at `path`.

    Args:
        path: of the layer.
        layer: with the experts.
        stacks: weights `[e, row]` and state, `[e, row]` or a scalar, by name.
    """
    specs = tuple(
        TensorSpec(
            key,
            tuple(t.shape[1:]) if t.dim() == 2 else tuple(t.shape),
            t.dtype,
            is_state=t is not layer.weights and is_state(key, t),
        )
        for key, t in stacks.items()
    )
    return [Unit(expert_unit(path, e), specs, path, e) for e in range(layer.num_experts)]


def is_state(name: str, tensor: Tensor) -> bool:
    """Whether only an update needs a tensor of the optimizer. Averages of `EMA` are for evaluation, too."""
    return tensor.dim() > 0 and not name.endswith("/ema")
