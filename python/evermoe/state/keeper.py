"""Keepers: each keeps copies of some units in its own way, and all are called through the same methods.

    plan    replan ─ protect_all ─ wait_for_copies ─ release ─ restart
    step    before_vote ─ VOTE ─ before_update ─ update ─ after_update

If training does not wait for the copies, `wait_for_copies` is called in the step that follows, and `release` after its
vote. `settle` may be called at any time.

`Protection` calls the keepers of all members in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from evermoe.planning.protection import ProtectionPlan
from evermoe.state.stored import NO_COPIES, KeptCopies, StoredUnit


@dataclass(frozen=True)
class Assignment:
    """The latest plan, and the members that it is for."""

    plan: ProtectionPlan
    active: Mapping[str, tuple[int, ...]]
    """Ranks that train each unit."""
    generation: int
    """Generation of the members."""
    member: str
    """Name of this member."""
    copies_late: bool
    """Whether the copies of a step are made during the next one, and complete at its vote."""
    copies: KeptCopies = NO_COPIES
    """Copies of the protected state that members already have."""
    gradient_bucket_bytes: int = 0
    """The option of that name, with its default for the devices that the job trains on."""
    still: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By unit, names of its tensors that no step writes."""
    in_background: bool = False
    """Whether missing copies are made concurrently with training, which then does not wait for memory either."""


class CopyMaker(Protocol):
    """Makes the first copies of a plan."""

    problem: str = ""
    """Why copies are incomplete although no member is lost: this host has too little memory."""

    def protect_all(self, version: int) -> None:
        """Begin to make the missing copies of its units, as of `version`; `wait_for_copies` must follow. Collective."""

    def wait_for_copies(self) -> bool:
        """Wait for the copies that were begun; return whether all are complete. False if a member was `lost`."""

    @property
    def lost(self) -> str | None:
        """Reason why copies that were begun will not be completed: a member is gone."""


class Keeper(CopyMaker, Protocol):
    """Keeps copies of some units. A keeper that has nothing to do at some point inherits a method that does nothing."""

    def replan(self, assignment: Assignment) -> None:
        """Follow a new plan; `protect_all`, `release` and `restart` must follow."""

    def release(self, step: int) -> None:
        """Drop earlier copies: those of the latest plan are complete on all members, after this number of steps."""
        return

    def restart(self, step: int) -> None:
        """Resume training with the latest plan, after this number of steps; its first copies may still be in flight."""
        return

    def before_vote(self, step: int) -> bool:
        """Wait for what must be safe before the vote after which `step` steps are taken; return whether it is."""
        return True

    def before_update(self) -> None:
        """Wait until the optimizer may write the state."""
        return

    def after_update(self, version: int, clip: float | None) -> None:
        """Record that the agreed step was taken, with gradients multiplied by `clip`: the state is now `version`.

        None: its update was skipped, so `version` has the bytes of the previous version.
        """
        return

    def lag(self, step: int) -> dict[str, int]:
        """Return the number of steps, by kind, by which this member's copies are behind training at a step."""
        return {}

    def settle(self) -> bool:
        """Wait until nothing is in flight, and begin nothing more; return whether all in flight was completed."""

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Yield every complete version of every unit that this member keeps, and the kind of the copy."""

    def close(self) -> None:
        """End all threads. Nothing may be in flight."""


class ScheduledCopies(NamedTuple):
    """Snapshots to make after a step."""

    bundles: frozenset[int] | None = frozenset()
    """Numbers of the bundles whose snapshots are scheduled; None for all."""
    remote: Collection[str] | None = None
    """Units that get copies on other nodes; None: nothing is recorded in the ledger."""
    local: Collection[str] | None = None
    """Units that get copies on their own nodes; None: nothing is recorded in the ledger."""
