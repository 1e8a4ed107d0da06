"""Units that each rank of a pipeline must hold after a recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stages import StageRank
from evermoe.recovery.survey import Inventory
from evermoe.recovery.target import Target, no_copy_left
from evermoe.state.placement import LayerPlacements


class StageTarget(Target):
    """Each rank holds the units of its stage, or its part of the experts; no unit ever moves.

    Args:
        layout: by rank.
        windows: say what a rank fetches, and take it over.
    """

    def __init__(self, layout: Sequence[StageRank], windows: SparseWindows) -> None:
        self._layout, self._windows = layout, windows
        self._version = 0

    def nodes(self, size: int) -> list[str]:
        """The node of each rank."""
        return [stage_rank.node for stage_rank in self._layout]

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """Nothing: no layer is spread over the ranks of all stages."""
        self._version = version
        return {}

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """Units of the rank's stage, without the experts of its peers."""
        mine = self._layout[rank]
        peers = [each for each in self._layout if each.stage == mine.stage]
        elsewhere = {unit for each in peers for unit in each.own} - {*mine.own}
        return self._windows.needed([name for name, _ in mine.units if name not in elsewhere])

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Take over the fetched units."""
        self._windows.adopt(self._version, fetched)

    def lost_message(self, lost: Sequence[str], unfit: str) -> str:
        """Error message that names the lost units."""
        advice = "Too many nodes failed at once: use more copies; load a checkpoint of your own to start again"
        return no_copy_left(lost, f"{len(self._layout)} ranks", unfit, advice)
