"""Parts of a model that no step writes: frozen parameters of which the optimizer keeps nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evermoe.state.training_state import TrainingState


def is_still(tensor: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps leave a tensor as it is: a frozen parameter of which the optimizer keeps nothing.

    A script may write it nevertheless, which its stamp or its digest shows.
    """
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return is_frozen and not optimizer.state.get(tensor)


def still_tensors(state: TrainingState, unit: str) -> list[str]:
    """Return the names of a unit's tensors that no step writes."""
    return [name for name, tensor in _own_tensors(state, unit).items() if is_still(tensor, state.optimizer)]


def is_frozen(state: TrainingState, unit: str) -> bool:
    """Whether no step writes anything of a unit."""
    tensors = _own_tensors(state, unit)
    return bool(tensors) and len(still_tensors(state, unit)) == len(tensors)


def _own_tensors(state: TrainingState, unit: str) -> dict[str, Tensor]:
    found = state.catalog.by_name[unit]
    return {"weights": state.layers[found.layer].weights} if found.layer is not None else state.dense_tensors(unit)
