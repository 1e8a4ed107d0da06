"""The number of slices of a pipeline's sparse versions: given, or as many as the bubbles of a step need."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.copies.snapshot.slices import UnitBytes, slices_needed, slices_of
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.pipeline.stages import SliceReport, StageRank, stage_primaries

logger = logging.getLogger(__name__)


def units_to_slice(layout: Sequence[StageRank], rank: int) -> dict[str, UnitBytes]:
    """Units that a rank copies, in the order in which they are divided into slices: the training loop's state first.

    Args:
        layout: by rank; stage by stage.
        rank: number of the rank.
    """
    width = sum(stage_rank.stage == 0 for stage_rank in layout)
    first = rank - rank % width
    stage_rank = layout[first]
    weights = stage_rank.weights or [nbytes for _, nbytes in stage_rank.units]
    sizes = {name: UnitBytes(w, nbytes - w) for (name, nbytes), w in zip(stage_rank.units, weights, strict=True)}
    primaries = stage_primaries(layout, range(first, first + width))
    return {name: sizes[name] for name, primary in primaries.items() if primary == rank}


class SliceChoice:
    """Chooses the number of slices, the same on all ranks. A change triggers a recovery, and applies to its copies.

    Until these copies are complete, a loss goes back to windows of the previous number. If all processes end
    meanwhile, that number is lost.

    Args:
        given: the number; 1 for versions that are not sparse; None to choose it.
        store: this node's arenas.
    """

    def __init__(self, given: int | None, store: SnapshotStore) -> None:
        self._is_chosen, self._store = given is None, store
        self.steps = given or 1
        """Slices of a version and steps of a window; 1 if versions are not sparse."""
        self.may_be_sparse = given != 1
        """Whether versions are sparse or may become sparse."""
        self._has_run = False
        self._wanted = self._before = self._changes = 0
        """The latest choice; the previous number, until its copies are replaced; the number of changes."""
        self._plans = 0

    def report(self) -> SliceReport:
        """Report what this rank knows to the others."""
        if not self._is_chosen:
            return SliceReport()
        stored = 0 if self._has_run else slices_of(each.unit for each in self._store.stored())
        wanted = self._wanted or (self.steps if self._before else 0)
        return SliceReport((self._before or self.steps) if self._has_run else 0, stored, wanted, self._changes)

    def agree(self, layout: Sequence[StageRank]) -> None:
        """Take the number of the running ranks, else that of the windows in memory; the same on all ranks.

        If some ranks know that copies with another number are complete, and others do not know it, they are complete.
        """
        if self._is_chosen:
            reports = [stage_rank.slices for stage_rank in layout]
            newest = max(reports, key=lambda each: (each.now > 0, each.changes))
            self.steps = newest.now or max(each.stored for each in reports) or 1
            self._wanted = max(each.wanted for each in reports if each.changes == newest.changes)
            self._before, self._changes, self._has_run = 0, newest.changes, True

    def change(self) -> bool:
        """Apply the latest choice, and return whether it is another number. `settle` must follow."""
        if not self._wanted:
            return False
        self._before, self.steps, self._wanted = self.steps, self._wanted, 0
        return True

    def settle(self) -> None:
        """Discard the previous number, since the copies with the new one are complete on all ranks."""
        if self._before:
            self._before, self._changes = 0, self._changes + 1

    def consider(self, planner: WindowPlanner, group: Group, layout: Sequence[StageRank]) -> None:
        """Choose again after a complete profile, and drop the group if the number changes. Collective.

        Args:
            planner: of windows, which knows the bubbles.
            group: all ranks.
            layout: by rank.

        Raises:
            PeerLost: a rank is lost.
        """
        plans, self._plans = self._plans, planner.plans
        if not self._is_chosen or plans == planner.plans or not planner.knows_pace:
            return
        needed = max(gather_json(group, self._needed(planner, layout, group.rank)))
        if self.steps // 2 < needed <= self.steps:  # a smaller number would cost a recovery and gain little
            return
        self._wanted = needed
        reason = f"versions have {needed} slices from now on, since the bubbles of a step have no room for more"
        if needed == 1:
            reason = "versions are no longer sparse, since the bubbles of a step have room for a complete one"
        if group.rank == 0:
            logger.info("%s; all ranks meet for this as after a loss", reason)
        group.drop(reason)

    def _needed(self, planner: WindowPlanner, layout: Sequence[StageRank], rank: int) -> int:
        peers = max((len(kept.bundle.holders) - 1 for kept in self._store.own), default=0)
        if not peers:
            return 1
        return slices_needed([*units_to_slice(layout, rank).values()], planner.bytes_per_step // peers)
