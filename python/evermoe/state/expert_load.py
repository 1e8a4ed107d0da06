"""Tokens that the experts of all MoE layers get; the same on all ranks.

Shape suffixes: L layers, E experts of the layer that has the most.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe import _native
from evermoe.moe.experts import Experts
from evermoe.moe.token_counts import TokenCount
from evermoe.planning.load import LoadAverage
from evermoe.state.copy_marks import CopyMarks
from evermoe.state.unit import expert_unit

LOAD_HALF_LIFE = _native.LOAD_HALF_LIFE
"""Steps after which a step counts half in the average load of the experts."""


class ExpertLoad:
    """Tokens of each expert: their average in a step, and their totals over the run.

    The tensors are part of the state: after a recovery all ranks count on from the same numbers.
    """

    def __init__(self, layers: Mapping[str, Experts]) -> None:
        self._layers = layers
        self._most_experts = max((layer.num_experts for layer in layers.values()), default=0)
        self.average = torch.zeros(len(layers), self._most_experts + 1, dtype=torch.float64)
        """[L, E + 1] state of the `planning.LoadAverage` of all layers."""
        self.tokens = torch.zeros(3, len(layers), self._most_experts, dtype=torch.int64)
        """[3, L, E] tokens of each expert: all, those lost, and the total at which it has got as many again."""
        self.marks = CopyMarks(len(layers), self._most_experts)
        """Latest copies of each expert, and the tokens that it had processed in them."""
        self.latest_LE = np.zeros((len(layers), self._most_experts), np.int64)
        """[L, E] tokens of each expert in the latest step; zeros if its update was left out."""

    @property
    def mean_LE(self) -> NDArray[np.float64]:
        """Average tokens of each expert in a step; zeros past the experts of a layer that has fewer."""
        return self._load_average().loads

    def by_unit(self) -> dict[str, float]:
        """Average tokens of each expert in a step, by unit."""
        return {
            expert_unit(path, expert): row[expert]
            for row, (path, layer) in zip(self.mean_LE.tolist(), self._layers.items(), strict=True)
            for expert in range(layer.num_experts)
        }

    def counts(self) -> NDArray[np.int64]:
        """Return the [L, E] tokens of the current step, as far as the layers have counted them."""
        tokens_LE = np.zeros((len(self._layers), self._most_experts), np.int64)
        totals = TokenCount.totals(layer.count for layer in self._layers.values())
        for row, load_E in zip(tokens_LE, totals, strict=True):
            row[: len(load_E)] = load_E
        return tokens_LE

    def add_step(self) -> None:
        """Adds the tokens that the layers have counted in this step to the average."""
        self.latest_LE = self.counts()
        average = self._load_average()
        average.add(self.latest_LE)
        self.average.copy_(torch.from_numpy(average.state))

    def forget_step(self) -> None:
        """Forgets the tokens that the layers have counted since the last step."""
        for layer in self._layers.values():
            layer.count.reset()
        self.latest_LE = np.zeros_like(self.latest_LE)

    def _load_average(self) -> LoadAverage:
        state = self.average.numpy()
        return LoadAverage(len(self._layers), self._most_experts, half_life=LOAD_HALF_LIFE, state=state)
