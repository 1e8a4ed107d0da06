"""Replicas by load, and which node holds which expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count


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
    load_E = array("load", load, np.float64, 1)
    return _native.allocate(load_E, count("ranks", ranks), count("slots", slots), count("min_replicas", min_replicas))


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
    replicas_E = array("replicas", replicas, np.int64, 1)
    previous_NE = None if previous is None else array("previous", previous, np.int64, 2)
    return _native.place(replicas_E, count("ranks", ranks), count("slots", slots), previous_NE)
