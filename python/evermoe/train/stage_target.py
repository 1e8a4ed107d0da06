"""What the ranks of a pipeline are to hold after a recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from evermoe.placement import LayerPlacements
from evermoe.recovery.survey import Inventory
from evermoe.train.stages import StageRank


class Adopter(Protocol):
    """What a recovery's units are told to, and who says which of them are needed."""

    def needed(self, units: list[str]) -> list[str]:
        """What a rank fetches that is to hold units."""

    def adopt(self, version: int, fetched: dict[str, Tensor]) -> None:
        """Takes over what was fetched, of the version that all are to have; `fetched` is empty then."""


class StageTarget:
    """Each rank holds the units of its stage, or its part of the experts; nothing ever moves.

    Args:
        seats: by rank.
        adopter: takes the units over.
    """

    trains = True
    checkpoints = None
    has_late_state = False

    def __init__(self, seats: Sequence[StageRank], adopter: Adopter) -> None:
        self._seats, self._adopter = seats, adopter
        self._version = 0

    def nodes(self, size: int) -> list[str]:
        """The node of each rank."""
        return [seat.node for seat in self._seats]

    def known(self, inventories: Sequence[Inventory]) -> tuple[list[list[float]], dict[str, list[list[int]]]]:
        """Empty: a rank has its place by its number."""
        return [], {}

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """Empty: no layer is spread over ranks."""
        self._version = version
        return {}

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """The units of the rank's stage, without the experts of its peers."""
        mine = self._seats[rank]
        elsewhere = {unit for seat in self._seats if seat.stage == mine.stage for unit in seat.own} - {*mine.own}
        return self._adopter.needed([name for name, _ in mine.units if name not in elsewhere])

    def begin(self, placement: LayerPlacements) -> None:
        """Does nothing: no stage is deferred."""

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Takes over what was fetched."""
        self._adopter.adopt(self._version, fetched)

    def lost_message(self, lost: Sequence[str], unfit: str) -> str:
        """Names the units."""
        return (
            f"no {'usable ' if unfit else ''}copy is left of {len(lost)} units ({', '.join(lost[:8])}) in memory of "
            f"{len(self._seats)} ranks. "
            + (unfit or "Too many nodes failed at once: use more copies; load a checkpoint of your own to start again")
            + "."
        )
