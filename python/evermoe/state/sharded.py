"""Owners of what is not an expert, where its optimizer state is not on all ranks.

With `shard_optimizer=True` a unit that the optimizer steps has one owner: the one rank that trains it, as with an
expert that has no second replica. The owner alone has the optimizer's state. All of the unit is protected, moved and
recovered. The other ranks have its weights and buffers, too, for their forward passes. Those are never a source in a
recovery: they come from the owner after each update, and after each change of members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evermoe.state.unit import digests_of


class _Layout(NamedTuple):
    """A tensor that the optimizer keeps of a parameter."""

    dtype: torch.dtype
    is_scalar: bool
    """Whether it is a number, and not of the parameter's shape."""
    device: torch.device | None
    """None for the parameter's."""

    @staticmethod
    def of(tensor: Tensor, parameter: Tensor) -> _Layout:
        device = None if tensor.device == parameter.device else tensor.device
        return _Layout(tensor.dtype, parameter.dim() > 0 and tensor.dim() == 0, device)

    def empty(self, parameter: Tensor) -> Tensor:
        like = parameter.detach()
        if self.is_scalar:
            return like.new_empty((), dtype=self.dtype, device=self.device or like.device)
        return torch.empty_like(like, dtype=self.dtype, device=self.device)


class DenseOwners:
    """The rank that owns each unit, and the optimizer's state of those that this rank owns.

    Until the first placement every rank has all of it.

    Args:
        optimizer: with state for all parameters that it steps.
        dense: parameters and buffers of all units that are no experts, by unit and name.
        is_sharded: False to let all ranks have everything always; no unit has an owner then.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dense: Mapping[str, Mapping[str, Tensor]], *, is_sharded: bool
    ) -> None:
        self._optimizer = optimizer
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if is_sharded else set()
        self._tensors = {
            name: list(tensors.values())
            for name, tensors in dense.items()
            if any(id(tensor) in stepped for tensor in tensors.values())
        }
        self._layouts = {
            parameter: {key: _Layout.of(value, parameter) for key, value in state.items() if isinstance(value, Tensor)}
            for tensors in self._tensors.values()
            for parameter in tensors
            if (state := optimizer.state.get(parameter))
        }
        self._held = set(self._tensors)
        self.by_unit: dict[str, int] = {}
        """The owner of each unit that has one, by name; empty before the first placement."""

    @property
    def units(self) -> list[str]:
        """Names of the units that have owners."""
        return list(self._tensors)

    def holds(self, unit: str) -> bool:
        """Whether this rank has all of a unit: as its owner, or because all ranks have."""
        return unit not in self._tensors or unit in self._held

    def tensors_R(self, ranks: int) -> list[list[Tensor]]:
        """Divide parameters and buffers among ranks: those that each owns, in the same order everywhere."""
        owned: list[list[Tensor]] = [[] for _ in range(ranks)]
        for unit, tensors in self._tensors.items():
            owned[self.by_unit[unit]] += tensors
        return owned

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of all units that have owners."""
        return [tensor for tensors in self._tensors.values() for tensor in tensors]

    def digests(self) -> list[tuple[str, int]]:
        """Return unit and digest of the parameters that should be equal on all ranks, owners and others."""
        parameters = [[t.detach() for t in ts if isinstance(t, nn.Parameter)] for ts in self._tensors.values()]
        return [
            (f"weights of {unit}", value) for unit, value in zip(self._tensors, digests_of(parameters), strict=True)
        ]

    def place(self, owners: Mapping[str, int]) -> None:
        """Notes the owner of each unit."""
        self.by_unit = dict(owners)

    def hold(self, rank: int) -> None:
        """Lets go of the optimizer's state of others' units, then makes room for that of this rank's, to be written.

        Nothing before the first placement, or where all ranks have all.
        """
        if not self.by_unit:
            return
        mine = {unit for unit, owner in self.by_unit.items() if owner == rank}
        for unit in self._held - mine:
            for tensor in self._tensors[unit]:
                self._optimizer.state.pop(tensor, None)
        for unit in mine - self._held:
            for tensor in self._tensors[unit]:
                layouts = self._layouts.get(tensor, {})
                if layouts:
                    self._optimizer.state[tensor] = {key: layout.empty(tensor) for key, layout in layouts.items()}
        self._held = mine

    def release(self) -> None:
        """This process trains nothing: it only knows which units have owners."""
        self._held, self._layouts = set(), {}
        self._tensors = {unit: [] for unit in self._tensors}
