"""Keepers: each keeps copies of some units, in its own way, and all are driven the same way.

    replan ─ protect_all ─ wait ─ release ─ restart ─ [ before_vote ─ VOTE ─ before_update ─ update ─ after_update ]

Where training does not wait for the copies, `wait` is in the step that follows, and `release` after its vote. `settle`
may come at any time.

`Protection` drives them, on all members in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
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
    """Name of this one."""
    copies_late: bool
    """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
    copies: KeptCopies = NO_COPIES
    """Copies that members have already of the state that is protected."""
    gradient_bucket_bytes: int = 0
    """As the option of that name says, for what the job trains on."""
    is_beside: bool = False
    """Whether the copies that are missing are made beside training; nobody waits for memory to be reserved, either."""


class Keeper(Protocol):
    """Keeps copies of some units. One that has nothing to do at some point inherits the method that does nothing."""

    problem: str = ""
    """Why what was waited for is not whole, though no member is gone: this host has too little memory."""

    def replan(self, assignment: Assignment) -> None:
        """Follows a new plan from now on; `protect_all`, `release` and `restart` must follow."""

    def protect_all(self, version: int) -> Collection[str]:
        """Begins to copy all it keeps, as of `version`, to where no copy is yet; `wait` says if all came. Collective.

        Returns:
            The units of which there are new copies at once.
        """

    def wait(self) -> bool:
        """Waits until what was begun is over here; whether it is whole. False if a member was `lost`."""

    @property
    def lost(self) -> str | None:
        """Why what was begun will not be whole: a member is gone."""

    def release(self, step: int) -> None:
        """All copies of the latest plan are complete on all members, after so many steps: earlier ones are dropped."""
        return

    def restart(self, step: int) -> None:
        """Training goes on with the latest plan, after so many steps; its first copies may still be on their way."""
        return

    def before_vote(self, step: int) -> bool:
        """Waits for what must be safe before the vote that makes `step` the number of steps taken; whether it is."""
        return True

    def before_update(self) -> None:
        """The optimizer wants to write the state: waits until it may."""
        return

    def after_update(self, version: int, clip: float | None) -> None:
        """The agreed step was taken, with gradients multiplied by `clip`: the state is that of `version` now.

        None: its update was left out, so that `version` has the bytes of the version before.
        """
        return

    def lag(self, step: int) -> dict[str, int]:
        """By kind, steps by which this member's copies are behind training, of which so many steps are taken."""
        return {}

    def settle(self) -> bool:
        """Waits until nothing is under way, and begins nothing more; whether all that was is whole."""

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Every whole version of every unit that it has here, and the kind of the copy."""

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""


class Due(NamedTuple):
    """What a keeper should copy after a step."""

    bundles: frozenset[int] | None = frozenset()
    """Numbers of the bundles of which snapshots are due; None for all."""
    remote: Collection[str] | None = None
    """Units that get copies on other nodes or in the folder; None: the ledger is told nothing."""
    local: Collection[str] | None = None
    """Units that get copies on their own nodes, likewise."""


class StateKeeper(Keeper, Protocol):
    """Copies states as they are, beside training, one version at a time: what is due is told to the ledger."""

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest capture took."""

    def take_skipped(self) -> list[tuple[str, int]]:
        """Units of which a copy was told to the ledger and never came to be, and its version; each once."""
        return []

    def make_room(self, step: int) -> None:
        """Waits for the version that is under way, if another one is due after so many steps."""

    def due(self, step: int, choose: Callable[[], Collection[str]] | None) -> Due:
        """What is due after so many steps; changes nothing.

        Args:
            step: steps taken.
            choose: gives the experts whose turn it is; None where the preset does not choose among them.
        """

    def start(self, version: int, due: Due) -> None:
        """Begins to copy what is due of the state, which is that of `version`."""
