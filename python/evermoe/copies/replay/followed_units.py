"""The units that a member sends to replicas, and how far these have followed."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class FollowedUnits:
    """The units that a member sends by a plan, and the step that their replicas have reached.

    Args:
        units: the units.
        behind: those whose replicas receive the state from before each step, since the step cannot be repeated.
    """

    def __init__(self, units: Iterable[str] = (), behind: Collection[str] = ()) -> None:
        self._reached, self._behind = dict.fromkeys(units, 0), behind
        self._under_way: set[str] = set()
        """Units whose gradients are sent in the current step."""

    def complete(self, step: int) -> None:
        """Record that all replicas have the state after this number of steps."""
        self._reached = dict.fromkeys(self._reached, step)

    def begin_exchange(self, selected: Collection[str] | None) -> None:
        """Record that the gradients of these units are sent now; None for all."""
        self._under_way = {unit for unit in self._reached if selected is None or unit in selected}

    def after_update(self, step: int) -> None:
        """Record that the step was taken whose gradients were sent: it makes `step` the number of steps taken."""
        self._reached |= {unit: step - (unit in self._behind) for unit in self._under_way}

    def lag(self, step: int) -> dict[str, int]:
        """Return the lag of the oldest `replayed` copy."""
        return {"replayed": step - min(self._reached.values())} if self._reached else {}
