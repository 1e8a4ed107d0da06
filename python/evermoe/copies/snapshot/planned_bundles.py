"""The bundles of a protection plan, and how old their copies are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from evermoe.config.copies import CopyConfig
from evermoe.copies.snapshot.bundles import Bundle, bundles
from evermoe.planning.protection import ProtectionPlan
from evermoe.state.catalog import UnitCatalog
from evermoe.state.keeper import Assignment


def planned_bundles(assignment: Assignment, options: CopyConfig) -> tuple[list[Bundle], list[Bundle]]:
    """Return the bundles of a plan: those with copies on other nodes, and those that stay on the nodes that train them.

    Args:
        assignment: the plan.
        options: preset and copies; without any, the lists are empty.
    """
    if not options.replication:
        return [], []
    some = [kept for kept in assignment.plan.units if kept.kind == "snapshot"]
    found = bundles([k.unit for k in some], [[k.primary, *k.holders] for k in some], [k.period for k in some])
    own = [(kept.unit, rank) for kept in assignment.plan.units for rank in kept.own]
    local = bundles([unit for unit, _ in own], [[rank] for _, rank in own])
    if options.choices.per_expert_versions:
        local = [part for bundle in local for part in bundle.divided(*([unit] for unit in bundle.units))]
    return found, local


class PlannedBundles:
    """The bundles of the latest plan that have room, by number, and the newest complete versions of them."""

    def __init__(self) -> None:
        self.local: dict[int, tuple[str, ...]] = {}
        """Units of the bundles that only a rank that trains them keeps."""
        self.sent: dict[int, tuple[tuple[str, ...], int]] = {}
        """Units and period of the bundles that other ranks keep, too."""
        self.missing: dict[str, set[int]] = {}
        """Per unit, the ranks that should keep a snapshot of it and have no room; empty if all have."""
        self._complete: dict[int, int] = {}
        """Steps taken in the newest complete version of this member's own bundles."""

    def replan(
        self, found: Sequence[Bundle], local: Sequence[Bundle], kept: Sequence[Bundle], plan: ProtectionPlan
    ) -> None:
        """Follow a new plan.

        Args:
            found: its bundles with copies on other nodes.
            local: its bundles that stay on the nodes that train them.
            kept: all of them, in this order, with the holders that have room.
            plan: the plan.
        """
        left = {number: bundle.units for number, bundle in enumerate(kept) if bundle.holders}
        self.local = {number: units for number, units in left.items() if number >= len(found)}
        self.sent = {n: (units, plan.by_unit[units[0]].period) for n, units in left.items() if n < len(found)}
        self.missing = {}
        for bundle, now in zip([*found, *local], kept, strict=True):
            for unit in bundle.units if len(now.holders) < len(bundle.holders) else ():
                self.missing.setdefault(unit, set()).update({*bundle.holders} - {*now.holders})

    def local_units(self, numbers: Iterable[int]) -> list[str]:
        """Return the units of local bundles, each once: a unit that several nodes train is in several bundles."""
        return list(dict.fromkeys(unit for number in sorted(numbers) for unit in self.local[number]))

    def due_for_peers(self, step: int) -> set[int]:
        """Return the bundles whose period says that they are sent after a step."""
        return {number for number, (_, period) in self.sent.items() if step % period == 0}

    def local_of(self, experts: Collection[str], catalog: UnitCatalog, due: Collection[int]) -> set[int]:
        """Return the local bundles of chosen experts, and the scheduled ones of other units."""
        return {
            number
            for number, (first, *_) in self.local.items()
            if (first in experts if catalog.by_name[first].layer is not None else number in due)
        }

    def begin_plan(self, complete: Mapping[int, int]) -> None:
        """Record the first versions of the plan that are complete: steps taken, by number of a bundle."""
        self._complete = dict(complete)

    def note_complete(self, complete: Mapping[int, int]) -> None:
        """Record newer versions that are complete."""
        self._complete |= complete

    def lag(self, step: int) -> dict[str, int]:
        """Return the lag of the oldest complete `snapshot` on other nodes and of the oldest `local` one."""
        kinds: dict[str, Mapping[int, object]] = {"snapshot": self.sent, "local": self.local}
        found = {kind: [at for number, at in self._complete.items() if number in some] for kind, some in kinds.items()}
        return {kind: step - min(steps) for kind, steps in found.items() if steps}
