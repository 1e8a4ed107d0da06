"""What survives, what is missing, and getting it: survey → plan → fetch → verify → adopt.

Every member runs the same steps; the plan is computed by all from the same gathered inventories. Nothing that is held
is given up before everything that is needed has arrived and matches its digest.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from evermoe import checkpoint, planning
from evermoe._native import RecoveryPlan, digest
from evermoe.balance import Placement, place_layers
from evermoe.config import SessionConfig
from evermoe.errors import CorruptCopy, LostExperts, UnitsMissing
from evermoe.group import Group
from evermoe.units import TrainingState, expert_unit
from evermoe.versions import step_of

ROUND_BYTES = 256 << 20
"""Fetches are exchanged in rounds of at most about this many bytes in the whole group."""

ACTIVE, SNAPSHOT, PERSISTED = "active", "snapshot", "persisted"
Holding = tuple[str, int, int, str]
"""(unit, version, digest, kind)."""
Lagging = Literal["never", "if needed", "always"]


class AnyCopy(Protocol):
    """A version of one unit that a member has beside the state that it trains."""

    @property
    def unit(self) -> str:
        """Its name."""

    @property
    def version(self) -> int:
        """That of its bytes."""

    @property
    def digest(self) -> int:
        """XXH3-64 of its bytes."""

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]` on the CPU, read when it is asked for; empty if it cannot be read any more."""


@dataclass
class Inventory:
    """What one member brings to a recovery."""

    version: int
    holdings: list[Holding]
    experts: dict[str, list[int]]
    load: list[list[float]]
    checkpoints: list[int]
    patient: bool
    """Whether it would still wait for others when units are missing."""
    established: bool
    """Whether it has state of the running job."""
    saw_running: bool
    """Whether it has seen the job run."""
    boosts: dict[str, list[float]]
    """Factors of the load of experts that have lost tokens."""
    trains: bool
    """False for a replica node."""

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(self.__dict__).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Inventory:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        fields["holdings"] = [tuple(holding) for holding in fields["holdings"]]
        return Inventory(**fields)


@dataclass
class Outcome:
    """What a recovery did, on this member."""

    version: int = 0
    """Of the state that all members now hold."""
    newest: int = 0
    """The newest version that was whole, or where none was, of any unit: `version` unless something was lost."""
    placement: Placement = field(default_factory=dict)
    fetched_bytes: int = 0
    """Received from peers, read from this node's memory or from disk."""
    fetched_units: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Units by where they came from: `peer`, `own memory`, `disk`."""
    digests_checked: int = 0
    """Digests of units compared with another copy's or with the bytes that arrived."""
    digests_mismatched: int = 0
    lost_units: list[str] = field(default_factory=list)
    """Units of which no copy was left in memory, when the job went back to a checkpoint."""
    stale: dict[str, int] = field(default_factory=dict)
    """Experts that were taken at an older version than the others: what they had learnt since is lost."""


class Recovery:
    """One attempt to bring all members to one version under a new placement.

    Args:
        state: this member's units.
        stored: all copies that this member has, and their kinds.
        lagging: whether experts may be taken at older versions than the rest: `never`, `if needed`, or `always` where
            that spares the rest going back.
        boosts: factors of the load of experts that have lost tokens, by layer.
        group: the members, agreed and connected.
        config: of the session: slots, replicas, placement, folder of the checkpoints.
        nodes: name of the node of each rank; ranks of one node fail together.
        trainers: how many of the ranks train; the others, which come last, keep copies alone.
        version: of the state that this member holds actively.
        patient: units that nobody here has are waited for (`UnitsMissing`), not given up.
        established, saw_running: of `Membership`. A job that was seen to run is never started again from step 0.
        phase: is told the name of each phase as it begins: `rebuild`, `fetch`, `verify`.
    """

    def __init__(
        self,
        state: TrainingState,
        stored: Iterable[tuple[AnyCopy, str]],
        group: Group,
        config: SessionConfig,
        *,
        lagging: Lagging,
        boosts: dict[str, list[float]],
        nodes: Sequence[str],
        trainers: int,
        version: int,
        patient: bool,
        established: bool,
        saw_running: bool,
        phase: Callable[[str], None],
    ) -> None:
        self.state, self._copies, self.group, self.version = state, stored, group, version
        self.lagging, self.boosts = lagging, boosts
        self.config, self.nodes = config, nodes[:trainers]
        self.trains = group.rank < trainers
        self.checkpoints = Path(config.checkpoint_dir) if config.checkpoint_dir is not None else None
        self.patient, self.established, self.saw_running, self.phase = patient, established, saw_running, phase
        self.outcome = Outcome()
        self._stored: dict[Holding, AnyCopy] = {}
        self._refused: set[tuple[int, Holding]] = set()

    def run(self) -> Outcome:
        """Collective.

        Raises:
            PeerLost: another member was lost meanwhile; nothing has changed here.
            UnitsMissing: some units are nowhere, and all members are still patient; the same on all members.
            LostExperts: some units survive nowhere.
        """
        inventories = [Inventory.from_bytes(b) for b in self.group.all_gather_bytes(self._survey().to_bytes())]
        while True:
            holdings = self._usable(inventories)
            target = self._plan(holdings, [[] for _ in holdings], self.lagging == "always")
            is_lagging = self.lagging == "always" or (target.version is None and self.lagging == "if needed")
            if is_lagging:
                target = self._plan(holdings, [[] for _ in holdings], True)
            newest = max((version for held in holdings for _, version, _, _ in held), default=0)
            self.outcome.newest = max(self.outcome.newest, newest if target.version is None else target.version)
            if target.version is None and all(inventory.patient for inventory in inventories):
                raise UnitsMissing(f"{len(target.lost)} units are in nobody's memory: {', '.join(target.lost[:4])}")
            on_disk = self._newest_checkpoint(inventories)
            if on_disk is not None and on_disk > (target.version if target.version is not None else -1):
                self.outcome.lost_units = list(target.lost)
                return self._from_disk(on_disk, inventories)
            if target.version is None:
                raise LostExperts(self._lost_message(target.lost), list(target.lost))
            fetched = self._fetch(target.version, inventories, holdings, is_lagging)
            if fetched is not None:
                return self._adopt(target.version, fetched)

    def _plan(self, holdings: list[list[Holding]], needs: list[list[str]], is_lagging: bool) -> RecoveryPlan:
        may_lag = [unit.name for unit in self.state.units if unit.layer is not None] if is_lagging else []
        return planning.recovery_plan(self._sizes(), holdings, needs, may_lag=may_lag)

    def verify(self) -> tuple[int, list[str]]:
        """Compares all members' active units and all copies of this version, byte for byte by digest; collective.

        Returns the number of digests compared and the units of which some differ.
        """
        mine: list[tuple[str, int]] = []
        for unit, version, value, kind in self._survey().holdings:
            if version == self.version and kind != PERSISTED:
                stored = self._stored[unit, version, value, kind].data.numpy() if kind != ACTIVE else None
                mine.append((unit, value if stored is None else digest(stored)))
        everyone = [json.loads(part) for part in self.group.all_gather_bytes(json.dumps(mine).encode())]
        found: dict[str, set[int]] = {}
        for unit, value in (holding for part in everyone for holding in part):
            found.setdefault(unit, set()).add(value)
        return sum(map(len, everyone)), sorted(unit for unit, values in found.items() if len(values) > 1)

    # ---- survey

    def _survey(self) -> Inventory:
        held = self.state.held() if self.trains else []
        holdings: list[Holding] = [
            (name, self.version, value, ACTIVE) for name, value in zip(held, self.state.digests(held), strict=True)
        ]
        for stored, kind in self._copies:
            unit = self.state.by_name.get(stored.unit)
            if unit is not None and (kind != SNAPSHOT or unit.nbytes == len(stored.data)):
                self._stored[stored.unit, stored.version, stored.digest, kind] = stored
                holdings.append((stored.unit, stored.version, stored.digest, kind))
        experts = {path: layer.experts for path, layer in self.state.layers.items()}
        found = sorted(checkpoint.find(self.checkpoints)) if self.checkpoints else []
        return Inventory(
            self.version,
            holdings,
            experts,
            self.state.load_LE.tolist(),
            found,
            self.patient,
            self.established,
            self.saw_running,
            self.boosts,
            self.trains,
        )

    def _sizes(self) -> list[tuple[str, int]]:
        return [(unit.name, unit.nbytes) for unit in self.state.units]

    def _usable(self, inventories: Sequence[Inventory]) -> list[list[Holding]]:
        running = any(inventory.saw_running for inventory in inventories)
        is_new = not any(inventory.established for inventory in inventories)
        holdings = [inventory.holdings for inventory in inventories]
        if is_new and not running and not any(step_of(version) for held in holdings for _, version, _, _ in held):
            # Nobody has learnt anything. What an earlier start has left behind is no progress, nor is it that some
            # members got through a recovery in which others were lost.
            holdings = [
                [(unit, 0, value, kind) for unit, _, value, kind in held if kind == ACTIVE] for held in holdings
            ]
        oldest = int(running and is_new)
        return [
            [each for each in held if each[1] >= oldest and (rank, each) not in self._refused]
            for rank, held in enumerate(holdings)
        ]

    def _newest_checkpoint(self, inventories: Sequence[Inventory]) -> int | None:
        """The newest that every member can see: the folder must be on a file system that all share."""
        common = set.intersection(*(set(each.checkpoints) for each in inventories if each.trains))
        return max(common, default=None)

    def _lost_message(self, lost: Sequence[str]) -> str:
        shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        where = (
            f"no checkpoint in {self.checkpoints} is readable by all members"
            if self.checkpoints
            else "no checkpoint directory was given"
        )
        return (
            f"no copy is left of {len(lost)} units ({shown}) in the memory of {self.group.size} members, and {where}. "
            "Too many nodes failed at once for the number of copies; use more copies or set checkpoint_dir."
        )

    # ---- plan

    def _place(self, version: int, inventories: Sequence[Inventory]) -> Placement:
        experts = {path: layer.num_experts for path, layer in self.state.layers.items()}
        previous = {path: np.zeros((len(self.nodes), number), np.int64) for path, number in experts.items()}
        for rank, inventory in enumerate(inventories):
            if inventory.version == version and version > 0 and inventory.trains:
                for path, held in inventory.experts.items():
                    previous[path][rank, held] = 1
        trained = [inventory for inventory in inventories if inventory.trains]
        newest = max(trained, key=lambda inventory: inventory.version)
        with warnings.catch_warnings():
            if self.group.rank > 0:  # one member says it for all
                warnings.simplefilter("ignore", planning.FewerReplicas)
            return place_layers(experts, newest.load, previous, self.nodes, self.config, newest.boosts)

    def _needs(self, placement: Placement, rank: int) -> list[str]:
        if rank >= len(self.nodes):
            return []
        experts = [
            expert_unit(path, int(e)) for path, matrix in placement.items() for e in np.flatnonzero(matrix[rank])
        ]
        return [unit.name for unit in self.state.units if unit.layer is None] + experts

    # ---- fetch

    def _fetch(
        self, version: int, inventories: Sequence[Inventory], holdings: list[list[Holding]], is_lagging: bool
    ) -> dict[str, Tensor] | None:
        """Bytes of the units that this rank lacks; None when some did not match and a new plan is needed."""
        self.outcome.placement = self._place(version, inventories)
        needs = [self._needs(self.outcome.placement, rank) for rank in range(self.group.size)]
        plan = self._plan(holdings, needs, is_lagging)
        stale = dict(plan.stale)
        digests = {
            (rank, unit, kind): value
            for rank, held in enumerate(holdings)
            for unit, found, value, kind in held
            if found == stale.get(unit, version)
        }
        expected = {
            unit: (stale.get(unit, version), digests[source, unit, kind]) for unit, source, _, kind in plan.transfers
        }
        self.phase("fetch")
        fetched = self._exchange(plan.transfers, expected)
        self.phase("verify")
        self.outcome.stale = stale
        surveyed = sum(found == version for held in holdings for _, found, _, _ in held)
        self.outcome.digests_checked += surveyed + len(fetched)
        self.outcome.digests_mismatched += len(plan.conflicts)
        bad = [unit for unit, data in fetched.items() if digest(data.numpy()) != expected[unit][1]]
        refused = self._agree_on_refused(bad, plan.transfers, expected)
        self._refused |= refused
        self.outcome.digests_mismatched += len(refused)
        return None if refused else fetched

    def _agree_on_refused(
        self,
        bad: list[str],
        transfers: Sequence[tuple[str, int, int, str]],
        expected: dict[str, tuple[int, int]],
    ) -> set[tuple[int, Holding]]:
        refused = set()
        for rank, text in enumerate(self.group.all_gather_bytes(json.dumps(bad).encode())):
            names = set(json.loads(text))
            refused |= {
                (source, (unit, *expected[unit], kind))
                for unit, source, destination, kind in transfers
                if destination == rank and unit in names
            }
        return refused

    def _read(self, unit: str, kind: str, expected: tuple[int, int], out: Tensor) -> None:
        """Bytes that cannot be read are left as they are: their digest will tell."""
        if kind == ACTIVE:
            self.state.read(unit, out)
            return
        data = self._stored[(unit, *expected, kind)].data
        out[: len(data)] = data

    def _exchange(
        self, transfers: Sequence[tuple[str, int, int, str]], expected: dict[str, tuple[int, int]]
    ) -> dict[str, Tensor]:
        """The units that this rank is to have; `expected` is the version and the digest of each."""
        rank, fetched = self.group.rank, {}
        remote = [transfer for transfer in transfers if transfer[1] != transfer[2]]
        for unit, source, destination, kind in transfers:
            if source == destination == rank:
                fetched[unit] = torch.zeros(self.state.by_name[unit].nbytes, dtype=torch.uint8)
                self._read(unit, kind, expected[unit], fetched[unit])
        self.outcome.sources["own memory"] += len(fetched)
        for part in self._rounds(remote):
            outgoing = sorted((t for t in part if t[1] == rank), key=lambda t: t[2])
            incoming = sorted((t for t in part if t[2] == rank), key=lambda t: t[1])
            sizes = [self._size(t) for t in outgoing]
            data = torch.zeros(sum(sizes), dtype=torch.uint8)
            for (unit, _, _, kind), place in zip(outgoing, data.split(sizes), strict=True):
                self._read(unit, kind, expected[unit], place)
            received = self.group.all_to_all(
                data,
                [sum(self._size(t) for t in outgoing if t[2] == r) for r in range(self.group.size)],
                [sum(self._size(t) for t in incoming if t[1] == r) for r in range(self.group.size)],
            )
            parts = received.split([self._size(t) for t in incoming])
            fetched |= {t[0]: piece for t, piece in zip(incoming, parts, strict=True)}
            self.outcome.sources["peer"] += len(incoming)
        self.outcome.fetched_units = len(fetched)
        self.outcome.fetched_bytes = sum(len(piece) for piece in fetched.values())
        return fetched

    def _size(self, transfer: tuple[str, int, int, str]) -> int:
        return self.state.by_name[transfer[0]].nbytes

    def _rounds(self, transfers: Sequence[tuple[str, int, int, str]]) -> list[list[tuple[str, int, int, str]]]:
        rounds: list[list[tuple[str, int, int, str]]] = []
        room = 0
        for transfer in transfers:
            if room < self._size(transfer) or not rounds:
                rounds.append([])
                room = ROUND_BYTES
            rounds[-1].append(transfer)
            room -= self._size(transfer)
        return rounds

    # ---- adopt

    def _adopt(self, version: int, fetched: dict[str, Tensor]) -> Outcome:
        placement, rank = self.outcome.placement, self.group.rank
        if self.outcome.stale:
            self._agree_on_scalars(version, fetched)
        self.outcome.version = version
        if self.trains:
            experts = {path: np.flatnonzero(matrix[rank]).tolist() for path, matrix in placement.items()}
            self.state.adopt(experts, fetched)
        for path, matrix in placement.items():
            self.state.layers[path].matrix_RE = matrix
        return self.outcome

    def _agree_on_scalars(self, version: int, fetched: dict[str, Tensor]) -> None:
        """Experts of older versions take over the optimizer's counts for their layer, which all its experts share."""
        views = [self.state.unit_scalars(unit, data) for unit, data in fetched.items()]
        mine = self.state.scalars() if self.version == version and self.trains else {}
        if not mine:
            for key, value in ((key, float(view)) for each in views for key, view in each.items()):
                mine[key] = max(value, mine.get(key, value))
        agreed: dict[str, float] = {}
        for found in map(json.loads, self.group.all_gather_bytes(json.dumps(mine).encode())):
            agreed |= {key: max(value, agreed.get(key, value)) for key, value in found.items()}
        for key, view in ((key, view) for each in views for key, view in each.items()):
            view.fill_(agreed[key])

    def _from_disk(self, version: int, inventories: Sequence[Inventory]) -> Outcome:
        assert self.checkpoints is not None
        self.outcome.placement = self._place(version, inventories)
        names = self._needs(self.outcome.placement, self.group.rank)
        self.phase("fetch")
        fetched, problem = {}, ""
        try:
            manifest = checkpoint.read_manifest(checkpoint.find(self.checkpoints)[version])
            fetched = checkpoint.read(manifest, self.state, names)
        except CorruptCopy as error:
            problem = str(error)
        self.phase("verify")
        problems = [text.decode() for text in self.group.all_gather_bytes(problem.encode()) if text]
        if problems:
            for inventory in inventories:
                inventory.checkpoints.remove(version)
            return self._without_checkpoint(problems[0], inventories)
        self.outcome.sources["disk"] += len(fetched)
        self.outcome.fetched_units = len(fetched)
        self.outcome.fetched_bytes = sum(len(data) for data in fetched.values())
        self.outcome.digests_checked += len(fetched)
        return self._adopt(version, fetched)

    def _without_checkpoint(self, problem: str, inventories: Sequence[Inventory]) -> Outcome:
        older = self._newest_checkpoint(inventories)
        if older is None:
            raise LostExperts(f"the only checkpoint left cannot be used: {problem}", self.outcome.lost_units)
        return self._from_disk(older, inventories)
