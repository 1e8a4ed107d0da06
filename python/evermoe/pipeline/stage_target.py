"""Units that each rank of a pipeline must hold after a recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stage_placement import StagePlacement
from evermoe.recovery.survey import Inventory
from evermoe.recovery.target import Target, no_copy_left
from evermoe.state.placement import LayerPlacements
from evermoe.state.version import step_of


class StageTarget(Target):
    """Each rank holds the units of its stage, of experts those that the placement gives it.

    Args:
        placement: of the stages' experts.
        windows: say what a rank fetches, and take it over.
    """

    def __init__(self, placement: StagePlacement, windows: SparseWindows) -> None:
        self._placement, self._windows = placement, windows
        self._version = 0

    def nodes(self, size: int) -> list[str]:
        """The node of each rank."""
        return [stage_rank.node for stage_rank in self._placement.layout]

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """The placement of the version's step: [R, E] of each layer, over the ranks of its stage."""
        self._version = version
        return self._placement.choose(step_of(version))

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """Units of the rank's stage, without the experts that only its peers train."""
        layout = self._placement.layout
        mine = layout[rank]
        peers = [each for each in layout if each.stage == mine.stage]
        elsewhere = {unit for each in peers for unit in each.own} - {*mine.own}
        return self._windows.needed([name for name, _ in mine.units if name not in elsewhere])

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Take over the placement and the fetched units."""
        self._placement.adopt(fetched, leaving)
        self._windows.adopt(self._version, fetched)

    def lost_message(self, lost: Sequence[str], unfit: str) -> str:
        """Error message that names the lost units."""
        advice = "Too many nodes failed at once: use more copies; load a checkpoint of your own to start again"
        return no_copy_left(lost, f"{len(self._placement.layout)} ranks", unfit, advice)
