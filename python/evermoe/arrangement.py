"""Who keeps copies of what, and of which kind: each preset's answer, from plain data. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from evermoe import planning
from evermoe.planning.schedule import Link

Kind = Literal["active", "replayed", "snapshot"]
"""Beside its active holders a unit has no copies; copies that repeat its steps; or copies of its state."""

ALPHA_SECONDS = 50e-6
"""Of a message, until a profile says better."""
LOGGED_STEPS = 2
"""For which a log needs room: the newest, which can still be undone, and the one that is voted on."""
RECORD_BYTES = 256
"""What a logged gradient counts for beside its bytes, at most."""
FAILURE = 1e-4
"""Probability that a node fails in a step; the same for all, it only weighs units against each other."""
UNKNOWN_SECONDS = 1e6
"""Of a step that was not profiled yet."""
BYTES_PER_SECOND = 1e9
"""Of the network, until a profile says better."""


@dataclass(frozen=True)
class Subject:
    """A unit that is to be kept safe."""

    name: str
    nbytes: int
    gradient_bytes: int
    active: tuple[int, ...]
    """Ranks that train on it."""
    tokens: float = 0.0
    """That it gets in a step."""
    replayable: bool = False


@dataclass(frozen=True)
class Member:
    """What a rank offers, as it says itself."""

    node: str
    """Ranks of one node fail together, if there are several nodes."""
    free_bytes: int
    """Host memory."""
    trains: bool = True
    """False for a replica node, which then keeps what is not trained on several nodes."""
    step_seconds: float | None = None
    """None before a profile was made."""
    network_seconds: float | None = None
    """Idle seconds of its network in a step."""
    log_bytes: int = 1 << 62
    """Of its log of gradients, for the units that it keeps by repeating their steps."""


@dataclass(frozen=True)
class Kept:
    """How one unit is kept safe beside its active holders."""

    unit: str
    kind: Kind
    primary: int
    """The rank that sends, one of the active ones."""
    holders: tuple[int, ...] = ()
    """Ranks that keep copies: for snapshots, of which the primary keeps its own, too, without it."""
    period: int = 1
    """Steps between two versions of a snapshot."""


@dataclass(frozen=True)
class Arrangement:
    """All units."""

    kept: list[Kept]
    words: str
    """One sentence for the user."""
    by_unit: dict[str, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_unit.update({each.unit: each for each in self.kept})


@dataclass(frozen=True)
class _Asked:
    """What is to be arranged."""

    preset: planning.PresetName
    subjects: Sequence[Subject]
    members: Sequence[Member]
    copies: int
    budget: float

    def primaries(self) -> list[int]:
        """The rank that sends each unit: one that trains it, so that all have as many bytes to send as can be."""
        units = self.subjects
        return planning.primaries([unit.active for unit in units], [unit.nbytes for unit in units], len(self.members))

    def active_only(self, words: str) -> Arrangement:
        """No copies beside the active ones."""
        pairs = zip(self.subjects, self.primaries(), strict=True)
        return Arrangement([Kept(subject.name, "active", rank) for subject, rank in pairs], f"{self.preset}: {words}")


def arrange(
    preset: planning.PresetName,
    subjects: Sequence[Subject],
    members: Sequence[Member],
    *,
    copies: int,
    budget: float,
) -> Arrangement:
    """The arrangement of a preset.

    Args:
        preset: a name of `planning.PRESETS`.
        subjects: all units.
        members: by rank.
        copies: nodes that are to hold each unit; 0 or 1 for no copies.
        budget: share of a step by which copies may delay it (`auto`).

    Example: two nodes, an expert on each, a router on both, `auto`: each expert is replayed on the other node, the
    router needs nothing.
    """
    asked = _Asked(preset, subjects, members, copies, budget)
    arrangement = _use_replica_nodes(_arrange(asked), asked)
    return _within_logs(arrangement, asked) if preset == "auto" else arrangement


def _arrange(asked: _Asked) -> Arrangement:
    placement = planning.PRESETS[asked.preset].copy_placement
    if asked.preset == "auto":
        return _auto(asked)
    if placement == "none" or asked.copies < 2:
        return asked.active_only("no copies beside the active ones")
    return _uncovered_only(asked) if placement == "training" else _everything(asked)


def _use_replica_nodes(arrangement: Arrangement, asked: _Asked) -> Arrangement:
    """Copies go to replica nodes where there are some: evenly, and to others if one would be the sender's own node."""
    replicas = [rank for rank, member in enumerate(asked.members) if not member.trains]
    if not replicas:
        return arrangement
    load = dict.fromkeys(replicas, 0)
    kept = []
    for subject, each in zip(asked.subjects, arrangement.kept, strict=True):
        chosen = sorted(replicas, key=lambda rank: (load[rank], rank))[: len(each.holders)]
        for rank in chosen:
            load[rank] += subject.nbytes
        others = [rank for rank in each.holders if rank not in chosen]
        holders = (*chosen, *others)[: len(each.holders)]
        kept.append(Kept(each.unit, each.kind, each.primary, holders, each.period))
    return Arrangement(kept, arrangement.words)


def _within_logs(arrangement: Arrangement, asked: _Asked) -> Arrangement:
    """Snapshots of each step instead, of units whose gradients do not fit into the logs of their holders."""
    room = [member.log_bytes for member in asked.members]
    kept = []
    for subject, each in zip(asked.subjects, arrangement.kept, strict=True):
        nbytes = LOGGED_STEPS * (subject.gradient_bytes + RECORD_BYTES)
        if each.kind == "replayed" and any(room[holder] < nbytes for holder in each.holders):
            kept.append(Kept(each.unit, "snapshot", each.primary, each.holders))
            continue
        if each.kind == "replayed":
            for holder in each.holders:
                room[holder] -= nbytes
        kept.append(each)
    number = sum(new is not old for new, old in zip(kept, arrangement.kept, strict=True))
    words = f"; snapshots of {number} more, whose gradients are too large for replay_log_bytes" if number else ""
    return Arrangement(kept, arrangement.words + words)


def _everything(asked: _Asked) -> Arrangement:
    """Gemini and BAFT: snapshots of all units; each unit is sent by one of the ranks that have it."""
    nodes, primaries = [member.node for member in asked.members], asked.primaries()
    if asked.preset == "baft":
        previous = planning.copy_holders(nodes, asked.copies, policy="ring")
        # The ring's next node keeps a rank's copies; BAFT's previous stage is the ring the other way round.
        keepers = {holder: rank for rank, ranks in enumerate(previous) for holder in ranks[1:2]}
        others: list[tuple[int, ...]] = [(keepers[rank],) if rank in keepers else () for rank in primaries]
    else:
        active = [subject.active for subject in asked.subjects]
        others = [tuple(ranks[1:]) for ranks in planning.unit_copy_holders(primaries, active, nodes, asked.copies)]
    kept = [
        Kept(subject.name, "snapshot", rank, holders)
        for subject, rank, holders in zip(asked.subjects, primaries, others, strict=True)
    ]
    sent = sum(subject.nbytes * len(each.holders) for subject, each in zip(asked.subjects, kept, strict=True))
    words = f"{asked.preset}: snapshots of all {len(kept)} units, {sent / 1e6:.1f} MB to peers each step"
    return Arrangement(kept, words)


def _uncovered_only(asked: _Asked) -> Arrangement:
    """MoEtion: copies of what no peer holds already, replayed where that is exact."""
    domains, primaries = _domains(asked.members), asked.primaries()
    nodes = [f"{domain:06d}" for domain in domains]
    active = [subject.active for subject in asked.subjects]
    holders = planning.unit_copy_holders(primaries, active, nodes, asked.copies)
    kept = []
    for subject, rank, ranks in zip(asked.subjects, primaries, holders, strict=True):
        is_safe = len({domains[r] for r in subject.active}) >= min(asked.copies, len(set(domains)))
        others = () if is_safe else tuple(ranks[1:])
        kept.append(Kept(subject.name, "active" if not others else "replayed", rank, others))
    number = sum(each.kind == "replayed" for each in kept)
    return Arrangement(kept, f"{asked.preset}: copies of up to {number} of {len(kept)} units within the budget")


def _auto(asked: _Asked) -> Arrangement:
    domains = _domains(asked.members)
    if asked.copies < 2 or len(set(domains)) < 2:
        return asked.active_only("one node alone keeps no copies")
    step_seconds = _step_seconds(asked.members)
    nodes = [
        planning.CopyNode(
            FAILURE,
            domain,
            member.free_bytes,
            network_seconds=step_seconds if member.network_seconds is None else member.network_seconds,
            host_link_seconds=step_seconds,
        )
        for domain, member in zip(domains, asked.members, strict=True)
    ]
    units = [
        planning.CopyUnit(
            subject.nbytes, subject.gradient_bytes, list(subject.active), max(subject.tokens, 1.0), subject.replayable
        )
        for subject in asked.subjects
    ]
    link = Link(ALPHA_SECONDS, BYTES_PER_SECOND)
    plan = planning.choose_copies(
        units,
        nodes,
        network=link,
        host_link=link,
        step_seconds=step_seconds,
        copies=asked.copies,
        budget=asked.budget,
    )
    kept = []
    for subject, rank, choice in zip(asked.subjects, asked.primaries(), plan.units, strict=True):
        kind: Kind = "active" if choice.kind in ("active", "uncovered") else choice.kind  # type: ignore[assignment]
        others = tuple(holder.node for holder in choice.holders)
        sender = choice.sender if kind != "active" else rank
        kept.append(Kept(subject.name, kind, sender, others, choice.period))
    return Arrangement(kept, f"auto: {plan.summary}")


def _step_seconds(members: Sequence[Member]) -> float:
    """Of the slowest member that trains; before all have been profiled, so long that nothing is too slow."""
    steps = [member.step_seconds for member in members if member.trains]
    known = [seconds for seconds in steps if seconds is not None]
    return max(known, default=UNKNOWN_SECONDS) if len(known) == len(steps) else UNKNOWN_SECONDS


def _domains(members: Sequence[Member]) -> list[int]:
    """Number of each rank's node; on a single node every rank counts as one, as copies then help against crashes."""
    names = sorted({member.node for member in members})
    if len(names) == 1:
        return list(range(len(members)))
    return [names.index(member.node) for member in members]
