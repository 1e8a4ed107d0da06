"""Who keeps copies of what, and of which kind: each preset's answer, from plain data. The same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evermoe import _native
from evermoe.planning.placement import failure_domains
from evermoe.planning.presets import PresetName
from evermoe.planning.survival import copy_recovery_probability

Kind = Literal["active", "replayed", "snapshot"]
"""Copies in addition to the active holders: none; copies that repeat its steps; or copies of its state."""
OWN_VERSIONS = _native.OWN_VERSIONS
"""Versions of its own snapshots that a rank has room for, page-locked where the state is on a GPU."""
LOGGED_STEPS = _native.LOGGED_STEPS
"""Logged steps in addition to a batch: the newest, which can still be undone, and the one that is voted on."""
LOG_STEPS = _native.LOG_STEPS
"""Gradients that a replica's log has room for: the batch under way, the newest steps, and as many that still travel."""
BATCH_STEPS = _native.BATCH_STEPS
"""Steps that a replica repeats in one pass, at most."""
MAX_PERIOD = _native.MAX_PERIOD
"""Steps between two snapshots of a unit, at most."""
RECORD_BYTES = _native.RECORD_BYTES
"""Bytes that a logged gradient counts for in addition to its own, at most."""
FAILURE = _native.FAILURE
"""Probability that a node fails in a step; the same for all, it only weighs units against each other."""
MAX_FATAL = 32
"""Fatal losses that are named."""


def batch_steps(elements: int) -> int:
    """Return the number of steps of a parameter with `elements` elements that a replica repeats in one pass."""
    return _native.batch_steps(elements)


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
    """Whether the rest can continue with an older version of it, as with an expert's."""


@dataclass(frozen=True)
class RankInfo:
    """Capacity and measurements that a rank reports of itself."""

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
    host_speed: float | None = None
    """Measured bytes per second from its model to host memory; None before a snapshot was made."""

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RankInfo:
        """Return the rank described by fields from JSON, which turns tuples into lists."""
        link = fields["link"]
        return RankInfo(**fields | {"link": None if link is None else (link[0], link[1])})


@dataclass(frozen=True)
class UnitProtection:
    """Protection of one unit in addition to its active holders."""

    unit: str
    kind: Kind
    primary: int
    """The rank that sends, one of the active ones."""
    holders: tuple[int, ...] = ()
    """Ranks that keep copies: for snapshots, of which the primary keeps its own, too, without it."""
    period: int = 1
    """Steps between two versions of a snapshot."""
    own: tuple[int, ...] = ()
    """Ranks that train it and keep snapshots of it in the memory of their own nodes: on `replication` nodes, if as many
    train it. None where `holders` keep snapshots."""


@dataclass(frozen=True)
class ProtectionPlan:
    """Protection of all units."""

    units: list[UnitProtection]
    """In the order in which their first copies are made."""
    summary: str
    """One sentence for the user."""
    by_unit: dict[str, UnitProtection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_unit.update({each.unit: each for each in self.units})

    @property
    def is_late(self) -> bool:
        """Whether copies of a step are made during the next one, and complete at its vote."""
        return any(each.kind == "snapshot" and each.period == 1 for each in self.units)


def plan_protection(
    preset: PresetName,
    units: Sequence[UnitInfo],
    ranks: Sequence[RankInfo],
    *,
    replication: int,
    budget: float,
) -> ProtectionPlan:
    """Return the protection plan of a preset.

    Args:
        preset: a name of `planning.PRESETS`.
        units: all units.
        ranks: all ranks, in their order.
        replication: number of nodes that hold each unit; 0 or 1 for no copies.
        budget: share of a step by which copies may delay it (`auto`).

    Example: two nodes, an expert on each, a router on both, `auto`: each expert is replayed on the other node, the
    router needs nothing.
    """
    kept, summary = _native.plan_protection(
        preset,
        [
            (unit.nbytes, unit.gradient_bytes, list(unit.active), unit.tokens, unit.replayable, unit.may_lag)
            for unit in units
        ],
        [
            (
                info.node,
                max(0, info.free_bytes),
                info.trains,
                info.step_seconds,
                info.network_seconds,
                info.log_bytes,
                info.link,
                info.host_speed,
            )
            for info in ranks
        ],
        replication,
        budget,
    )
    plans = [
        UnitProtection(unit.name, kind, primary, tuple(holders), period, tuple(own))
        for unit, (kind, period, primary, holders, own) in zip(units, kept, strict=True)
    ]
    return ProtectionPlan(plans, summary)


def survival(
    plan: ProtectionPlan, active: Mapping[str, Sequence[int]], ranks: Sequence[RankInfo]
) -> tuple[float, float]:
    """Compute the probabilities that every unit survives the loss of one node and of two, all equally likely.

    Example: three nodes, each unit on two of them: (1.0, 0.0) if each pair of nodes shares a unit.
    """
    held = {tuple(sorted({*active[each.unit], *each.holders})) for each in plan.units}
    domains = _node_numbers([info.node for info in ranks])
    nodes = [f"{domain:06d}" for domain in domains]
    found = [
        copy_recovery_probability(sorted(held), failures, nodes=nodes).probability
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
        By the nodes' names, joined by ` + `; a loss that contains another one is not listed. At most
        `MAX_FATAL`, single nodes first, then those of most units.
    """
    domains = failure_domains(nodes)
    is_alone = len(set(nodes)) == 1
    name = {rank: f"rank {rank}" if is_alone else nodes[rank] for ranks in domains for rank in ranks}
    lost = Counter(frozenset(name[rank] for rank in ranks) for ranks in holders.values())
    single = {node for each in lost if len(each) == 1 for node in each}
    found = [each for each in lost if len(each) == 1 or (len(each) == 2 and not each & single)]
    found.sort(key=lambda each: (len(each), -lost[each], sorted(each)))
    return {" + ".join(sorted(each)): lost[each] for each in found[:MAX_FATAL]}


def riskiest_first(
    holders: Mapping[str, Collection[int]], tokens: Mapping[str, float], nodes: Sequence[str]
) -> list[str]:
    """Sort units in the order in which missing copies are made: those on the fewest nodes come first.

    Of units on as many nodes, those with the most tokens come first; of these, the order is that of their names.

        >>> riskiest_first(
        ...     {"a": [0, 1], "b": [2], "c": [1], "d": [1, 2], "e": [0, 2]},  # b, c and d are on y alone
        ...     {"a": 4.0, "b": 5.0, "c": 9.0, "d": 9.0, "e": 4.0},
        ...     ["x", "y", "y"],
        ... )
        ['c', 'd', 'b', 'a', 'e']

    Args:
        holders: by unit, the ranks that have all of it.
        tokens: by unit, those that it gets in a step.
        nodes: node of each rank; where all are on one, each rank is one of its own (`planning.failure_domains`).
    """
    number = _node_numbers(nodes)
    return sorted(holders, key=lambda unit: (len({number[rank] for rank in holders[unit]}), -tokens[unit], unit))


def _node_numbers(nodes: Sequence[str]) -> list[int]:
    """Number of each rank's node, as `planning.failure_domains` counts them."""
    found = failure_domains(nodes)
    number = {rank: place for place, ranks in enumerate(found) for rank in ranks}
    return [number[rank] for rank in range(len(nodes))]
