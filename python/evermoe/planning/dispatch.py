"""Who sends which tokens where."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count


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
    tokens_EN = array("tokens", tokens, np.int64, 2)
    matrix_NE = array("matrix", matrix, np.int64, 2)
    return _native.split_tokens(tokens_EN, matrix_NE, count("rank", rank))
