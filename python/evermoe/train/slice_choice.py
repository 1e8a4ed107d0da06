"""How many slices a sparse version of a pipeline has: as is said, or as many as the bubbles of a step need."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.snapshot.slices import UnitBytes, slices_needed, slices_of
from evermoe.snapshot.store import SnapshotStore
from evermoe.train.stage_windows import StageWindowPlanner
from evermoe.train.stages import SlicesTold, StageRank, loop_unit, stage_primaries

logger = logging.getLogger(__name__)


def units_to_slice(seats: Sequence[StageRank], rank: int) -> dict[str, UnitBytes]:
    """The units of which a rank makes copies, in the order in which they are cut: the training loop's state first.

    Args:
        seats: by rank; stage by stage.
        rank: of one.
    """
    width = sum(seat.stage == 0 for seat in seats)
    first = rank - rank % width
    seat = seats[first]
    weights = seat.weights or [nbytes for _, nbytes in seat.units]
    sizes = {name: UnitBytes(w, nbytes - w) for (name, nbytes), w in zip(seat.units, weights, strict=True)}
    primaries = stage_primaries(seats, range(first, first + width))
    mine = [name for name, primary in primaries.items() if primary == rank]
    mine.sort(key=lambda name: not name.startswith(loop_unit(seat.stage)))
    return {name: sizes[name] for name in mine}


class SliceChoice:
    """The number, the same on all ranks. A choice is in use from the copies of a recovery on, which it asks for.

    Until these are whole a loss goes back to windows of the number before. If all processes end meanwhile, it is no
    longer known.

    Args:
        given: the number, 1 where versions are not sparse; None: it is chosen.
        store: this node's arenas.
    """

    def __init__(self, given: int | None, store: SnapshotStore) -> None:
        self._is_chosen, self._store = given is None, store
        self.steps = given or 1
        """Slices of a version, and steps of a window; 1 where versions are not sparse."""
        self.may_be_sparse = given != 1
        """Whether versions are sparse, or may become so."""
        self._has_run = False
        self._wanted = self._before = self._changes = 0
        """The number that was chosen last; that of the copies of before, until the new ones are whole; how often."""
        self._plans = 0

    def told(self) -> SlicesTold:
        """What this rank tells the others."""
        if not self._is_chosen:
            return SlicesTold()
        stored = 0 if self._has_run else slices_of(each.unit for each in self._store.stored())
        wanted = self._wanted or (self.steps if self._before else 0)
        return SlicesTold((self._before or self.steps) if self._has_run else 0, stored, wanted, self._changes)

    def agree(self, seats: Sequence[StageRank]) -> None:
        """Takes the number of those ranks that run, else that of the windows in memory; the same on all ranks.

        Where some know already that copies of another number are whole, and the others do not, they are.
        """
        if self._is_chosen:
            told = [seat.slices for seat in seats]
            newest = max(told, key=lambda each: (each.now > 0, each.changes))
            self.steps = newest.now or max(each.stored for each in told) or 1
            self._wanted = max(each.wanted for each in told if each.changes == newest.changes)
            self._before, self._changes, self._has_run = 0, newest.changes, True

    def change(self) -> bool:
        """Takes the number that was chosen last; whether it is another one. `settle` must follow."""
        if not self._wanted:
            return False
        self._before, self.steps, self._wanted = self.steps, self._wanted, 0
        return True

    def settle(self) -> None:
        """The copies that are cut so are whole everywhere: those of before are not needed."""
        if self._before:
            self._before, self._changes = 0, self._changes + 1

    def consider(self, planner: StageWindowPlanner, group: Group, seats: Sequence[StageRank]) -> None:
        """Chooses anew after a whole profile; drops the group where that changes something. Collective.

        Args:
            planner: of windows; knows the bubbles.
            group: all ranks.
            seats: by rank.

        Raises:
            PeerLost: a rank is gone.
        """
        plans, self._plans = self._plans, planner.plans
        if not self._is_chosen or plans == planner.plans or not planner.knows_pace:
            return
        needed = max(gather_json(group, self._needed(planner, seats, group.rank)))
        if self.steps // 2 < needed <= self.steps:  # fewer would fit: another loss of time for little
            return
        self._wanted = needed
        reason = f"versions are cut into {needed} slices from now on, as the bubbles of a step have no room for more"
        if needed == 1:
            reason = "versions are whole from now on, as the bubbles of a step have room for them"
        if group.rank == 0:
            logger.info("%s; all ranks meet for that as after a loss", reason)
        group.drop(reason)

    def _needed(self, planner: StageWindowPlanner, seats: Sequence[StageRank], rank: int) -> int:
        peers = max((len(kept.bundle.holders) - 1 for kept in self._store.own), default=0)
        if not peers:
            return 1
        return slices_needed([*units_to_slice(seats, rank).values()], planner.bubble_bytes // peers)
