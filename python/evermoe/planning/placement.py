"""Replicas by load, and which node holds which expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, choice, count, count_lists
from evermoe.process.warn import warn

PlacementPolicy = Literal["balanced", "safest", "mro", "spread", "compact"]
POLICIES: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)
"""Policies of `place`."""


class FewerReplicas(UserWarning):
    """There are too few slots for the replicas that every expert was to have."""


@dataclass(frozen=True)
class Reason:
    """Why a placement was chosen; `str` says it in words."""

    construction: str
    """The construction that won."""
    failures: int
    """Simultaneous losses of nodes, or of domains, at which survival was weighed."""
    survival: float
    """Part of these losses that leave every expert a replica."""
    spread: int
    """Distinct failure domains that every expert is on, at least: any smaller number of losses is survived."""
    imbalance: float
    """Load of the busiest node over the mean, with an even split of each expert's tokens."""
    least_imbalance: float
    """Lower bound for any placement of the same replicas, 1 or more, by slots of a node and load of a replica."""
    moved: int | None
    """(node, expert) pairs that are new since `previous`, if that was given."""
    summary: str

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class Placement:
    """Experts that each node holds, and the reason."""

    matrix: NDArray[np.int64]
    """[N, E] replicas of each expert on each node."""
    reason: Reason


def allocate(
    load: ArrayLike, nodes: int, slots: int, min_replicas: int = 2, previous: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Compute the replicas of each expert for its load (Lazarus Eq. 1); they sum to `nodes * slots`.

    Experts ascending by load each take their part of the slots that are left, at least `min_replicas`. Where
    `E * min_replicas` is more than there are slots, each gets at least what all can have, and a
    `FewerReplicas` warning says so. With no load at all every expert counts the same. A hot expert can get more
    replicas than there are nodes: several of them on one node are a larger share of its tokens on that node.

        >>> allocate([10, 20, 40, 10], nodes=4, slots=2, min_replicas=1)
        array([1, 2, 4, 1])
        >>> allocate([10, 10, 80], nodes=2, slots=3, min_replicas=1)
        array([1, 1, 4])

    With `previous` as few of these change as needed: the busiest expert gets replicas one by one, from those that lose
    least by it, until no replica has more than 1.05 / 0.95 times the tokens of the busiest without `previous`. So a
    drift of all loads by 5 %, up or down, changes hardly any. Where they do not fill the slots, as when nodes come or
    go, `previous` does not count.

        >>> allocate([21, 19, 20], nodes=4, slots=2, min_replicas=1)
        array([4, 2, 2])
        >>> allocate([21, 19, 20], nodes=4, slots=2, min_replicas=1, previous=[2, 3, 3])
        array([2, 3, 3])

    Args:
        load: [E] tokens, or any measure of work; finite, 0 or more.
        nodes: number of nodes N.
        slots: replicas that each node holds.
        min_replicas: replicas that every expert should have, to survive `min_replicas - 1` losses.
        previous: [E] replicas now.

    Returns:
        [E] int64.

    Raises:
        ValueError: fewer slots than experts, a load that is negative or not finite, or another number of previous ones.
    """
    load_E = array("load", load, np.float64, 1)
    replicas_E = _native.allocate(
        load_E,
        count("nodes", nodes),
        count("slots", slots),
        count("min_replicas", min_replicas),
        None if previous is None else array("previous", previous, np.int64, 1),
    )
    fewest = replicas_E.min()
    if fewest < min(min_replicas, nodes):
        warn(
            f"min_replicas: {len(load_E)} experts × {min_replicas} do not fit in {nodes} nodes × {slots} slots = "
            f"{nodes * slots}; every expert has at least {fewest}, so {fewest} losses at once can take one",
            FewerReplicas,
        )
    return replicas_E


def place(
    replicas: ArrayLike,
    nodes: int,
    slots: int,
    policy: PlacementPolicy = "balanced",
    load: ArrayLike | None = None,
    previous: ArrayLike | None = None,
    domains: Sequence[Sequence[int]] | None = None,
    failures: int | None = None,
) -> Placement:
    """Place the replicas of experts on nodes.

    Every node gets exactly `slots` replicas. With `safest` and `balanced` every expert is on at least min(f, N)
    distinct nodes, where f is the fewest replicas of any expert; `balanced` puts it on as many as it has replicas
    (on all, evenly, if it has more), but where another policy is safer or more even. With `domains`, exchanges
    take it to min(f, domains) distinct ones where they can: `reason.spread` says what they reached.

        >>> previous = [[0, 0, 0], [1, 0, 1], [1, 1, 0]]  # node 0 is new
        >>> placement = place([3, 2, 1], nodes=3, slots=2, previous=previous)
        >>> placement.matrix
        array([[1, 1, 0],
               [1, 0, 1],
               [1, 1, 0]])
        >>> placement.reason.moved
        2

    Args:
        replicas: [E] from `allocate`; they sum to `nodes * slots`.
        nodes: number of nodes N.
        slots: replicas that each node holds.
        policy: one of

            - `mro`: Lazarus' maximum rank overlap, as printed; with `domains` it is that of domains, whose replicas
              are then dealt to their nodes. Its optimality (Theorem 1) fails where the last group is cut by the
              number of nodes, and it leaves groups of cold experts idle.
            - `spread`: replicas in the order of the experts, dealt to the nodes in turn, or to the domains.
            - `compact`: replicas in the order of the experts, node after node.
            - `safest`: the most survival at `failures` losses; never less than these three, where they have every
              expert on as many domains as all can have. Where all placements were enumerated (up to 5 experts on
              5 nodes, no domains), none had more. Of equally safe candidates it takes the one with the fewest
              replicas that are new since `previous`.
            - `balanced`: the most even within 5 points of the survival of `mro` and `spread` at `failures`
              losses, where the better of them survives at least half; below that no placement protects, and
              evenness alone decides. Without `previous` no other policy's placement is better on both evenness
                and survival, at `failures` losses or at one more, unless an expert is on fewer domains; with
              more than 4,096 (node, expert) pairs a percent of evenness does not count. With `previous`, one that
              moves little, if no node has more than 1.05 times the mean load or little more than it must; where
              more than 15 % of the replicas would move, `previous` itself up to 1.05 / 0.95 times that load, by which a
                drift of all loads by 5 % can raise it.
        load: [E] tokens, or any measure of work; without it every replica counts the same.
        previous: [N, E] replicas that each of these nodes holds now; zero rows for new nodes.
        domains: lists of nodes that fail together (a rack, a switch); a node in none fails alone.
        failures: simultaneous losses, of domains, at which survival is weighed. Default: the fewest replicas
            of any expert, as far as small domains have room for all experts; for `balanced` at least 2.

    Raises:
        ValueError: replicas that do not fill the slots, an expert without one, loads that are none, shapes that
            do not fit, domains that overlap, failures beyond the number of domains.
    """
    replicas_E = array("replicas", replicas, np.int64, 1)
    load_E = None if load is None else array("load", load, np.float64, 1)
    previous_NE = None if previous is None else array("previous", previous, np.int64, 2)
    matrix_NE, reason = _native.place(
        replicas_E,
        count("nodes", nodes),
        count("slots", slots),
        choice("policy", policy, POLICIES),
        load_E,
        previous_NE,
        None if domains is None else count_lists("domains", domains),
        None if failures is None else count("failures", failures),
    )
    return Placement(matrix_NE, Reason(*reason))


def failure_domains(nodes: Sequence[str]) -> list[list[int]]:
    """Group ranks by node, in order of first appearance: ranks of a node fail together.

    On a single node every rank counts as one, as copies then protect against crashes alone.

        >>> failure_domains(["a", "b", "a"]), failure_domains(["a", "a"])
        ([[0, 2], [1]], [[0], [1]])
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    return list(ranks_of.values()) if len(ranks_of) > 1 else [[rank] for rank in range(len(nodes))]


def spread_over(nodes: Sequence[str], domains: Sequence[str], replication: int) -> list[str]:
    """By rank, the name of what copies are spread over: the largest domains of which there are enough, or nodes.

        >>> nodes, domains = ["a", "b", "c", "d"], ["east/r1", "east/r1", "east/r2", "east/r3"]
        >>> spread_over(nodes, domains, replication=2)  # there is one zone, and there are three racks
        ['east/r1', 'east/r1', 'east/r2', 'east/r3']
        >>> spread_over(nodes, domains, replication=4)
        ['a', 'b', 'c', 'd']

    Args:
        nodes: name of the node of each rank.
        domains: of each rank, what its node is in, from the largest to the smallest, with slashes; empty where that is
            unknown, and then nodes count. Ranks of a node have the domain of the first of them.
        replication: nodes that are to hold each unit.
    """
    of_node: dict[str, list[str]] = {}
    for node, domain in zip(nodes, domains, strict=True):
        of_node.setdefault(node, domain.split("/") if domain else [])
    levels = min(map(len, of_node.values()), default=0)
    for level in range(1, levels + 1):
        names = ["/".join(of_node[node][:level]) for node in nodes]
        if len(set(names)) >= max(2, replication):
            return names
    return list(nodes)


def session_slots(experts: int, domain_sizes: Sequence[int], slots: int | None, replicas: int) -> int:
    """Compute the replicas of experts of a layer that each rank of a session holds: as asked, but all experts fit.

    By default one more than the fewest, or enough for all wanted replicas. Nodes of different sizes
    need more: each expert is to be on `replicas` of them, or on all.

        >>> session_slots(8, [1, 1, 1, 1], None, 1), session_slots(8, [1, 1, 1, 1], None, 2)
        (3, 4)

    Raises:
        ValueError: more than 2^24 experts, ranks or slots.
    """
    return _native.session_slots(experts, list(domain_sizes), slots, replicas)


def place_layer(
    load_E: NDArray[np.float64],
    previous_RE: NDArray[np.int64],
    nodes: Sequence[str],
    slots: int | None,
    replicas: int,
    policy: PlacementPolicy,
    failures: int | None = None,
    spread: Sequence[str] | None = None,
) -> NDArray[np.int64]:
    """Return where a session places a layer: [R, E] replicas of each expert on each rank. May warn: `FewerReplicas`.

    Replicas are spread over the domains `spread`, by rank, or over nodes. `slots`: None for those of `session_slots`.
    """
    domains = failure_domains(nodes if spread is None else spread)
    slots = session_slots(len(load_E), [len(ranks) for ranks in failure_domains(nodes)], slots, replicas)
    counts = allocate(load_E, len(nodes), slots, replicas, previous_RE.sum(axis=0))
    failures = failures and min(failures, max(1, len(domains) - 1))
    return place(counts, len(nodes), slots, policy, load_E, previous_RE, domains, failures).matrix


def is_worth_moving(now: float, then: float) -> bool:
    """Return whether a new placement balances a layer enough to justify moving experts.

        >>> is_worth_moving(1.3, 1.1), is_worth_moving(1.3, 1.25)
        (True, False)

    Args:
        now: load of the busiest rank over the mean.
        then: the same with the new placement.
    """
    return _native.is_worth_moving(now, then)
