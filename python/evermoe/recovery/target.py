"""What the members are to hold after a recovery: a placement, and the units that each rank needs for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from evermoe import planning
from evermoe.comm.group import Group
from evermoe.options import count
from evermoe.placement import LayerPlacements, PlacementOptions, keep_in_place, place_layers
from evermoe.recovery.survey import PERSISTED, Inventory
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit


class Target(Protocol):
    """What the members are to hold after a recovery; the same on all of them, but for `trains`."""

    @property
    def trains(self) -> bool:
        """Whether this member is to hold anything actively; False on a replica node."""

    @property
    def checkpoints(self) -> Path | None:
        """Folder of the checkpoints that count where no member has a unit in memory."""

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """The new placement, for the state of a version; computed alike by all members.

        Args:
            version: that all members are to have.
            inventories: of all members, by rank.
        """

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """Names of the units that a rank is to hold under a placement."""

    def begin(self, placement: LayerPlacements) -> None:
        """Makes the first values of a deferred model under a placement: a job begins."""

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Takes over a placement, and the bytes of the units that were fetched for it.

        Args:
            placement: the new one.
            fetched: bytes of units; what is taken over is removed.
            leaving: digests of the units that are given up, and retained.
        """

    def lost_message(self, lost: Sequence[str]) -> str:
        """Why the job cannot resume when these units survive nowhere, and what to do."""


class ExpertTarget:
    """Experts spread over the training ranks by their load, all other units on each of these ranks.

    Args:
        state: this member's units.
        group: all members, agreed and connected.
        nodes: name of the node of each training rank; ranks of one node fail together. Replica nodes, which only keep
            copies, have the ranks after these.
        options: slots, replicas and policy.
        checkpoint_dir: folder of the checkpoints; None for none.
    """

    def __init__(
        self,
        state: TrainingState,
        group: Group,
        nodes: Sequence[str],
        options: PlacementOptions,
        checkpoint_dir: str | Path | None,
    ) -> None:
        self._state, self._group, self._nodes, self._options = state, group, nodes, options
        self.trains = group.rank < len(nodes)
        self.checkpoints = Path(checkpoint_dir) if checkpoint_dir is not None else None

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """A placement for the load as the newest member knows it; experts stay where they or copies are if they can."""
        experts = {path: layer.num_experts for path, layer in self._state.layers.items()}
        previous = {path: np.zeros((len(self._nodes), number), np.int64) for path, number in experts.items()}
        for rank, inventory in enumerate(inventories):
            if inventory.standing.version == version and version > 0 and inventory.trains:
                for path, held in inventory.experts.items():
                    previous[path][rank, held] = 1
        trained = [inventory for inventory in inventories if inventory.trains]
        newest = max(trained, key=lambda inventory: inventory.standing.version)
        boosts = newest.standing.boosts
        with warnings.catch_warnings():
            if self._group.rank > 0:  # one member says it for all
                warnings.simplefilter("ignore", planning.FewerReplicas)
            placement = place_layers(experts, newest.load, previous, self._nodes, self._options, boosts)
        return keep_in_place(placement, self._in_memory(version, inventories), self._sizes(), self._nodes)

    def _in_memory(self, version: int, inventories: Sequence[Inventory]) -> dict[str, np.ndarray]:
        """[R, E] of each layer: whether a training rank has an expert's bytes of this version, trained or as a copy."""
        held = [
            {each.unit for each in inventory.holdings if 0 < version == each.version and each.kind != PERSISTED}
            for inventory in inventories[: len(self._nodes)]
        ]
        return {
            path: np.array([[unit in units for unit in names] for units in held], np.int64)
            for path, names in self._units().items()
        }

    def _sizes(self) -> dict[str, list[int]]:
        """Bytes of each expert of each layer."""
        by_name = self._state.catalog.by_name
        return {path: [by_name[unit].nbytes for unit in names] for path, names in self._units().items()}

    def _units(self) -> dict[str, list[str]]:
        """Names of the units of each layer's experts."""
        return {
            path: [expert_unit(path, expert) for expert in range(layer.num_experts)]
            for path, layer in self._state.layers.items()
        }

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """All units that are not experts, and the rank's experts; nothing on a replica node."""
        if rank >= len(self._nodes):
            return []
        experts = [
            expert_unit(path, int(e)) for path, matrix in placement.items() for e in np.flatnonzero(matrix[rank])
        ]
        return self._state.catalog.dense() + experts

    def begin(self, placement: LayerPlacements) -> None:
        """Makes the rank's units; `adopt` follows."""
        if self.trains and self._state.deferral is not None:
            self._state.begin(self._own(placement))

    def _own(self, placement: LayerPlacements) -> dict[str, list[int]]:
        return {path: np.flatnonzero(matrix[self._group.rank]).tolist() for path, matrix in placement.items()}

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Replaces the layers' experts, and tells the layers where all experts are."""
        if self.trains:
            self._state.adopt(self._own(placement), fetched, leaving)
        for path, matrix in placement.items():
            self._state.layers[path].matrix_RE = matrix

    def lost_message(self, lost: Sequence[str]) -> str:
        """Names the units, and whether there are checkpoints."""
        shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        where = (
            f"no checkpoint in {self.checkpoints} is readable by all members"
            if self.checkpoints
            else "no checkpoint directory was given"
        )
        return (
            f"no copy is left of {count(len(lost), 'unit')} ({shown}) in the memory of "
            f"{count(self._group.size, 'member')}, and {where}. "
            "Too many nodes failed at once for the number of copies; use more copies or set checkpoint_dir."
        )
