"""Protection of each unit by one cost model: active only, replayed, snapshots every n steps, or nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from evermoe import _native
from evermoe.planning._arguments import count, counts, number
from evermoe.planning.schedule import Link, Place
from evermoe.planning.survival import Survival

CopyKind = Literal["active", "replayed", "snapshot", "uncovered"]
CopyReason = Literal[
    "held_actively",
    "idle",
    "gradient_is_smaller",
    "state_is_smaller",
    "not_replayable",
    "replay_has_no_room",
    "snapshot_has_no_room",
    "too_few_domains",
    "no_time",
    "no_memory",
]


class CopyUnit(NamedTuple):
    """A unit that must not be lost."""

    state_bytes: int
    """Bytes of its parameters, master weights and moments."""
    gradient_bytes: int
    """Bytes of its reduced gradient, as it is sent after each step; 0 if it is idle."""
    active: Sequence[int]
    """Nodes that train on it."""
    tokens: float
    """Tokens that it gets in a step, and that are lost with a step."""
    replayable: bool = True
    """Its optimizer is calibrated: it can be replayed to the bit."""


class CopyNode(NamedTuple):
    """A node that may keep copies."""

    failure: float
    """Probability that it fails during a step: seconds of a step over its mean time between failures."""
    domain: int
    """Nodes with the same number fail together, as soon as one of them fails."""
    host_bytes: int
    """Host memory that is free for copies."""
    device_bytes: int = 0
    """Device memory that is free for copies."""
    network_seconds: float = 0.0
    """Idle seconds of its network in a step: the sum of its windows."""
    host_link_seconds: float = 0.0
    """Idle seconds of its host link in a step."""


class Holder(NamedTuple):
    """A node that keeps a copy."""

    node: int
    """Number of the node."""
    place: Place
    """The memory that it uses."""


class UnitChoice(NamedTuple):
    """Protection of one unit."""

    kind: CopyKind
    """Enough domains train on it; copies kept current by gradients; copies of the state; or no copy can be had."""
    period: int
    """Steps from one version to the next; 1 if the copies are always current."""
    primary: int
    """The active node that sends."""
    holders: list[Holder]
    """Nodes that keep copies in addition to the active ones."""
    bytes: int
    """Sent in a step, to all holders together."""
    memory_bytes: int
    """Memory that its copies take on all holders together."""
    covered: bool
    """Every loss of fewer than `replication` domains is survived without a lost step."""
    most_lost_steps: int
    """Steps lost at most if all that hold it actively fail and a copy survives; without copies what the store lags."""
    lost_tokens: float
    """Expected tokens lost in a step."""
    reason: CopyReason
    """Why."""
    summary: str
    """The reason as a sentence."""


class NodeUse(NamedTuple):
    """Resources that the copies take on one node in a step."""

    sent_bytes: int
    """To holders."""
    received_bytes: int
    """Bytes that it receives as a holder."""
    network_seconds: float
    """Seconds of its network, both ways."""
    host_link_seconds: float
    """Seconds of its host link."""
    host_bytes: int
    """Host memory for copies."""
    device_bytes: int
    """Device memory for copies."""


class LossSurvival(NamedTuple):
    """Probability of surviving the loss of `failures` domains, each choice of them equally likely."""

    failures: int
    """Number of domains that fail."""
    without_loss: Survival
    """No unit loses a step."""
    with_loss: Survival
    """Each unit has some copy, perhaps an older one."""


class CopyPlan(NamedTuple):
    """The choices for all units, and what they amount to."""

    units: list[UnitChoice]
    """One for each unit."""
    nodes: list[NodeUse]
    """One for each node."""
    delay_seconds: float
    """Seconds by which the slowest node delays a step."""
    lost_tokens: float
    """Expected tokens lost in a step, over all units."""
    survival: list[LossSurvival]
    """For 1 to `replication` failed domains."""
    summary: str
    """One sentence."""


def choose_copies(
    units: Sequence[CopyUnit],
    nodes: Sequence[CopyNode],
    *,
    network: Link,
    host_link: Link,
    step_seconds: float,
    replication: int = 2,
    budget: float = 0.01,
    max_period: int = 64,
    persist_period: int = 1000,
    log_steps: int = 8,
) -> CopyPlan:
    """Return the cheapest way to keep each unit safe, within idle windows, memory and a budget.

    Wanted is that every loss of fewer than `replication` domains costs no step. A unit that fewer domains train on gets
    on further domains what takes the fewest seconds: the gradient of each step, nothing if it is idle, or its
    state. Where not all fit, expected lost tokens (probability that all current holders fail in a step, times tokens,
    times steps lost) are made small: greedily by tokens saved for a second of links, then by exchanges of pairs.

    A transfer takes `alpha + bytes / beta` seconds of the network at both ends and, once for all holders, of the
    sender's host link. A replayed copy takes the state and `log_steps` gradients, in host memory or else over the
    holder's host link in device memory; a snapshot, sent in `period` parts, takes the state twice in host memory.

        >>> nodes = [CopyNode(1e-4, domain, 4000, network_seconds=0.08, host_link_seconds=0.2) for domain in range(3)]
        >>> units = [
        ...     CopyUnit(1200, 200, active=[0, 1], tokens=64),
        ...     CopyUnit(1200, 200, active=[0], tokens=64),  # 200 bytes a step: 0.02 s
        ...     CopyUnit(1200, 200, active=[2], tokens=64, replayable=False),  # 0.12 s: too much
        ... ]
        >>> plan = choose_copies(units, nodes, network=Link(0, 1e4), host_link=Link(0, 1e5), step_seconds=1.0)
        >>> [(unit.kind, unit.period, unit.bytes) for unit in plan.units]
        [('active', 1, 0), ('replayed', 1, 200), ('snapshot', 2, 600)]
        >>> plan.units[2].summary
        'windows and budget of node 2 are used up'

    Args:
        units: what must not be lost.
        nodes: who may keep copies.
        network: between nodes; alpha seconds, beta bytes a second.
        host_link: between the device and host memory of a node.
        step_seconds: of a step.
        replication: domains that are to hold each unit at the current step, the active ones included.
        budget: share of a step by which copies may delay it, beyond the windows.
        max_period: steps between two snapshots of a unit at most, up to 4096.
        persist_period: steps between two persisted versions: what is lost where no copy survives.
        log_steps: gradients that a replayed copy keeps before it applies them.

    Raises:
        ValueError: naming the argument, the unit or the node.
    """
    found = _native.choose_copies(
        [_unit_row(index, unit) for index, unit in enumerate(units)],
        [_node_row(index, node) for index, node in enumerate(nodes)],
        (number("network.alpha", network.alpha), number("network.beta", network.beta)),
        (number("host_link.alpha", host_link.alpha), number("host_link.beta", host_link.beta)),
        number("step_seconds", step_seconds),
        count("replication", replication),
        number("budget", budget),
        count("max_period", max_period),
        count("persist_period", persist_period),
        count("log_steps", log_steps),
    )
    choices, uses, delay, lost, survival, summary = found
    return CopyPlan(
        [UnitChoice(*row[:3], [Holder(*holder) for holder in row[3]], *row[4:]) for row in choices],  # type: ignore[arg-type]
        [NodeUse(*row) for row in uses],
        delay,
        lost,
        [LossSurvival(failures, Survival(*without), Survival(*with_)) for failures, without, with_ in survival],
        summary,
    )


def _unit_row(index: int, unit: CopyUnit) -> tuple[int, int, list[int], float, bool]:
    name = f"units[{index}]"
    return (
        count(f"{name}.state_bytes", unit.state_bytes),
        count(f"{name}.gradient_bytes", unit.gradient_bytes),
        counts(f"{name}.active", unit.active),
        number(f"{name}.tokens", unit.tokens),
        bool(unit.replayable),
    )


def _node_row(index: int, node: CopyNode) -> tuple[float, int, int, int, float, float]:
    name = f"nodes[{index}]"
    return (
        number(f"{name}.failure", node.failure),
        count(f"{name}.domain", node.domain),
        count(f"{name}.host_bytes", node.host_bytes),
        count(f"{name}.device_bytes", node.device_bytes),
        number(f"{name}.network_seconds", node.network_seconds),
        number(f"{name}.host_link_seconds", node.host_link_seconds),
    )
