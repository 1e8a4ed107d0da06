"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N ranks. A wrong argument is a ValueError that names it; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe._native import RecoveryPlan

__all__ = [
    "RecoveryPlan",
    "allocate",
    "copy_holders",
    "place",
    "primaries",
    "recovery_plan",
    "split_tokens",
    "unit_copy_holders",
]


def allocate(load: ArrayLike, ranks: int, slots: int, min_replicas: int = 2) -> NDArray[np.int64]:
    """Replicas of each expert for its load (Lazarus Eq. 1); they sum to `ranks * slots`.

    Experts ascending by load each take their part of the slots that are left, at least `min_replicas`, which
    is lowered toward 1 when there are too few slots. With no load at all every expert counts the same. An
    expert gets more replicas than ranks only if all do.

        >>> allocate([10, 20, 40, 10], ranks=4, slots=2, min_replicas=1)
        array([1, 2, 4, 1])

    Args:
        load: [E] tokens, or any measure of work; finite, 0 or more.
        ranks: number of ranks N.
        slots: replicas that each rank holds.
        min_replicas: replicas that every expert should have, to survive `min_replicas - 1` losses.

    Returns:
        [E] int64.
    """
    load_E = _array("load", load, np.float64, 1)
    return _native.allocate(
        load_E, _count("ranks", ranks), _count("slots", slots), _count("min_replicas", min_replicas)
    )


def place(replicas: ArrayLike, ranks: int, slots: int, previous: ArrayLike | None = None) -> NDArray[np.int64]:
    """Which rank holds which expert: full ranks, the widest spread, the fewest fetches.

    Every rank gets exactly `slots` replicas and every expert `min(replicas, ranks)` distinct ranks; several
    replicas of one expert on one rank are a larger share of its tokens. Among all such placements the fewest
    (rank, expert) pairs are new since `previous`.

        >>> place([3, 2, 1], ranks=3, slots=2, previous=[[0, 0, 0], [1, 0, 1], [1, 1, 0]])
        array([[1, 1, 0],
               [1, 0, 1],
               [1, 1, 0]])

    Args:
        replicas: [E] from `allocate`; they sum to `ranks * slots`.
        ranks: number of ranks N.
        slots: replicas that each rank holds.
        previous: [N, E] replicas that each of these ranks holds now; zero rows for new ranks.

    Returns:
        [N, E] int64, replicas of each expert on each rank.
    """
    replicas_E = _array("replicas", replicas, np.int64, 1)
    previous_NE = None if previous is None else _array("previous", previous, np.int64, 2)
    return _native.place(replicas_E, _count("ranks", ranks), _count("slots", slots), previous_NE)


def split_tokens(tokens: ArrayLike, matrix: ArrayLike, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What `rank` sends and receives when tokens are split over the holders of their expert.

    Lazarus Algorithm 1: with t tokens and r replicas of an expert, a rank with R replicas has room for t * R
    / r of them. Its own stay there as far as they fit; the rest goes to the others in proportion to the room
    they have left. In whole tokens: none is lost, only holders get any, and every number is the floor or
    ceiling of its exact share.

        >>> send, receive = split_tokens([[4, 0]], [[1], [1]], rank=0)  # one expert, on both of two ranks
        >>> send, receive
        (array([[2, 2]]), array([[2],
               [0]]))

    Args:
        tokens: [E, N] tokens of each expert on each rank, gathered from all ranks.
        matrix: [N, E] replicas of each expert on each rank, from `place`.
        rank: whose part to return.

    Returns:
        send [E, N], tokens of each expert that go to each rank, and receive [N, E], tokens of each
        expert that come from each rank; int64.
    """
    tokens_EN = _array("tokens", tokens, np.int64, 2)
    matrix_NE = _array("matrix", matrix, np.int64, 2)
    return _native.split_tokens(tokens_EN, matrix_NE, _count("rank", rank))


def copy_holders(nodes: Sequence[str], copies: int) -> list[list[int]]:
    """For each rank, the ranks that keep copies of what it is primary for, itself first.

    Gemini's group placement: nodes sorted by name form groups of `copies`, the last ones a ring if their
    number does not divide; copies go to the next nodes of the group or ring. The ranks of a single node copy
    to each other.

        >>> copy_holders(["a", "b", "c", "d", "e"], copies=2)
        [[0, 1], [1, 0], [2, 3], [3, 4], [4, 2]]

    Args:
        nodes: name of the node of each rank.
        copies: how many, the rank's own included; fewer where there are fewer nodes.
    """
    return _native.copy_holders(list(nodes), _count("copies", copies))


def primaries(holders: Sequence[Sequence[int]], nbytes: Sequence[int], ranks: int) -> list[int]:
    """For each unit, the rank that makes its copies.

    Largest units first, each to the holder with the fewest bytes so far.

        >>> primaries([[0, 1], [0, 1], [0, 1]], [2, 5, 2], ranks=2)
        [1, 0, 1]

    Args:
        holders: for each unit, the ranks that hold it in the running model.
        nbytes: size of each unit.
        ranks: number of ranks.
    """
    holder_lists = [[_count("holders", rank) for rank in unit] for unit in holders]
    sizes = [_count("nbytes", size) for size in nbytes]
    return _native.primaries(holder_lists, sizes, _count("ranks", ranks))


def unit_copy_holders(
    primaries: Sequence[int], active: Sequence[Sequence[int]], nodes: Sequence[str], copies: int
) -> list[list[int]]:
    """For each unit, the ranks that keep its copies: its primary, then `copies - 1` others.

    The others are the primary's partners of `copy_holders`; a partner on a node that trains on the unit anyway
    gives way to the next rank whose node does not, so that each copy protects against one more loss.

        >>> unit_copy_holders([2, 0], [[2, 3], [0]], ["a", "b", "c", "d"], copies=2)
        [[2, 0], [0, 1]]

    Args:
        primaries: for each unit, the rank that makes its copies, from `primaries`.
        active: for each unit, the ranks that hold it in the running model.
        nodes: name of the node of each rank.
        copies: how many, the primary's own included; fewer where there are fewer nodes.
    """
    return _native.unit_copy_holders(
        list(primaries), [list(ranks) for ranks in active], list(nodes), _count("copies", copies)
    )


def recovery_plan(
    units: Sequence[tuple[str, int]],
    holdings: Sequence[Sequence[tuple[str, int, int, str]]],
    needs: Sequence[Sequence[str]],
) -> RecoveryPlan:
    """The version to continue from after a failure, and who sends what to whom.

    The target is the newest version at which every unit has a holder; version 0, the state before the first
    step, counts only if nobody has a later one. Where holders differ, the digest that most ranks have is
    right; who was outvoted is listed in `conflicts`, sends nothing, and fetches what it needs. A rank takes a
    unit from its running model, else from its own snapshot (`source == destination`), else from the holder
    with the fewest bytes to send.

        >>> full = [("w", 5, 7, "active"), ("x", 5, 8, "active")]
        >>> plan = recovery_plan([("w", 64), ("x", 64)], [full, []], [["w"], ["x"]])
        >>> plan.version, plan.transfers
        (5, [('x', 0, 1, 'active')])

    Args:
        units: (name, bytes) of every unit of the model.
        holdings: for each rank, (unit, version, digest, "active" or "snapshot") of all that it has.
        needs: for each rank, the units that it is to run.
    """
    sized = [(name, _count("units", size)) for name, size in units]
    held = [
        [(name, _count("holdings", version), _count("holdings", digest), kind) for name, version, digest, kind in rank]
        for rank in holdings
    ]
    return _native.recovery_plan(sized, held, [list(rank) for rank in needs])


def _count(name: str, value: int) -> int:
    """The value as an int from 0 to 2^64 - 1, which is what the native functions take."""
    number = value.__index__()
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: expected an integer from 0 to 2^64 - 1, got {value}")
    return number


def _array(name: str, value: ArrayLike, dtype: Any, ndim: int) -> NDArray[Any]:
    """The value as an array of `dtype`, without a copy if it is one; floats do not become integers."""
    array = np.asarray(value)
    if array.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(array.shape)}")
    if array.dtype == dtype:
        return array
    if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: expected {np.dtype(dtype)}, got {array.dtype}")
    return array.astype(dtype)
