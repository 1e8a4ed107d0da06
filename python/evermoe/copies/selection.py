"""Selects the experts to copy next, by the tokens that they received since their latest copies.

The selection is the same on all members, as all count the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from evermoe.copies.loss_ledger import LossLedger
from evermoe.planning import budgets
from evermoe.planning.holders import primaries
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.selection import select_experts, select_per_rank
from evermoe.presets import Moetion, Pec, PresetOptions
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit


def most_at_risk(at_risk: Mapping[str, ArrayLike], budget_bytes: int, expert_bytes: int) -> set[str]:
    """Return the units of the experts with the most tokens at risk that fit into a budget (MoEtion, Algorithm 1).

        >>> sorted(most_at_risk({"a": [7, 2, 3], "b": [1, 5]}, budget_bytes=350, expert_bytes=100))  # 12 / 18, 6 / 18
        ['a.0', 'a.2', 'b.1']

    Args:
        at_risk: tokens of each expert since its latest copy, by path of its layer.
        budget_bytes: bytes that may be copied now.
        expert_bytes: bytes of an expert's copy.
    """
    tokens_LE = np.zeros((len(at_risk), max(map(np.size, at_risk.values()), default=0)), np.int64)
    for row, tokens_E in zip(tokens_LE, at_risk.values(), strict=True):
        row[: np.size(tokens_E)] = tokens_E
    chosen = select_experts("budget", tokens_LE, budget_bytes=budget_bytes, expert_bytes=expert_bytes)
    return {expert_unit(path, e) for path, experts in zip(at_risk, chosen, strict=True) for e in experts}


class Risk(NamedTuple):
    """Cost of a failure that returns experts to their latest copies."""

    plt: float
    """Portion of the run's tokens, averaged over layers."""
    waiting: int
    """Number of copies that have skipped the longest-waiting expert with tokens at risk."""


class ExpertSelector:
    """Selects experts as MoEtion and PEC do."""

    def __init__(self, state: TrainingState, options: PresetOptions, ledger: LossLedger) -> None:
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        experts = [unit.nbytes for unit in state.catalog.units if unit.layer is not None]
        self._expert_bytes, self._all_bytes = max(experts, default=1), sum(experts)
        self._turns, self._budgets = options.group(Pec), options.group(Moetion)
        self._ledger, self._load = ledger, state.expert_load
        self._ranks_LE = np.full(ledger.total_LE.shape, -1)
        self.copied: Collection[str] | None = None
        """Experts that have copies; None for all. The others train on enough nodes."""

    def replan(self, active: Mapping[str, Collection[int]], ranks: int) -> None:
        """Update the ranks that train each expert from `active`, by unit."""
        names = [expert_unit(path, expert) for path, number in self._layers.items() for expert in range(number)]
        found = iter(primaries([list(active[name]) for name in names], [1] * len(names), ranks))
        for row, number in zip(self._ranks_LE, self._layers.values(), strict=True):
            row[:number] = [next(found) for _ in range(number)]

    def select_for_peers(self, kept: Collection[str], measured: int | None = None) -> set[str]:
        """Return MoEtion's choice for peers: units with the most tokens at risk after the step that begins.

        The tokens of that step are not known yet. Each expert counts with its average tokens per step, at least one.
        The units fit into the budget of bytes to peers; a unit that its replica follows uses less of it.

        Args:
            kept: units to choose from, which peers keep.
            measured: budget if no option gives one; None before there are measurements.
        """
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        expected_LE = np.maximum(np.rint(self._load.mean_LE), 1).astype(np.int64)
        at_risk = self._only(kept, ledger.at_risk + expected_LE)
        given = self._budgets.remote_bytes_per_step
        return self._by_budget(at_risk, measured if given is None else given)

    def select_for_local_memory(self, measured: int | None = None) -> set[str]:
        """Return MoEtion's choice for local memory: those with the most tokens at risk if processes fail, not nodes.

        `measured`: budget if no option gives one; None before there are measurements.
        """
        ledger, given = self._ledger.local, self._budgets.local_bytes_per_step
        return set() if ledger is None else self._by_budget(ledger.at_risk, measured if given is None else given)

    def risk(self) -> Risk | None:
        """Return the risk of experts that have copies on other nodes or in the shared store; None without any."""
        ledger = self._ledger.selection
        if ledger is None:
            return None
        at_risk_LE = ledger.at_risk if self.copied is None else self._only(self.copied, ledger.at_risk)
        portions_L = at_risk_LE.sum(1) / np.maximum(ledger.seen.sum(1), 1)
        return Risk(float(portions_L.mean()), int(np.where(at_risk_LE > 0, ledger.waiting, 0).max()))

    def select_to_save(self) -> set[str]:
        """Return PEC's choice for the shared store: K experts of each layer, with the current K of Dynamic-K."""
        return self._in_turn(self._ledger.selection)

    def select_to_snapshot(self) -> set[str]:
        """Return PEC's choice for snapshots in the experts' own nodes' memory; it has a larger K."""
        return self._in_turn(self._ledger.local)

    def _in_turn(self, ledger: TokenLedger | None) -> set[str]:
        if ledger is None:
            return set()
        each = ledger.experts_per_layer
        if self._turns.expert_selection == "sequential":
            chosen = select_experts("sequential", ledger.at_risk, ledger.checkpoint, experts_per_layer=each)
            numbers = self._layers.values()
            return self._names([[e for e in row if e < number] for row, number in zip(chosen, numbers, strict=True)])
        return self._names(
            select_per_rank(ledger.at_risk, ledger.checkpoint, ledger.waiting, self._ranks_LE, experts_per_layer=each)
        )

    def _by_budget(self, at_risk: np.ndarray, budget: int | None) -> set[str]:
        budget = budgets.remote_bytes_per_step(self._expert_bytes, self._all_bytes) if budget is None else budget
        rows = {path: row[:number] for row, (path, number) in zip(at_risk, self._layers.items(), strict=True)}
        return most_at_risk(rows, budget, self._expert_bytes)

    def _names(self, chosen: list[list[int]]) -> set[str]:
        return {expert_unit(path, e) for path, experts in zip(self._layers, chosen, strict=True) for e in experts}

    def _only(self, kept: Collection[str], at_risk: np.ndarray) -> np.ndarray:
        for row, (path, number) in zip(at_risk, self._layers.items(), strict=True):
            for expert in range(number):
                if expert_unit(path, expert) not in kept:
                    row[expert] = 0
        return at_risk
