"""Target of a recovery: a placement, and the units that each rank needs for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evermoe.checkpoint.object_store import Location
from evermoe.comm.group import Group
from evermoe.config.placement import Placement
from evermoe.options import count
from evermoe.planning.owners import place_owners
from evermoe.planning.placement import FewerReplicas
from evermoe.recovery.survey import ACTIVE, PERSISTED, Inventory, newest_trainer
from evermoe.state.placement import LayerPlacements, keep_in_place, place_layers, vacant_rows, with_vacant
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit

OWNERS = "(owners)"
"""Key of a placement under which are the owners of what is not an expert, [R, U]; no module has such a path."""


class Target(Protocol):
    """Holdings of the members after a recovery; the same on all of them, but for `trains`.

    The defaults are for a job of which each rank always holds the same units.
    """

    @property
    def trains(self) -> bool:
        """Whether this member is to hold anything actively; False on a replica node."""
        return True

    @property
    def checkpoints(self) -> Location | None:
        """Where the checkpoints are that count where no member has a unit in memory."""
        return None

    @property
    def only_verified(self) -> bool:
        """Whether only verified checkpoints count, and a job that starts again ignores what is left in memory."""
        return False

    @property
    def has_late_state(self) -> bool:
        """Whether members wait in their votes for optimizer state that `TrainingState.late` brings."""
        return False

    def nodes(self, size: int) -> list[str]:
        """Return the node of each rank."""

    def known(self, inventories: Sequence[Inventory]) -> tuple[list[list[float]], dict[str, list[list[int]]]]:
        """Return what this member knows in addition to what it brings: `load` and `vacant` of an `Inventory`.

        Args:
            inventories: of all members, by rank.
        """
        return [], {}

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """Compute the new placement for the state of a version; all members get the same.

        Args:
            version: that all members are to have.
            inventories: of all members, by rank.
        """
        return {}

    def needs(self, placement: LayerPlacements, rank: int) -> list[str]:
        """Names of the units that a rank is to hold under a placement."""

    def begin(self, placement: LayerPlacements) -> None:
        """Makes the first values of a deferred model under a placement: a job begins."""
        return

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Takes over a placement, and the bytes of the units that were fetched for it.

        Args:
            placement: the new one.
            fetched: bytes of units; what is taken over is removed.
            leaving: digests of the units that are given up, and retained.
        """

    def lost_message(self, lost: Sequence[str], unfit: str) -> str:
        """Why the job cannot resume when these units survive nowhere, and what to do; see `unfit_copies.explain`."""


class ExpertTarget:
    """Experts spread over the training ranks by their load, all other units on each of these ranks or on their owners.

    Args:
        state: this member's units.
        group: all members, agreed and connected.
        nodes: name of the node of each training rank; ranks of one node fail together. Replica nodes, which only keep
            copies, have the ranks after these.
        options: slots, replicas and policy.
        checkpoints: where they are; None for nowhere.
        spread: as of `place_layers`.
        only_verified: as of a `Target`.
    """

    def __init__(
        self,
        state: TrainingState,
        group: Group,
        nodes: Sequence[str],
        options: Placement,
        checkpoints: Location | None,
        spread: Sequence[str] | None = None,
        *,
        only_verified: bool = False,
    ) -> None:
        self._spread = nodes if spread is None else spread
        self._state, self._group, self._nodes, self._options = state, group, nodes, options
        self.trains = group.rank < len(nodes)
        self.checkpoints, self.only_verified = checkpoints, only_verified

    has_late_state = True

    def nodes(self, size: int) -> list[str]:
        """The node of each rank; replica nodes are named by their ranks."""
        return [*self._nodes, *(f"replica node {rank}" for rank in range(len(self._nodes), size))]

    def known(self, inventories: Sequence[Inventory]) -> tuple[list[list[float]], dict[str, list[list[int]]]]:
        """The load of experts, and rows of the placement that no rank trains now, where as many come as are gone."""
        version = inventories[self._group.rank].standing.version
        now = self._rows(version, self._in_memory(version, inventories, ACTIVE)) if version else {}
        vacant = {path: vacant_rows(self._state.layers[path].matrix_RE, rows) for path, rows in now.items()}
        return self._state.expert_load.mean_LE.tolist(), vacant

    def place(self, version: int, inventories: Sequence[Inventory]) -> LayerPlacements:
        """A placement for the load as the newest member knows it; experts stay where they or copies are if they can."""
        experts = {path: layer.num_experts for path, layer in self._state.layers.items()}
        newest = inventories[newest_trainer(inventories)]
        previous = {
            path: with_vacant(rows, newest.vacant.get(path, []))
            for path, rows in self._rows(version, self._in_memory(version, inventories, ACTIVE)).items()
        }
        boosts = newest.standing.boosts
        with warnings.catch_warnings():
            if self._group.rank > 0:  # one member says it for all
                warnings.simplefilter("ignore", FewerReplicas)
            placement = place_layers(experts, newest.load, previous, self._nodes, self._options, boosts, self._spread)
        rows = self._rows(version, self._in_memory(version, inventories))
        placement = keep_in_place(placement, rows, self._sizes(), self._spread)
        if self._state.owners.units:
            placement[OWNERS] = self._place_owners(version, inventories, placement)
        return placement

    def _place_owners(
        self, version: int, inventories: Sequence[Inventory], placement: LayerPlacements
    ) -> NDArray[np.int64]:
        """[R, U]: 1 where a rank owns a unit; what it trains already, or has a copy of, is its own if that is even."""
        units, by_name = self._state.owners.units, self._state.catalog.by_name
        trained, copied = (
            [[rank for rank, held in enumerate(by_rank) if unit in held] for unit in units]
            for by_rank in (self._in_memory(version, inventories, ACTIVE), self._in_memory(version, inventories))
        )
        loads = np.zeros(len(self._nodes), np.int64)
        for path, sizes in self._sizes().items():
            loads += placement[path].astype(bool) @ np.array(sizes)
        owners = place_owners([by_name[unit].nbytes for unit in units], trained, copied, loads.tolist())
        return np.eye(len(self._nodes), dtype=np.int64)[:, owners]

    def _rows(self, version: int, in_memory: Sequence[Set[str]]) -> LayerPlacements:
        """Per layer, [R, E]: 1 where a training rank has the expert's bytes of a version at which steps were taken."""
        return {
            path: np.array([[version > 0 and unit in units for unit in names] for units in in_memory], np.int64)
            for path, names in self._units().items()
        }

    def _in_memory(self, version: int, inventories: Sequence[Inventory], only: str | None = None) -> list[set[str]]:
        """Per training rank, the units whose bytes of a version it has, trained or as copies; or `only` of one kind."""
        return [
            {
                each.unit
                for each in inventory.holdings
                if each.version == version and each.kind != PERSISTED and only in (None, each.kind)
            }
            for inventory in inventories[: len(self._nodes)]
        ]

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
        """Return what the rank owns or all ranks of its position hold, and its experts; nothing on a replica node."""
        if rank >= len(self._nodes):
            return []
        owned, ranks = set(self._state.owners.units), len(self._nodes)
        dense = [unit for unit in self._state.catalog.dense() if unit not in owned]
        names = self._units() | {OWNERS: self._state.owners.units}
        found = [unit for unit in dense if rank in self._state.dense_holders(unit, ranks)]
        return found + [names[path][i] for path, matrix in placement.items() for i in np.flatnonzero(matrix[rank])]

    def begin(self, placement: LayerPlacements) -> None:
        """Makes the rank's units; `adopt` follows."""
        if self.trains and self._state.deferral is not None:
            self._state.begin(self._own(self._note_owners(placement)), self._group.rank)

    def _note_owners(self, placement: LayerPlacements) -> LayerPlacements:
        """Set the owners in the state; returns the placement of the layers."""
        if OWNERS in placement:
            owners = placement[OWNERS].argmax(0).tolist()
            self._state.owners.place(dict(zip(self._state.owners.units, owners, strict=True)))
        return {path: matrix for path, matrix in placement.items() if path != OWNERS}

    def _own(self, layers: LayerPlacements) -> dict[str, list[int]]:
        return {path: np.flatnonzero(matrix[self._group.rank]).tolist() for path, matrix in layers.items()}

    def adopt(self, placement: LayerPlacements, fetched: dict[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Replace the layers' experts and what this rank owns, and set in the layers where all experts are."""
        layers = self._note_owners(placement)
        if self.trains:
            self._state.adopt(self._own(layers), fetched, self._group.rank, leaving)
        for path, matrix in layers.items():
            self._state.layers[path].matrix_RE = matrix

    def lost_message(self, lost: Sequence[str], unfit: str) -> str:
        """Names the units, and whether there are checkpoints."""
        where = (
            f"no checkpoint in {self.checkpoints} is readable by all members"
            if self.checkpoints
            else "no checkpoint directory was given"
        )
        members = f"{count(self._group.size, 'member')}, and {where}"
        advice = "Too many nodes failed at once for the number of copies; use a higher replication or set checkpoints"
        return no_copy_left(lost, members, unfit, advice)


def no_copy_left(lost: Sequence[str], members: str, unfit: str, advice: str) -> str:
    """Return the message that names lost units.

    Args:
        lost: units of which no copy is left.
        members: the members in whose memory a copy could be.
        unfit: why copies of them are not usable; empty if there are none.
        advice: what to do if there are none.
    """
    shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
    which = "usable copy" if unfit else "copy"
    return f"no {which} is left of {count(len(lost), 'unit')} ({shown}) in the memory of {members}. {unfit or advice}."
