"""Moves from one placement to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count_lists


@dataclass(frozen=True)
class Migration:
    """Plan that leads from one placement to another."""

    node_map: list[int]
    """The node that takes each row of the new placement, all different."""
    transfers: list[tuple[int, int, int, int]]
    """(expert, source node, destination node, bytes), largest first."""
    nbytes: int
    """Bytes of all transfers."""


def migrate(
    old: ArrayLike, new: ArrayLike, nbytes: ArrayLike, domains: Sequence[Sequence[int]] | None = None
) -> Migration:
    """Assign rows of a new placement to nodes so that the fewest bytes move, and plan the transfers.

    Lazarus numbers the rows of a new placement freely; only here do they become nodes. Up to 512 nodes no
    assignment moves fewer bytes, and of those that move as few this is one with the most rows on the node of
    the same number: what can stay in order does. With more nodes the pairs with the most bytes in common go
    first, and no more moves than in the assignment by number. Every transfer, largest first, comes from the
    holder with the fewest bytes to send so far.

    With `domains`, the rows of nodes that fail together stay together: domains of one size exchange all their rows,
    and nodes within a domain theirs, so that what a placement survives stays the same. With more than 512 nodes
    each domain keeps its own rows.

        >>> old = [[1, 0], [0, 1], [0, 0]]  # node 0 holds expert 0, node 1 expert 1, node 2 joins
        >>> plan = migrate(old, new=[[0, 1], [1, 0], [1, 1]], nbytes=[64, 80])
        >>> plan.node_map, plan.nbytes
        ([1, 0, 2], 144)
        >>> plan.transfers
        [(1, 1, 2, 80), (0, 0, 2, 64)]
        >>> swapped = [[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
        >>> migrate(np.eye(4, dtype=int), swapped, nbytes=[8] * 4, domains=[[0, 1], [2, 3]]).node_map
        [3, 2, 1, 0]
        >>> migrate(np.eye(4, dtype=int), swapped, nbytes=[8] * 4, domains=[[0, 1, 2]]).node_map  # 3 stays alone
        [0, 2, 1, 3]

    Args:
        old: [N, E] replicas of each expert that each node holds now; zero rows for nodes that join, no rows
            for those that died.
        new: [M, E] replicas that each row is to hold, M <= N; nodes that get no row leave.
        nbytes: [E] size of each expert.
        domains: lists of nodes that fail together, as `place` had them for `new`, M = N; a node in none fails alone.

    Raises:
        ValueError: shapes that do not fit, negative numbers, more rows in new than in old, or an expert that
            new needs and no node of old holds.
    """
    old_NE = array("old", old, np.int64, 2)
    new_ME = array("new", new, np.int64, 2)
    groups = None if domains is None else count_lists("domains", domains)
    return Migration(*_native.migrate(old_NE, new_ME, array("nbytes", nbytes, np.int64, 1), groups))


def keep_in_place(
    held: ArrayLike, placement: ArrayLike, nbytes: ArrayLike, domains: Sequence[Sequence[int]]
) -> NDArray[np.int64]:
    """Return a layer's placement with rows assigned to ranks such that the fewest bytes move between them.

    What each node's ranks hold together stays together, so that the loss of a node costs what it did.

    Args:
        held: [R, E] whether a rank has the expert's bytes in memory, trained or as a copy.
        placement: [R, E] replicas of each expert on each rank.
        nbytes: [E] size of each expert.
        domains: lists of ranks that fail together.
    """
    held_RE, new_RE = array("held", held, np.int64, 2), array("placement", placement, np.int64, 2)
    return _native.keep_in_place(held_RE, new_RE, array("nbytes", nbytes, np.int64, 1), count_lists("domains", domains))
