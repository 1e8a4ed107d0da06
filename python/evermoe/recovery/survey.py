"""What one member brings to a recovery, and what of all that counts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from evermoe import planning
from evermoe._native import digest
from evermoe.persist.checkpoint_folder import find, find_saved
from evermoe.planning.recovery import Lagging
from evermoe.state.stored import StoredUnit
from evermoe.state.training_state import TrainingState

ACTIVE, SNAPSHOT, PERSISTED = "active", "snapshot", "persisted"


class Holding(NamedTuple):
    """A version of one unit that a member has."""

    unit: str
    version: int
    digest: int
    kind: str
    """Where it is; see `planning.recovery_plan`."""


@dataclass(frozen=True)
class Standing:
    """How a member comes to a recovery."""

    version: int
    """Version of the state that it holds actively."""
    established: bool
    """Whether it has state of the running job."""
    saw_running: bool = False
    """Whether it has seen the job run: such a job is never started again from step 0."""
    patient: bool = False
    """Whether it would still wait for others when units are missing (`UnitsMissing`), and not give them up."""
    boosts: dict[str, list[float]] = field(default_factory=dict)
    """Factors of the load of experts that have lost tokens, by layer."""
    lagging: Lagging = "never"
    """Whether experts may be taken at older versions than the rest; `always`: where that spares the rest going back."""
    committed: int = 0
    """Steps that it has reported as committed."""


@dataclass
class Inventory:
    """What one member brings to a recovery."""

    standing: Standing
    holdings: list[Holding]
    experts: dict[str, list[int]]
    """Experts that it trains, by layer."""
    load: list[list[float]]
    """Average tokens of each expert in a step, layer by layer."""
    checkpoints: list[int]
    """Versions of the complete checkpoints that it can read."""
    trains: bool
    """False for a replica node."""

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Inventory:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        fields["standing"] = Standing(**fields["standing"])
        fields["holdings"] = [Holding(*holding) for holding in fields["holdings"]]
        return Inventory(**fields)


class Survey:
    """What this member has of all units, and where their bytes are.

    Args:
        state: this member's units.
        stored: versions that it has beside them, and their kinds.
        standing: of this member.
        trains: False on a replica node, which holds nothing actively.
        checkpoints: folder of the checkpoints, if there is one.
    """

    def __init__(
        self,
        state: TrainingState,
        stored: Iterable[tuple[StoredUnit, str]],
        standing: Standing,
        *,
        trains: bool,
        checkpoints: Path | None,
    ) -> None:
        self._state = state
        self._stored: dict[tuple[str, int, str], StoredUnit] = {}
        active = state.held() if trains else []
        holdings = [
            Holding(unit, standing.version, value, ACTIVE)
            for unit, value in zip(active, state.digests(active), strict=True)
        ]
        retained = ((each, SNAPSHOT) for each in state.retained.stored(standing.version))
        # Where experts always may lag, a checkpoint may have the newest version of some.
        folder = checkpoints if standing.lagging == "always" else None
        saved = ((each, PERSISTED) for each in (find_saved(folder, state.catalog.layout) if folder else ()))
        for found, kind in (*stored, *retained, *saved):
            unit = state.catalog.by_name.get(found.unit)
            if unit is not None and (kind != SNAPSHOT or unit.nbytes == len(found.data)):
                self._stored[found.unit, found.digest, kind] = found
                holdings.append(Holding(found.unit, found.version, found.digest, kind))
        self.inventory = Inventory(
            standing,
            holdings,
            {path: layer.experts for path, layer in state.layers.items()},
            state.expert_load.mean_LE.tolist(),
            sorted(find(checkpoints, state.catalog.layout)) if checkpoints else [],
            trains,
        )

    def read(self, holding: Holding, out: Tensor) -> None:
        """Copies the bytes to `out`; bytes that cannot be read are left as they are: their digest will tell."""
        if holding.kind == ACTIVE:
            self._state.read(holding.unit, out)
            return
        data = self._stored[holding.unit, holding.digest, holding.kind].data
        out[: len(data)] = data

    def digests(self) -> list[tuple[str, int]]:
        """Digests of all bytes in memory that are of this member's version, computed now; by unit."""
        version = self.inventory.standing.version
        found = []
        for unit, held, value, kind in self.inventory.holdings:
            if held == version and kind != PERSISTED:
                bytes_now = None if kind == ACTIVE else self._stored[unit, value, kind].data.numpy()
                found.append((unit, value if bytes_now is None else digest(bytes_now)))
        return found


def usable(inventories: Sequence[Inventory], refused: Collection[tuple[int, Holding]]) -> list[list[Holding]]:
    """The holdings of each rank that count (see `planning.usable_holdings`), without those that were `refused`."""
    standings = [(inventory.standing.established, inventory.standing.saw_running) for inventory in inventories]
    found = planning.usable_holdings(standings, [inventory.holdings for inventory in inventories])
    return [
        [holding for holding in map(Holding._make, held) if (rank, holding) not in refused]
        for rank, held in enumerate(found)
    ]


def newest_checkpoint(inventories: Sequence[Inventory]) -> int | None:
    """The newest that every training member can see: the folder must be on a file system that all share."""
    common = set.intersection(*(set(each.checkpoints) for each in inventories if each.trains))
    return max(common, default=None)
