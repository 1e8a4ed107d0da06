"""Survey of what survives, and fetching of what is missing: survey → plan → fetch → verify → adopt.

Every member runs the same steps; the plan is computed by all from the same gathered inventories. Nothing that is held
is given up before everything that is needed has arrived and matches its digest; and what other members get is retained
until the copies of the new arrangement are complete (`state.retained.release()`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from evermoe._native import RecoveryPlan
from evermoe.checkpoint import checkpoint
from evermoe.checkpoint.checkpoint_store import find
from evermoe.checkpoint.manifest import read_manifest
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.group import Group
from evermoe.errors import CorruptCopy, LostExperts, UnitsMissing
from evermoe.planning.recovery import recovery_plan
from evermoe.recovery.fetch import Fetch, Transfer, origins_of
from evermoe.recovery.late_fetch import LateFetch
from evermoe.recovery.on_disk import refuse_beginning
from evermoe.recovery.report import Outcome
from evermoe.recovery.survey import (
    ACTIVE,
    PERSISTED,
    Holding,
    Inventory,
    Standing,
    Survey,
    alike_everywhere,
    gather_inventories,
    newest_checkpoint,
    newest_trainer,
    newest_version,
    told_by_trainers,
    usable,
)
from evermoe.recovery.target import Target
from evermoe.recovery.unfit_copies import explain
from evermoe.state.stored import KeptCopies, StoredUnit, TrainedUnit
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

_NOTHING: Mapping[str, int] = MappingProxyType({})
Phase = Callable[[str], None]
"""Called with the name of each phase as it begins: `fetch`, `verify`."""


class Recovery:
    """One attempt to bring all members to one version under a new placement.

    Args:
        state: this member's units.
        stored: all copies that this member has, and their kinds.
        group: the members, agreed and connected.
        target: what they are to hold.
        standing: how this member comes to the recovery.
        known: digests of units as this member trains them, by name, as far as they are known.
    """

    def __init__(
        self,
        state: TrainingState,
        stored: Iterable[tuple[StoredUnit, str]],
        group: Group,
        target: Target,
        standing: Standing,
        known: Mapping[str, int] = _NOTHING,
    ) -> None:
        self.state, self.group, self.target, self.standing = state, group, target, standing
        self._stored = list(stored)
        self._survey = self._look(known, can_begin=True)
        self._late = LateFetch(group, state, {})
        """Work that follows after training has resumed."""
        self._outcome, self._problem = Outcome(), ""
        """Why the latest checkpoint that was tried cannot be used."""
        self._refused: set[tuple[int, Holding]] = set()
        """Ranks and holdings whose bytes did not match their digest."""

    def _look(self, known: Mapping[str, int] = _NOTHING, *, can_begin: bool) -> Survey:
        return Survey(
            self.state,
            self._stored,
            self.standing,
            trains=self.target.trains,
            checkpoints=self.target.checkpoints,
            only_verified=self.target.only_verified,
            can_begin=can_begin,
            known=known,
        )

    def verify(self) -> tuple[int, list[str]]:
        """Compares all members' active units and all copies of this version, byte for byte by digest; collective.

        Returns the number of digests compared and the units of which some differ.
        """
        self._survey.complete()
        everyone = gather_json(self.group, self._survey.digests())
        found: dict[str, set[int]] = {}
        for unit, value in (each for part in everyone for each in part):
            found.setdefault(unit, set()).add(value)
        return sum(map(len, everyone)), sorted(unit for unit, values in found.items() if len(values) > 1)

    def run(self, phase: Phase = lambda name: None) -> Outcome:
        """Collective.

        Args:
            phase: called with the name of each phase as it begins.

        Raises:
            PeerLost: another member was lost meanwhile, or what it told is damaged; nothing has changed here.
            UnitsMissing: some units are nowhere, and all members are patient or one knows of living holders; on all.
            LostExperts: some units survive nowhere. ValueError: see `refuse_beginning`.
        """
        self._phase, inventories = phase, self._inventories()
        while True:
            holdings = usable(inventories, self._refused, only_verified=self.target.only_verified)
            plan, may_lag = self._find_version(holdings)
            self._note_reached(plan, inventories, holdings)
            if plan.version is None and may_wait(inventories):
                raise UnitsMissing(f"{len(plan.lost)} units are in no member's memory: {', '.join(plan.lost[:4])}")
            on_disk = newest_checkpoint(inventories)
            if on_disk is not None and on_disk > (plan.version if plan.version is not None else -1):
                self._outcome.lost_units = list(plan.lost)
                if self._read_checkpoint(on_disk, inventories):
                    return self._outcome
                continue
            if plan.version is None or (self._problem and not step_of(plan.version)):
                unfit = explain(self.state, self._stored, self.group, plan.lost)
                raise LostExperts(self._problem or self.target.lost_message(plan.lost, unfit), list(plan.lost))
            if self.target.only_verified:
                refuse_beginning(plan.version, [holding.version for each in inventories for holding in each.holdings])
            if not step_of(plan.version) and any(inventory.can_begin for inventory in inventories):
                inventories = self._begin(plan.version, inventories)
                continue
            self._outcome.lost_units, self._outcome.equal_units = [], equal_units(inventories, plan.version)
            fetched = self._fetch(plan.version, inventories, holdings, may_lag)
            if fetched is not None:
                self._adopt(plan.version, fetched, self._leaving(plan.version, holdings[self.group.rank]))
                self._late.begin(plan.version)
                self._note_copies(plan.version, holdings)
                return self._outcome
            if any(each.awaited for each in inventories):  # older copies, which may be needed now
                inventories = self._inventories(complete=True)

    def _begin(self, version: int, inventories: Sequence[Inventory]) -> list[Inventory]:
        """Makes deferred models with their first values; what every member brings then. Collective."""
        self.target.begin(self.target.place(version, inventories))
        self.standing = replace(self.standing, version=version)
        self._survey = self._look(can_begin=False)
        return self._inventories()

    def _inventories(self, *, complete: bool = False) -> list[Inventory]:
        """Gather what every member brings, by rank; collective.

        State that replicas can reach need not be computed if all units are complete without it at the newest version
        that any member can give: then it counts as held, with the digests that trainers have sent. `complete`: it is
        computed in any case.
        """
        if complete:
            self._survey.complete()
        found = gather_inventories(self.group, self._survey.inventory)
        if any(each.awaited for each in found):
            newest = newest_version(found)
            told, (plan, _) = told_by_trainers(found, newest), self._find_version(usable(found, self._refused))
            if told is None or (plan.version, plan.stale) != (newest, []):
                return self._inventories(complete=True)
            self._survey.expect(told)
            self._outcome.told = sum(each.expect(told) for each in found)
        newest = newest_trainer(found)
        found[newest].load, found[newest].vacant = share_json(self.group, self.target.known(found), newest)
        return found

    def _note_copies(self, version: int, holdings: Sequence[Sequence[Holding]]) -> None:
        """Note which copies of this version need not be made again: where all members have equal bytes of a unit.

        Of an expert that was taken at an older version no member has the bytes that it has now.
        """
        copies_R = [[each for each in held if each.version == version and each.kind != PERSISTED] for held in holdings]
        equal = alike_everywhere(copies_R)
        needs = [self.target.needs(self._outcome.placement, rank) for rank in range(self.group.size)]
        units_R = [
            {*(each.unit for each in held), *trained} & equal.keys()
            for held, trained in zip(copies_R, needs, strict=True)
        ]
        own: dict[str, StoredUnit] = {}
        for unit in needs[self.group.rank]:
            if unit in equal:
                nbytes = self.state.catalog.by_name[unit].nbytes
                own[unit] = TrainedUnit(unit, version, equal[unit], nbytes, self.state.read)
        own |= {each.unit: each for each in self.state.retained.stored(version)} | self._survey.copies(version)
        self._outcome.copies = KeptCopies(units_R, self.group.rank, own)

    # ---- plan

    def _find_version(self, holdings: list[list[Holding]]) -> tuple[RecoveryPlan, bool]:
        """A plan without transfers, and whether experts may be older than its version."""
        nothing: list[list[str]] = [[] for _ in holdings]
        if self.standing.lagging != "always":
            plan = self._plan(holdings, nothing, False)
            if plan.version is not None or self.standing.lagging == "never":
                return plan, False
        return self._plan(holdings, nothing, True), True

    def _plan(self, holdings: list[list[Holding]], needs: list[list[str]], may_lag: bool) -> RecoveryPlan:
        catalog = self.state.catalog
        lagging = catalog.experts() if may_lag else []
        return recovery_plan(
            catalog.sizes(), holdings, needs, may_lag=lagging, nodes=self.target.nodes(self.group.size)
        )

    def _note_reached(
        self, plan: RecoveryPlan, inventories: Sequence[Inventory], holdings: list[list[Holding]]
    ) -> None:
        """Remembers how far training had come, as far as any member knows."""
        copied = plan.version
        if copied is None:
            copied = max((each.version for held in holdings for each in held), default=0)
        committed = [each.standing.committed for each in inventories]
        trained = [step_of(each.standing.version) for each in inventories]
        self._outcome.trained = max(self._outcome.trained, *trained)
        self._outcome.reached = max(self._outcome.reached, step_of(copied), *committed)

    # ---- fetch

    def _fetch(
        self, version: int, inventories: Sequence[Inventory], holdings: list[list[Holding]], may_lag: bool
    ) -> dict[str, Tensor] | None:
        """Bytes of the units that this rank lacks; None when some did not match and a new plan is needed."""
        outcome = self._outcome
        outcome.placement = self.target.place(version, inventories)
        needs = [self.target.needs(outcome.placement, rank) for rank in range(self.group.size)]
        plan = self._plan(holdings, needs, may_lag)
        outcome.stale = dict(plan.stale)
        transfers = [Transfer(*fields) for fields in plan.transfers]
        outcome.tier = _tier(transfers)
        origins = origins_of(transfers)
        promised = _promised(transfers, origins, holdings, lambda unit: outcome.stale.get(unit, version))
        may_be_late = self.target.has_late_state and not outcome.stale
        self._late = LateFetch(self.group, self.state, promised if may_be_late else {})
        self._phase("fetch")
        fetched, digests = self._exchange(promised)
        self._phase("verify")
        held = sum(each.version == version for held in holdings for each in held)
        outcome.digests_checked += held - outcome.told + len(fetched)
        refused = self._agree_on_refused(promised, origins, digests)
        outcome.digests_mismatched += len(plan.conflicts) + len(refused)
        self._refused |= refused
        return None if refused else fetched

    def _exchange(self, promised: dict[Transfer, Holding]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the units that this rank is to get, and the digests of those that are complete.

        Args:
            promised: what the source of each transfer says that it has.
        """
        fetch = Fetch(
            self.group,
            self._late.nbytes,
            lambda transfer, out: self._survey.read(promised[transfer], out),
            # Experts that were taken at an older version are written before they are adopted.
            lambda transfer: None if self._outcome.stale else self._survey.lend(promised[transfer]),
        )
        local: dict[str, Tensor] = {}
        remote = fetch.remote(list(promised), lambda: local.update(fetch.local(list(promised))))
        sizes = dict(self.state.catalog.sizes())
        self._outcome.count_fetched({"local memory": local, "peer": remote}, sizes)
        nodes, rank = self.target.nodes(self.group.size), self.group.rank
        far = [each.unit for each in promised if each.destination == rank and nodes[each.source] != nodes[rank]]
        self._outcome.far_bytes = sum(sizes[unit] for unit in far)
        late = self._late.keep(remote)
        self._outcome.late_bytes = self._late.late_bytes
        return local | remote, {unit: value for unit, value in fetch.digests().items() if unit not in late}

    def _agree_on_refused(
        self, promised: dict[Transfer, Holding], origins: Mapping[Transfer, int], digests: Mapping[str, int]
    ) -> set[tuple[int, Holding]]:
        """Return what has arrived anywhere with other bytes than were promised; collective."""
        mine = {each.unit: holding for each, holding in promised.items() if each.destination == self.group.rank}
        bad = [unit for unit, found in digests.items() if found != mine[unit].digest]
        everyone = gather_json(self.group, bad)
        return {
            (origins[each], holding) for each, holding in promised.items() if each.unit in everyone[each.destination]
        }

    # ---- adopt

    def _adopt(self, version: int, fetched: dict[str, Tensor], leaving: Mapping[str, int] = _NOTHING) -> None:
        outcome = self._outcome
        if outcome.stale:
            self._agree_on_scalars(version, fetched)
        outcome.version = version
        self.target.adopt(outcome.placement, fetched, leaving)

    def _leaving(self, version: int, mine: Sequence[Holding]) -> dict[str, int]:
        """Digests of what this rank trains at `version` and is to give up, and so retains.

        Nobody may have a second copy of it as yet.
        """
        current = [each for each in mine if each.version == version]
        self.state.retained.begin(version, {(each.unit, each.digest) for each in current})
        stays = set(self.target.needs(self._outcome.placement, self.group.rank))
        return {each.unit: each.digest for each in current if each.kind == ACTIVE and each.unit not in stays}

    def _agree_on_scalars(self, version: int, fetched: dict[str, Tensor]) -> None:
        """Experts of older versions take over the optimizer's counts for their layer, which all its experts share."""
        views = [self.state.catalog.by_name[unit].layer_scalars(data) for unit, data in fetched.items()]
        mine = self.state.scalars() if self.standing.version == version and self.target.trains else {}
        if not mine:
            for key, value in ((key, float(view)) for each in views for key, view in each.items()):
                mine[key] = max(value, mine.get(key, value))
        agreed: dict[str, float] = {}
        for found in gather_json(self.group, mine):
            agreed |= {key: max(value, agreed.get(key, value)) for key, value in found.items()}
        for key, view in ((key, view) for each in views for key, view in each.items()):
            view.fill_(agreed[key])

    # ---- checkpoints

    def _read_checkpoint(self, version: int, inventories: Sequence[Inventory]) -> bool:
        """Adopts a checkpoint; False, for a new plan without it, if it cannot be read on some rank; collective."""
        assert self.target.checkpoints is not None
        self._outcome.stale = {}
        self._outcome.placement = self.target.place(version, inventories)
        names = self.target.needs(self._outcome.placement, self.group.rank)
        self._phase("fetch")
        fetched, problem = {}, ""
        try:
            path = find(self.target.checkpoints, self.state.catalog.layout).get(version)
            if path is None:
                raise CorruptCopy(f"version {version} has gone from {self.target.checkpoints}")
            fetched = checkpoint.read(read_manifest(path), self.state, names)
        except CorruptCopy as error:
            problem = str(error)
        self._phase("verify")
        problems = [text for text in gather_json(self.group, problem) if text]
        if problems:
            warnings.warn(f"a checkpoint is ignored: {problems[0]}", stacklevel=3)
            self._problem = f"the only checkpoint left cannot be used: {problems[0]}"
            for inventory in inventories:
                inventory.checkpoints = [each for each in inventory.checkpoints if each != version]
            return False
        self._outcome.count_fetched({"disk": fetched}, dict(self.state.catalog.sizes()))
        self._outcome.tier = "store"
        self._outcome.digests_checked += len(fetched)
        self._adopt(version, fetched)
        return True


def _promised(
    transfers: Iterable[Transfer],
    origins: Mapping[Transfer, int],
    holdings: Sequence[Sequence[Holding]],
    version: Callable[[str], int],
) -> dict[Transfer, Holding]:
    """Return what the origin of each transfer reports to have of the unit, at the `version` of it."""
    found = {
        (rank, each.unit, each.kind): each
        for rank, held in enumerate(holdings)
        for each in held
        if each.version == version(each.unit)
    }
    return {each: found[origins[each], each.unit, each.kind] for each in transfers}


def may_wait(inventories: Sequence[Inventory]) -> bool:
    """Return whether members may still wait for holders of units that are in no member's memory."""
    standings = [inventory.standing for inventory in inventories]
    return all(each.patient for each in standings) or any(each.awaits_living for each in standings)


def equal_units(inventories: Sequence[Inventory], version: int) -> dict[str, int]:
    """Return the number of members of the running job that train a unit at a version, if their bytes are equal."""
    digests: dict[str, list[int]] = {}
    for inventory in inventories:
        for each in inventory.holdings if inventory.standing.established else ():
            if each.kind == ACTIVE and each.version == version:
                digests.setdefault(each.unit, []).append(each.digest)
    return {unit: len(found) for unit, found in digests.items() if len(set(found)) == 1}


def _tier(transfers: Iterable[Transfer]) -> str:
    """The farthest place that a unit comes from: see `events.Recovered.tier`."""
    found = {
        "store" if each.kind == PERSISTED else "own memory" if each.source == each.destination else "peers"
        for each in transfers
    }
    return max(found, key=("own memory", "peers", "store").index, default="")
