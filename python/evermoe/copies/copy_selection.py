"""The units whose copies are brought up to date in a step, and after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from evermoe.config.copies import CopyConfig
from evermoe.copies.loss_ledger import LossLedger
from evermoe.copies.selection import ExpertSelector
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.planning.protection import ProtectionPlan
from evermoe.state.training_state import TrainingState


class CopySelection:
    """Selects the units that replicas follow in a step, and the experts of which snapshots are made after it.

    Args:
        state: this member's units.
        options: the preset, with its options.
        ledger: counts the tokens by which a budget selects.
        planner: measures the budgets.
    """

    def __init__(self, state: TrainingState, options: CopyConfig, ledger: LossLedger, planner: WindowPlanner) -> None:
        self._state, self._choices, self._ledger, self._planner = state, options.choices, ledger, planner
        self.selector = ExpertSelector(state, options.preset, ledger)
        self.now: set[str] | None = None
        """Units whose replicas follow the current step; None for all."""
        self._followed: set[str] = set()
        """Units that replicas follow."""
        self._behind: set[str] = set()
        """Units whose replicas are a step behind, as they only receive the state."""

    def replan(
        self, plan: ProtectionPlan, active: Mapping[str, Collection[int]], ranks: int, replayable: Collection[str]
    ) -> None:
        """Follow a plan.

        Args:
            plan: the plan.
            active: ranks that train each unit.
            ranks: number of ranks that train.
            replayable: units whose steps can be repeated.
        """
        self._followed = {each.unit for each in plan.units if each.kind == "replayed"}
        self.selector.replan(active, ranks, self._followed if self._choices.selects_by_budget else None)
        self._behind = self._followed.difference(replayable)

    def begin_step(self) -> None:
        """Select the units whose replicas follow the step that begins."""
        if self._choices.selects_by_budget:
            experts = self._followed.intersection(self._state.catalog.experts())
            chosen = self.selector.select_for_peers(self._planner.budgets.remote)
            self.now = self._followed - experts | chosen

    def record_step(self, version: int) -> None:
        """Record the copies that follow the step that was taken: `version` is the state now."""
        if self.now:  # replicas of units that cannot be repeated have the state before the step
            self._ledger.record_copies(self.now, version, self._behind)

    @property
    def for_snapshots(self) -> Callable[[], set[str]] | None:
        """The choice of experts for snapshots; None if the preset makes none."""
        in_memory = {
            "load-aware": self.selector.select_to_snapshot,
            "budget": lambda: self.selector.select_for_local_memory(self._planner.budgets.local),
        }
        return in_memory.get(self._choices.selection)
