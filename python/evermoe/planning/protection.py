"""Who keeps copies of what, and of which kind: each preset's answer, from plain data. The same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evermoe import planning
from evermoe.planning.schedule import DEFAULT_LINK, Link

Kind = Literal["active", "replayed", "snapshot"]
"""Copies in addition to the active holders: none; copies that repeat its steps; or copies of its state."""
OWN_VERSIONS = 2
"""Versions of its own snapshots that a rank has room for, page-locked where the state is on a GPU."""
LOGGED_STEPS = 2
"""Steps that a log needs room for: the newest, which can still be undone, and the one that is voted on."""
RECORD_BYTES = 256
"""What a logged gradient counts for beside its bytes, at most."""
FAILURE = 1e-4
"""Probability that a node fails in a step; the same for all, it only weighs units against each other."""
UNKNOWN_SECONDS = 1e6
"""Seconds of a step that was not profiled yet."""
MOST_FATAL = 32
"""Fatal losses that are named."""


@dataclass(frozen=True)
class UnitInfo:
    """A unit to protect."""

    name: str
    nbytes: int
    gradient_bytes: int
    active: tuple[int, ...]
    """Ranks that train on it."""
    tokens: float = 0.0
    """Tokens that it gets in a step."""
    replayable: bool = False
    may_lag: bool = True
    """Whether the rest can go on with an older version of it, as with an expert's."""


@dataclass(frozen=True)
class RankInfo:
    """What a rank offers, as it reports itself."""

    node: str
    """Its node, or the rack or zone over which copies are spread. Ranks of one fail together, if there are several."""
    free_bytes: int
    """Host memory that it may take: its share of what its node has."""
    trains: bool = True
    """False for a replica node, which then keeps what is not trained on several nodes."""
    step_seconds: float | None = None
    """None before a profile was made."""
    network_seconds: float | None = None
    """Idle seconds of its network in a step."""
    log_bytes: int = 1 << 62
    """Capacity of its log of gradients, for the units that it keeps by repeating their steps."""
    link: tuple[float, float] | None = None
    """Measured latency of a message, in seconds, and bytes per second; None before there was enough to measure."""


@dataclass(frozen=True)
class UnitProtection:
    """How one unit is protected in addition to its active holders."""

    unit: str
    kind: Kind
    primary: int
    """The rank that sends, one of the active ones."""
    holders: tuple[int, ...] = ()
    """Ranks that keep copies: for snapshots, of which the primary keeps its own, too, without it."""
    period: int = 1
    """Steps between two versions of a snapshot."""


@dataclass(frozen=True)
class ProtectionPlan:
    """How all units are protected."""

    units: list[UnitProtection]
    summary: str
    """One sentence for the user."""
    by_unit: dict[str, UnitProtection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_unit.update({each.unit: each for each in self.units})


@dataclass(frozen=True)
class _Request:
    """What is to be planned."""

    preset: planning.PresetName
    units: Sequence[UnitInfo]
    ranks: Sequence[RankInfo]
    copies: int
    budget: float

    @property
    def choices(self) -> planning.Preset:
        """What the preset stands for."""
        return planning.PRESETS[self.preset]

    def primaries(self) -> list[int]:
        """The rank that sends each unit: one that trains it, so that all have as many bytes to send as can be."""
        units = self.units
        return planning.primaries([unit.active for unit in units], [unit.nbytes for unit in units], len(self.ranks))

    def active_only(self, summary: str) -> ProtectionPlan:
        """The plan without copies, but for the active ones."""
        pairs = zip(self.units, self.primaries(), strict=True)
        return ProtectionPlan(
            [UnitProtection(unit.name, "active", rank) for unit, rank in pairs], f"{self.preset}: {summary}"
        )


def plan_protection(
    preset: planning.PresetName,
    units: Sequence[UnitInfo],
    ranks: Sequence[RankInfo],
    *,
    copies: int,
    budget: float,
) -> ProtectionPlan:
    """The protection plan of a preset.

    Args:
        preset: a name of `planning.PRESETS`.
        subjects: all units.
        members: by rank.
        copies: nodes that are to hold each unit; 0 or 1 for no copies.
        budget: share of a step by which copies may delay it (`auto`).

    Example: two nodes, an expert on each, a router on both, `auto`: each expert is replayed on the other node, the
    router needs nothing.
    """
    request = _Request(preset, units, ranks, copies, budget)
    plan = _use_replica_nodes(_plan(request), request)
    return _within_logs(plan, request) if request.choices.chooses_copies else plan


def _plan(request: _Request) -> ProtectionPlan:
    placement = request.choices.copy_placement
    if request.choices.chooses_copies:
        return _auto(request)
    if placement == "none" or request.copies < 2:
        return request.active_only("no copies on other nodes beside the active ones")
    return _uncovered_only(request) if placement == "training" else _everything(request)


def _use_replica_nodes(plan: ProtectionPlan, request: _Request) -> ProtectionPlan:
    """Copies go to replica nodes where there are some: evenly, and to others if one would be the sender's own node."""
    replicas = [rank for rank, info in enumerate(request.ranks) if not info.trains]
    if not replicas:
        return plan
    load = dict.fromkeys(replicas, 0)
    kept = []
    for unit, each in zip(request.units, plan.units, strict=True):
        chosen = sorted(replicas, key=lambda rank: (load[rank], rank))[: len(each.holders)]
        for rank in chosen:
            load[rank] += unit.nbytes
        others = [rank for rank in each.holders if rank not in chosen]
        holders = (*chosen, *others)[: len(each.holders)]
        kept.append(UnitProtection(each.unit, each.kind, each.primary, holders, each.period))
    return ProtectionPlan(kept, plan.summary)


def _within_logs(plan: ProtectionPlan, request: _Request) -> ProtectionPlan:
    """Snapshots of each step instead, of units whose gradients do not fit into the logs of their holders."""
    room = [info.log_bytes for info in request.ranks]
    kept = []
    for unit, each in zip(request.units, plan.units, strict=True):
        nbytes = LOGGED_STEPS * (unit.gradient_bytes + RECORD_BYTES)
        if each.kind == "replayed" and any(room[holder] < nbytes for holder in each.holders):
            kept.append(UnitProtection(each.unit, "snapshot", each.primary, each.holders))
            continue
        if each.kind == "replayed":
            for holder in each.holders:
                room[holder] -= nbytes
        kept.append(each)
    number = sum(new is not old for new, old in zip(kept, plan.units, strict=True))
    summary = f"; snapshots of {number} more, whose gradients are too large for replay_log_bytes" if number else ""
    return ProtectionPlan(kept, plan.summary + summary)


def _everything(request: _Request) -> ProtectionPlan:
    """Gemini and BAFT: snapshots of all units; each unit is sent by one of the ranks that have it."""
    nodes, primaries = [info.node for info in request.ranks], request.primaries()
    if request.choices.copies_to_previous_node:
        previous = planning.copy_holders(nodes, 2, policy="previous")
        others = [tuple(previous[rank][1:]) for rank in primaries]
    else:
        active = [unit.active for unit in request.units]
        others = [tuple(ranks[1:]) for ranks in planning.unit_copy_holders(primaries, active, nodes, request.copies)]
    kept = [
        UnitProtection(unit.name, "snapshot", rank, holders)
        for unit, rank, holders in zip(request.units, primaries, others, strict=True)
    ]
    sent = sum(unit.nbytes * len(each.holders) for unit, each in zip(request.units, kept, strict=True))
    summary = f"{request.preset}: snapshots of all {len(kept)} units, {sent / 1e6:.1f} MB to peers each step"
    return ProtectionPlan(kept, summary)


def _uncovered_only(request: _Request) -> ProtectionPlan:
    """MoEtion: copies of what no peer holds already, replayed where that is exact.

    A session's ranks are data-parallel peers. What one of them trains alone, an expert or what it owns, is like a part
    of a ZeRO state: `training_copy_holders` says where it goes. What nothing goes on without is copied at each step.
    """
    domains, primaries = _node_numbers(request.ranks), request.primaries()
    nodes = [f"{domain:06d}" for domain in domains]
    active = [unit.active for unit in request.units]
    holders = planning.unit_copy_holders(primaries, active, nodes, request.copies)
    ranks = list(range(len(nodes)))
    copies = min(request.copies, len(set(domains)))
    own = planning.training_copy_holders(nodes, ranks, [0] * len(nodes), copies, zero_stage=1).optimizer
    are_peers = all(info.trains for info in request.ranks)
    kept = []
    for unit, rank, next_holders in zip(request.units, primaries, holders, strict=True):
        is_safe = len({domains[r] for r in unit.active}) >= min(request.copies, len(set(domains)))
        found = own[rank] if are_peers and len(unit.active) == 1 else next_holders
        others = () if is_safe else tuple(found[1:])
        kind: Kind = "replayed" if unit.replayable or unit.may_lag else "snapshot"
        kept.append(UnitProtection(unit.name, kind if others else "active", rank, others))
    number = sum(each.kind == "replayed" and unit.may_lag for unit, each in zip(request.units, kept, strict=True))
    always = sum(bool(each.holders) for each in kept) - number
    summary = f"; of {always} more, which nothing goes on without, at each step" if always else ""
    return ProtectionPlan(
        kept, f"{request.preset}: copies of up to {number} of {len(kept)} units within the budget{summary}"
    )


def _auto(request: _Request) -> ProtectionPlan:
    domains = _node_numbers(request.ranks)
    if request.copies < 2 or len(set(domains)) < 2:
        return request.active_only("one node alone keeps no copies")
    step_seconds = _step_seconds(request.ranks)
    own = [0] * len(request.ranks)
    for unit, rank in zip(request.units, request.primaries(), strict=True):
        own[rank] += OWN_VERSIONS * unit.nbytes
    nodes = [
        planning.CopyNode(
            FAILURE,
            domain,
            max(0, info.free_bytes - own_bytes),
            network_seconds=step_seconds if info.network_seconds is None else info.network_seconds,
            host_link_seconds=step_seconds,
        )
        for domain, info, own_bytes in zip(domains, request.ranks, own, strict=True)
    ]
    units = [
        planning.CopyUnit(unit.nbytes, unit.gradient_bytes, list(unit.active), max(unit.tokens, 1.0), unit.replayable)
        for unit in request.units
    ]
    plan = planning.choose_copies(
        units,
        nodes,
        network=_network(request.ranks),
        host_link=DEFAULT_LINK,
        step_seconds=step_seconds,
        copies=request.copies,
        budget=request.budget,
    )
    kept = []
    for unit, rank, choice in zip(request.units, request.primaries(), plan.units, strict=True):
        kind: Kind = "active" if choice.kind in ("active", "uncovered") else choice.kind  # type: ignore[assignment]
        others = tuple(holder.node for holder in choice.holders)
        primary = choice.primary if kind != "active" else rank
        kept.append(UnitProtection(unit.name, kind, primary, others, choice.period))
    return _always_copied(ProtectionPlan(kept, f"auto: {plan.summary}"), request, domains)


def _always_copied(plan: ProtectionPlan, request: _Request, domains: Sequence[int]) -> ProtectionPlan:
    """Snapshots of each step, whatever they cost, of what one node alone has and the rest cannot go on without."""
    nodes = [f"{domain:06d}" for domain in domains]
    active = [unit.active for unit in request.units]
    holders = planning.unit_copy_holders(request.primaries(), active, nodes, request.copies)
    kept = []
    for unit, each, ranks in zip(request.units, plan.units, holders, strict=True):
        is_alone = not unit.may_lag and len({domains[rank] for rank in unit.active}) == 1
        is_late = not each.holders or each.period > 1
        primary, *others = ranks
        kept.append(UnitProtection(unit.name, "snapshot", primary, tuple(others)) if is_alone and is_late else each)
    number = sum(new is not old for new, old in zip(kept, plan.units, strict=True))
    summary = f"; snapshots of {number} more beyond the budget, which nothing goes on without" if number else ""
    return ProtectionPlan(kept, plan.summary + summary)


def survival(
    plan: ProtectionPlan, active: Mapping[str, Sequence[int]], ranks: Sequence[RankInfo]
) -> tuple[float, float]:
    """Probabilities that every unit is left when one node fails, and when two fail at once; all nodes alike.

    Args:
        plan: with all its copies.
        active: by unit, the ranks that train on it.
        ranks: all ranks.

    Example: three nodes, each unit on two of them: (1.0, 0.0) if each pair of nodes shares a unit.
    """
    held = {tuple(sorted({*active[each.unit], *each.holders})) for each in plan.units}
    domains = _node_numbers(ranks)
    nodes = [f"{domain:06d}" for domain in domains]
    found = [
        planning.copy_recovery_probability(sorted(held), failures, nodes=nodes).probability
        if failures < len(set(domains))
        else 0.0
        for failures in (1, 2)
    ]
    return found[0], found[1]


def fatal_losses(holders: Mapping[str, Collection[int]], nodes: Sequence[str]) -> dict[str, int]:
    """Losses of one node, or of two at once, with which units are lost; and of how many units.

        >>> fatal_losses({"a": [0], "b": [0, 1], "c": [1, 2]}, ["x", "y", "z"])
        {'x': 1, 'y + z': 1}

    Args:
        holders: by unit, the ranks that have it.
        nodes: node of each rank; where all are on one, each rank is one of its own (`planning.failure_domains`).

    Returns:
        By the nodes' names, joined by ` + `; one that is lost with a part of the nodes is counted there alone. At most
        `MOST_FATAL`, single nodes first, then those of most units.
    """
    domains = planning.failure_domains(nodes)
    is_alone = len(set(nodes)) == 1
    name = {rank: f"rank {rank}" if is_alone else nodes[rank] for ranks in domains for rank in ranks}
    lost = Counter(frozenset(name[rank] for rank in ranks) for ranks in holders.values())
    single = {node for each in lost if len(each) == 1 for node in each}
    found = [each for each in lost if len(each) == 1 or (len(each) == 2 and not each & single)]
    found.sort(key=lambda each: (len(each), -lost[each], sorted(each)))
    return {" + ".join(sorted(each)): lost[each] for each in found[:MOST_FATAL]}


def _network(ranks: Sequence[RankInfo]) -> Link:
    """The slowest link that was measured."""
    links = [info.link for info in ranks if info.link is not None]
    if not links:
        return DEFAULT_LINK
    return Link(max(alpha for alpha, _ in links), min(beta for _, beta in links))


def _step_seconds(ranks: Sequence[RankInfo]) -> float:
    """Step seconds of the slowest training member; so long that nothing is too slow until all were profiled."""
    steps = [info.step_seconds for info in ranks if info.trains]
    known = [seconds for seconds in steps if seconds is not None]
    return max(known, default=UNKNOWN_SECONDS) if len(known) == len(steps) else UNKNOWN_SECONDS


def _node_numbers(ranks: Sequence[RankInfo]) -> list[int]:
    """Number of each rank's node, as `planning.failure_domains` counts them."""
    found = planning.failure_domains([info.node for info in ranks])
    number = {rank: place for place, ranks in enumerate(found) for rank in ranks}
    return [number[rank] for rank in range(len(ranks))]
