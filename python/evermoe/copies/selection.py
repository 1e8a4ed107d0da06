"""Selects the experts to copy next, by the tokens that they received since their latest copies.

The selection is the same on all members, as all count the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from evermoe import _native
from evermoe.copies.loss_ledger import LossLedger
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.selection import select_experts
from evermoe.presets import Moetion, Pec, PresetOptions
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit

_Value = TypeVar("_Value")


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
    """Names the units of the experts that the engine selects, as MoEtion and PEC do."""

    def __init__(self, state: TrainingState, options: PresetOptions, ledger: LossLedger) -> None:
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        self._ledger, self._load = ledger, state.expert_load
        self._is_kept: list[bool] | None = None
        """Whether peers keep each expert, where a budget selects among those; `[layers, experts]`."""
        sizes, budgets = dict(state.catalog.sizes()), options.group(Moetion)
        self._selector = _native.Selector(
            self._rows(sizes, 0),
            options.group(Pec).expert_selection == "sequential",
            budgets.remote_bytes_per_step,
            budgets.local_bytes_per_step,
        )

    def replan(self, active: Mapping[str, Collection[int]], ranks: int, kept: Collection[str] | None = None) -> None:
        """Follow a plan.

        Args:
            active: ranks that train each unit.
            ranks: number of ranks that train.
            kept: units that replicas follow, where a budget selects among them.
        """
        holders = {unit: sorted(of_unit) for unit, of_unit in active.items()}
        is_kept = self._rows(dict.fromkeys(kept or (), True), False)
        self._is_kept = None if kept is None else is_kept
        self._selector.replan(self._rows(holders, []), is_kept, ranks)

    def select_for_peers(self, measured: int | None = None) -> set[str]:
        """Return MoEtion's choice for peers: units with the most tokens at risk after the step that begins.

        The units fit into the budget of bytes to peers; a unit that its replica follows uses less of it.

        Args:
            measured: budget if no option gives one; None before there are measurements.
        """
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        return self._units(self._selector.select_to_follow(ledger.native, self._load.mean_LE, measured))

    def select_for_local_memory(self, measured: int | None = None) -> set[str]:
        """Return MoEtion's choice for local memory: those with the most tokens at risk if processes fail, not nodes.

        `measured`: budget if no option gives one; None before there are measurements.
        """
        ledger = self._ledger.local
        return set() if ledger is None else self._units(self._selector.select_within_budget(ledger.native, measured))

    def select_to_save(self) -> set[str]:
        """Return PEC's choice for the shared store: K experts of each layer, with the current K of Dynamic-K."""
        return self._in_turn(self._ledger.selection)

    def select_to_snapshot(self) -> set[str]:
        """Return PEC's choice for snapshots in the experts' own nodes' memory; it has a larger K."""
        return self._in_turn(self._ledger.local)

    def risk(self) -> Risk | None:
        """Return the risk of experts that have copies on other nodes or in the shared store; None without any."""
        ledger = self._ledger.selection
        if ledger is None:
            return None
        at_risk_LE = ledger.at_risk
        if self._is_kept is not None:
            at_risk_LE = np.where(np.reshape(self._is_kept, at_risk_LE.shape), at_risk_LE, 0)
        return Risk(float(ledger.portions(at_risk_LE).mean()), int(np.where(at_risk_LE > 0, ledger.waiting, 0).max()))

    def _in_turn(self, ledger: TokenLedger | None) -> set[str]:
        return set() if ledger is None else self._units(self._selector.select_in_turn(ledger.native))

    def _units(self, chosen: list[list[int]]) -> set[str]:
        layers = zip(self._layers.items(), chosen, strict=True)
        return {expert_unit(path, e) for (path, number), experts in layers for e in experts if e < number}

    def _rows(self, by_unit: Mapping[str, _Value], empty: _Value) -> list[_Value]:
        """Return the values of all experts, `[layers, experts]`; layers with fewer experts are filled up."""
        most = max(self._layers.values(), default=0)
        return [by_unit.get(expert_unit(path, e), empty) for path in self._layers for e in range(most)]
