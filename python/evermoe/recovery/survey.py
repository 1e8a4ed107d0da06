"""Inventory of one member for a recovery, and the part of all inventories that counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np
from torch import Tensor

from evermoe._native import digest
from evermoe.checkpoint.manifest import CHECKPOINT, SAVE, Saved
from evermoe.checkpoint.object_store import Location
from evermoe.comm.group import Group
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.planning.recovery import Lagging, usable_holdings
from evermoe.recovery.early_survey import GROUP_BYTES
from evermoe.recovery.on_disk import find_usable
from evermoe.state.stored import AwaitedUnit, RetainedUnit, StoredUnit, lent, read_stored
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import SESSION, Unit, digests_of
from evermoe.state.version import step_of

ACTIVE, SNAPSHOT, PERSISTED = "active", "snapshot", "persisted"
T = TypeVar("T")
CHECKSUM_BYTES = 8
"""Bytes of the checksum before an inventory's JSON."""


class Holding(NamedTuple):
    """A version of one unit that a member has."""

    unit: str
    version: int
    digest: int
    kind: str
    """Where it is; see `planning.recovery_plan`."""


class Awaited(NamedTuple):
    """A version of one unit that a member can bring a copy to, by steps that it has not repeated yet."""

    unit: str
    version: int
    kind: str
    """As of a `Holding`."""


@dataclass(frozen=True)
class Standing:
    """Circumstances in which a member comes to a recovery."""

    version: int
    """Version of the state that it holds actively."""
    established: bool
    """Whether it has state of the running job."""
    saw_progress: bool = False
    """Whether it has seen a member that had taken steps of the job: such a job is never started again from step 0."""
    patient: bool = False
    """Whether it would still wait for others when units are missing (`UnitsMissing`), and not give them up."""
    awaits_living: bool = False
    """Whether it knows of holders that live, and would still wait for these."""
    boosts: dict[str, list[float]] = field(default_factory=dict)
    """Factors of the load of experts that have lost tokens, by layer."""
    lagging: Lagging = "never"
    """Whether experts may be taken at older versions than the rest; `always`: where that spares the rest going back."""
    committed: int = 0
    """Steps that it has reported as committed."""


@dataclass
class Inventory:
    """Inventory that one member brings to a recovery."""

    standing: Standing
    holdings: list[Holding]
    checkpoints: list[int]
    """Versions of the complete checkpoints that it can read."""
    trains: bool
    """False for a replica node."""
    can_begin: bool = False
    """Whether its model is deferred and has taken no step: then it counts as holding all units, as it can make them."""
    awaited: list[Awaited] = field(default_factory=list)
    """Units that it can hold, too, and need not while a member trains the same."""
    load: list[list[float]] = field(default_factory=list)
    """Average tokens of each expert in a step, layer by layer; empty but for the newest member that trains."""
    vacant: dict[str, list[list[int]]] = field(default_factory=dict)
    """By layer, the experts of each rank that is gone and whose place another one takes; told by the same member."""

    def expect(self, digests: Mapping[tuple[str, int], int]) -> int:
        """Counts as held what is awaited and has one of these digests, by unit and version; the number of it."""
        held = [
            Holding(unit, version, digests[unit, version], kind)
            for unit, version, kind in self.awaited
            if (unit, version) in digests
        ]
        self.holdings += held
        self.awaited = [each for each in self.awaited if (each.unit, each.version) not in digests]
        return len(held)

    def to_bytes(self) -> bytes:
        """JSON, after its checksum: of all but the load and what is vacant, which are needed of one member."""
        fields = asdict(self)
        del fields["load"], fields["vacant"]
        text = json.dumps(fields, allow_nan=False).encode()
        return _checksum(text) + text

    @staticmethod
    def from_bytes(data: bytes) -> Inventory:
        """The inverse of `to_bytes`.

        Raises:
            CorruptCopy: it is not what `to_bytes` made.
        """
        text = data[CHECKSUM_BYTES:]
        try:
            if data[:CHECKSUM_BYTES] != _checksum(text):
                raise ValueError("it does not match its checksum")
            fields = json.loads(text, parse_constant=_refuse, object_pairs_hook=_named_once)
            if problem := _problem(fields, _INVENTORY):
                raise ValueError(problem)
        except (ValueError, RecursionError) as error:
            raise CorruptCopy(f"expected an inventory as Inventory.to_bytes makes it; {error}") from None
        fields["standing"] = Standing(**fields["standing"])
        fields["holdings"] = [Holding(*holding) for holding in fields["holdings"]]
        fields["awaited"] = [Awaited(*awaited) for awaited in fields["awaited"]]
        return Inventory(**fields)


def _checksum(text: bytes) -> bytes:
    return digest(np.frombuffer(text, np.uint8)).to_bytes(CHECKSUM_BYTES, "little")


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"it has {number}, which is no number")


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"it names one of {list(fields)[:8]} twice")
    return fields


def _are(kind: type, values: object) -> bool:
    """Whether it is a list of this kind: of integers those of 64 bits, of floats finite ones."""
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        return False
    if kind is int:
        return not values or 0 <= min(values) <= max(values) < 1 << 64
    return kind is not float or bool(np.isfinite(values).all())


def _are_by_name(kind: type, values: object) -> bool:
    return isinstance(values, dict) and all(_are(kind, each) for each in values.values())


def _are_rows(kinds: Sequence[type], rows: object) -> bool:
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != len(kinds) for row in rows):
        return False
    columns = ([row[field] for row in rows] for field in range(len(kinds)))
    return all(_are(kind, column) for kind, column in zip(kinds, columns, strict=True))


_STANDING: dict[str, Callable[[Any], bool]] = {
    "version": lambda value: _are(int, [value]),
    "established": lambda value: _are(bool, [value]),
    "saw_progress": lambda value: _are(bool, [value]),
    "patient": lambda value: _are(bool, [value]),
    "awaits_living": lambda value: _are(bool, [value]),
    "boosts": lambda value: _are_by_name(float, value),
    "lagging": lambda value: value in get_args(Lagging),
    "committed": lambda value: _are(int, [value]),
}
_INVENTORY: dict[str, Callable[[Any], bool]] = {
    "standing": lambda value: not _problem(value, _STANDING),
    "holdings": lambda value: _are_rows((str, int, int, str), value),
    "checkpoints": lambda value: _are(int, value),
    "trains": lambda value: _are(bool, [value]),
    "can_begin": lambda value: _are(bool, [value]),
    "awaited": lambda value: _are_rows((str, int, str), value),
}


def _problem(fields: object, expected: Mapping[str, Callable[[Any], bool]]) -> str:
    """Return what is wrong with the fields of an object; empty if nothing is."""
    if not isinstance(fields, dict) or fields.keys() != expected.keys():
        return f"expected an object with {list(expected)}, got {str(fields)[:80]}"
    wrong = [name for name, is_fine in expected.items() if not is_fine(fields[name])]
    return f"{wrong[0]} is {str(fields[wrong[0]])[:80]}" if wrong else ""


class Survey:
    """List what this member has of all units, and where their bytes are.

    Args:
        state: this member's units.
        stored: versions that it has in addition, and their kinds.
        standing: of this member.
        trains: False on a replica node, which holds nothing actively.
        checkpoints: where they are, if anywhere.
        only_verified: whether only verified ones count.
        can_begin: whether a deferred model that has taken no step counts as holding all units, as it can make them.
        known: digests of units as they are, by name; others are computed.
    """

    def __init__(
        self,
        state: TrainingState,
        stored: Iterable[tuple[StoredUnit, str]],
        standing: Standing,
        *,
        trains: bool,
        checkpoints: Location | None,
        only_verified: bool = False,
        can_begin: bool,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._state = state
        self._stored: dict[tuple[str, int, str], StoredUnit] = {}
        self._awaited: dict[Awaited, StoredUnit] = {}
        can_begin &= trains and state.deferral is not None and not step_of(standing.version)
        active = state.held() if trains and not can_begin else []
        unknown = [unit for unit in active if unit not in known]
        digests = {**known, **dict(zip(unknown, state.digests(unknown), strict=True))}
        holdings = [Holding(unit, standing.version, digests[unit], ACTIVE) for unit in active]
        if can_begin:
            holdings = [Holding(unit.name, standing.version, 0, ACTIVE) for unit in state.catalog.units]
        retained = ((each, SNAPSHOT) for each in state.retained.stored(standing.version))
        # Where experts always may lag, their newest versions may be in different saves and checkpoints.
        lags = standing.lagging == "always"
        kinds = (CHECKPOINT, SAVE) if lags else (CHECKPOINT,)
        is_member, layout = standing.established, state.catalog.layout
        manifests = find_usable(checkpoints, layout, kinds, is_member=is_member, only_verified=only_verified)
        every = (saved for manifest in manifests * lags for saved in manifest.saved)
        persisted = {(each.unit, each.version, each.digest): each for each in every}
        for found, kind in (*stored, *retained, *((each, PERSISTED) for each in persisted.values())):
            unit = state.catalog.by_name.get(found.unit)
            if unit is None or not fits(found, kind, unit):
                continue
            if found.digest is None:
                self._awaited[Awaited(found.unit, found.version, kind)] = found
                continue
            self._stored[found.unit, found.digest, kind] = found
            holdings.append(Holding(found.unit, found.version, found.digest, kind))
        self.inventory = Inventory(
            standing,
            holdings,
            sorted({each.version for each in manifests if not each.is_save}),
            trains,
            can_begin,
            list(self._awaited),
        )

    def expect(self, digests: Mapping[tuple[str, int], int]) -> None:
        """Counts as held what is awaited and has one of these digests, by unit and version."""
        for unit, version, kind in [each for each in self._awaited if (each.unit, each.version) in digests]:
            value = digests[unit, version]
            found = self._awaited.pop(Awaited(unit, version, kind))
            self._stored[unit, value, kind] = AwaitedUnit(found, value)
        self.inventory.expect(digests)

    def complete(self) -> None:
        """Makes all that is awaited, and so holds it."""
        while self._awaited:
            group, nbytes = [], 0
            while self._awaited and nbytes < GROUP_BYTES:
                each, found = self._awaited.popitem()
                group.append((each, found, found.data))
                nbytes += len(group[-1][2])
            values = digests_of([[data] for _, _, data in group])
            for ((unit, version, kind), found, data), value in zip(group, values, strict=True):
                if len(data):
                    self._stored[unit, value, kind] = AwaitedUnit(found, value)
                    self.inventory.holdings.append(Holding(unit, version, value, kind))
        self.inventory.awaited = []

    def read(self, holding: Holding, out: Tensor) -> None:
        """Copy the bytes to `out`; those that cannot be read are zeros, which their digest will show."""
        if holding.kind == ACTIVE:
            self._state.read(holding.unit, out)  # without the optimizer's state if there is no room for it
            return
        read_stored(self._stored[holding.unit, holding.digest, holding.kind], out)

    def lend(self, holding: Holding) -> Tensor | None:
        """The bytes where they are, not to be written, until the state is; None where they must be read."""
        return None if holding.kind == ACTIVE else lent(self._stored[holding.unit, holding.digest, holding.kind])

    def copies(self, version: int) -> dict[str, StoredUnit]:
        """The copies in memory of a version, by unit."""
        return {
            each.unit: self._stored[each.unit, each.digest, each.kind]  # its bytes may be those of another version, too
            for each in self.inventory.holdings
            if each.version == version and each.kind not in (ACTIVE, PERSISTED)
        }

    def digests(self) -> list[tuple[str, int]]:
        """Digests of all bytes in memory that are of this member's version, computed now; by unit."""
        version = self.inventory.standing.version
        found = self._state.owners.digests() if self.inventory.trains else []
        for unit, held, value, kind in self.inventory.holdings:
            if held == version and kind != PERSISTED:
                bytes_now = None if kind == ACTIVE else self._stored[unit, value, kind].data.numpy()
                found.append((unit, value if bytes_now is None else digest(bytes_now)))
        return found


def fits(found: StoredUnit, kind: str, unit: Unit) -> bool:
    """Whether a copy has the tensors that this job's preset has; what another one left may lack some, or have more."""
    if isinstance(found, RetainedUnit):
        return True
    if isinstance(found, Saved):
        return list(found.tensors) == [spec.name for spec in unit.specs]
    return kind != SNAPSHOT or unit.nbytes == len(found.data)


def usable(
    inventories: Sequence[Inventory], refused: Collection[tuple[int, Holding]], *, only_verified: bool = False
) -> list[list[Holding]]:
    """The holdings of each rank that count (see `planning.usable_holdings`), without those that were `refused`.

    With `only_verified`, those that an earlier start of the job has left in memory or in saves do not count.
    """
    standings = [(inventory.standing.established, inventory.standing.saw_progress) for inventory in inventories]
    found = usable_holdings(standings, [inventory.holdings for inventory in inventories])
    only_active = only_verified and not any(inventory.standing.established for inventory in inventories)
    return [
        [
            holding
            for holding in map(Holding._make, held)
            if (rank, holding) not in refused and (holding.kind == ACTIVE or not only_active)
        ]
        for rank, held in enumerate(found)
    ]


def gather_inventories(group: Group, mine: Inventory) -> list[Inventory]:
    """Gather what every member brings, by rank; collective.

    Raises:
        PeerLost: what one of them told is damaged.
    """
    found = []
    for rank, data in enumerate(group.all_gather_bytes(mine.to_bytes())):
        try:
            found.append(Inventory.from_bytes(data))
        except CorruptCopy as error:
            raise PeerLost(f"the report of member {rank} is damaged, so all agree again: {error}") from None
    return found


def alike_everywhere(holdings_R: Sequence[Sequence[Holding]]) -> dict[str, int]:
    """Digests of the units that are equal on all ranks holding them; without the session's, which differ by rank."""
    digests: dict[str, set[int]] = {}
    for each in (each for held in holdings_R for each in held):
        digests.setdefault(each.unit, set()).add(each.digest)
    return {unit: next(iter(found)) for unit, found in digests.items() if len(found) == 1 and unit != SESSION}


def newest_version(inventories: Sequence[Inventory]) -> int:
    """The newest that any member has, or can bring a copy to."""
    held = (each.version for inventory in inventories for each in inventory.holdings)
    awaited = (each.version for inventory in inventories for each in inventory.awaited)
    return max(0, *held, *awaited)


def told_by_trainers(inventories: Sequence[Inventory], version: int) -> dict[tuple[str, int], int] | None:
    """Digests of what is awaited at a version, by unit and version, as members that train the units report them.

    None where two of these differ. What none of them trains at this version is left out.
    """
    awaited = {each.unit for inventory in inventories for each in inventory.awaited if each.version == version}
    trained = {
        (each.unit, each.digest)
        for inventory in inventories
        for each in inventory.holdings
        if inventory.standing.established and each.version == version and each.kind == ACTIVE and each.unit in awaited
    }
    told = {(unit, version): value for unit, value in trained}
    return told if len(told) == len(trained) else None


def newest_trainer(inventories: Sequence[Inventory]) -> int:
    """The rank, of those that train, whose state is the newest; the first one of several."""
    trained = [rank for rank, inventory in enumerate(inventories) if inventory.trains]
    return max(trained, key=lambda rank: inventories[rank].standing.version)


def newest_checkpoint(inventories: Sequence[Inventory]) -> int | None:
    """The newest that every training member can see: the folder must be on a file system that all share."""
    common = set.intersection(*(set(each.checkpoints) for each in inventories if each.trains))
    return max(common, default=None)
