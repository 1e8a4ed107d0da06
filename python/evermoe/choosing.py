"""Which units partial presets copy at a step: the same choice on all members, from the ledger that they share."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from evermoe import planning
from evermoe.config import SessionConfig
from evermoe.ledger import Ledger
from evermoe.units import TrainingState, expert_unit

PART = 8
"""Where no budget is given, one of so many bytes of all experts' state is copied in a step."""


class Chooser:
    """MoEtion's and PEC's choices of experts."""

    def __init__(self, state: TrainingState, config: SessionConfig, ledger: Ledger) -> None:
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        experts = [unit.nbytes for unit in state.units if unit.layer is not None]
        self._expert_bytes, self._all_bytes = max(experts, default=1), sum(experts)
        self._config, self._ledger = config, ledger

    def for_peers(self, kept: Collection[str], counts_LE: np.ndarray) -> set[str]:
        """MoEtion: of the units that peers are to keep, those with the most tokens at risk, this step's included.

        They are as many as have room in the budget of bytes to peers; a unit that its replica follows takes less of it.
        """
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        at_risk = self._only(kept, ledger.at_risk + counts_LE)
        return self._by_budget(at_risk, self._config.remote_bytes_per_step)

    def for_own_memory(self) -> set[str]:
        """MoEtion: the experts with the most tokens at risk if their node lives and all processes die."""
        ledger = self._ledger.local
        return set() if ledger is None else self._by_budget(ledger.at_risk, self._config.local_bytes_per_step)

    def to_save(self) -> set[str]:
        """PEC, load-aware: K experts of each layer on average, K as Dynamic-K has it now."""
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        return self._names(
            planning.select_experts(
                "load-aware",
                ledger.at_risk,
                ledger.checkpoint,
                waiting=ledger.waiting,
                experts_per_layer=ledger.experts_per_layer,
            )
        )

    def _by_budget(self, at_risk: np.ndarray, budget: int | None) -> set[str]:
        budget = max(self._expert_bytes, self._all_bytes // PART) if budget is None else budget
        chosen = planning.select_experts("budget", at_risk, budget_bytes=budget, expert_bytes=self._expert_bytes)
        return self._names(chosen)

    def _names(self, chosen: list[list[int]]) -> set[str]:
        return {expert_unit(path, e) for path, experts in zip(self._layers, chosen, strict=True) for e in experts}

    def _only(self, kept: Collection[str], at_risk: np.ndarray) -> np.ndarray:
        for row, (path, number) in zip(at_risk, self._layers.items(), strict=True):
            for expert in range(number):
                if expert_unit(path, expert) not in kept:
                    row[expert] = 0
        return at_risk
