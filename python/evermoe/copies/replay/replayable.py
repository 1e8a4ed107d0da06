"""Units whose steps replicas can repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from evermoe.copies.replay.calibrate import Arithmetic
from evermoe.copies.replay.part import part_name, parts_of
from evermoe.copies.replay.sender import FUSED_ROW
from evermoe.optim import MASTER
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import TensorSpec, Unit


def can_replay(state: TrainingState, unit: str, arithmetic: Arithmetic) -> bool:
    """Whether the steps of a unit that one rank trains can be repeated from its gradients, by this arithmetic.

    They must be steps of an expert, or of a unit with an owner and no buffers. Its parameters must all be in the
    optimizer, and be float32 or have float32 masters.
    """
    found = state.catalog.by_name[unit]
    return (found.layer is not None or unit in state.owners.units) and is_repeatable(state, found, arithmetic)


def is_repeatable(state: TrainingState, found: Unit, arithmetic: Arithmetic) -> bool:
    """Whether the steps of a complete unit can be repeated from the gradients that its optimizer sees.

    The conditions are those of `can_replay`, except that any number of ranks may train the unit.
    """
    if not all(_is_exact(specs) for specs in parts_of(found)):
        return False
    stepped = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    if found.layer is None:
        return all(id(p) in stepped for p in state.dense_tensors(found.name).values())
    weights = state.layers[found.layer].weights
    is_uniform = arithmetic.variant != "torch_cpu_fused" or weights.shape[1] % FUSED_ROW == 0
    return is_uniform and id(weights) in stepped


def _is_exact(specs: Sequence[TensorSpec]) -> bool:
    """Whether the state of a parameter is float32, or the parameter rounds a master that is."""
    parameter, *kept = specs
    if any(spec.dtype != torch.float32 for spec in kept):
        return False
    if parameter.dtype == torch.float32:
        return True
    has_master = any(spec.name == part_name(parameter.name, MASTER) for spec in kept)
    return has_master and math.prod(parameter.shape) % 2 == 0  # the sender requires it, too
