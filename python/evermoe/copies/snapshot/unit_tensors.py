"""Tensors of the bundles that a member captures, listed again only if some of them were replaced."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from evermoe.state.training_state import TrainingState

Run = tuple[int, int]
"""Address and bytes of a tensor."""


@dataclass(frozen=True)
class UnitTensors:
    """The tensors of some units."""

    by_unit: list[list[Tensor]]
    """Their bytes one after the other are those of the unit."""
    every: list[Tensor]
    """The same, one after the other."""
    runs: list[list[Run]]
    """Where they are, by unit."""
    is_contiguous: bool
    """Whether all of them are contiguous."""
    gpu: torch.device | None
    """Device of the first one that is on a GPU; None if none is."""

    @classmethod
    def of(cls, by_unit: list[list[Tensor]]) -> UnitTensors:
        """Return the tensors with their places."""
        every = [tensor for each in by_unit for tensor in each]
        return cls(
            by_unit,
            every,
            [[(tensor.data_ptr(), tensor.nbytes) for tensor in each] for each in by_unit],
            all(tensor.is_contiguous() for tensor in every),
            next((tensor.device for tensor in every if tensor.is_cuda), None),
        )


class ListedTensors:
    """Lists the tensors of bundles: in a steady step those of the previous one, as an expert's rows are slow to list.

    Args:
        state: this member's units.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._dense = [unit.name for unit in state.catalog.units if unit.layer is None]
        self._addresses: list[int] = []
        self._listed: dict[tuple[str, ...], UnitTensors] = {}

    def of(self, bundles: Collection[tuple[str, ...]]) -> list[UnitTensors]:
        """Return the tensors of each bundle's units, as they are now."""
        views = self._state.views
        if not bundles:
            return []
        if views.parts or views.stand_ins:  # of pipelines, whose units may change without their tensors
            return [UnitTensors.of(self._state.tensors(units)) for units in bundles]
        addresses = self._find_addresses()
        if addresses != self._addresses:
            self._listed, self._addresses = {}, addresses
        found = []
        for units in bundles:
            if units not in self._listed:
                self._listed[units] = UnitTensors.of(self._state.tensors(units))
            found.append(self._listed[units])
        return found

    def _find_addresses(self) -> list[int]:
        """Return the addresses of all tensors of this member, and its experts: lists change only with them."""
        layers, state, found = self._state.layers.values(), self._state.optimizer.state, list[int]()
        dense = (tensor for name in self._dense for tensor in self._state.dense_tensors(name).values())
        for tensor in (*dense, *(layer.weights for layer in layers)):
            found.append(tensor.data_ptr())
            found += [value.data_ptr() for value in state.get(tensor, {}).values() if isinstance(value, Tensor)]
        for layer in layers:
            found += layer.ids
        return found

    def forget(self) -> None:
        """Release the tensors, to free their memory for their successors."""
        self._listed, self._addresses = {}, []
