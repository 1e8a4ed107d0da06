"""Who sends which tokens where, and how even the work is."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, choice, count

SplitPolicy = Literal["even", "balanced"]
SPLITS: tuple[SplitPolicy, ...] = get_args(SplitPolicy)
"""Policies of `split_tokens` and `imbalance`."""


def split_tokens(
    tokens: ArrayLike, matrix: ArrayLike, rank: int, policy: SplitPolicy = "even"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute what `rank` sends and receives when tokens are split over the holders of their expert.

    `even` is Lazarus Algorithm 1: with t tokens and r replicas of an expert, a rank with R replicas has room
    for t * R / r of them. It keeps its own as far as they fit; the rest goes to the others in proportion to
    the room they have left. Tokens stay intact: none is lost, only holders get any, and every number is the
    floor or ceiling of its exact share.

    `balanced` makes the busiest rank, over all experts together, compute as few tokens as any split allows.
    Within that every rank starts with its own tokens and gives them away only where others find no room; it
    does not always find the split that keeps the most. How many replicas a rank has does not matter then.

        >>> send, receive = split_tokens([[4, 0]], [[1], [1]], rank=0)  # one expert, on both of two ranks
        >>> send, receive
        (array([[2, 2]]), array([[2],
               [0]]))
        >>> send, receive = split_tokens([[4, 0], [0, 2]], [[1, 0], [1, 1]], rank=0, policy="balanced")
        >>> send  # rank 1 computes the 2 tokens of expert 1, so it takes only 1 of the 4: both compute 3
        array([[3, 1],
               [0, 0]])

    Args:
        tokens: [E, N] tokens of each expert on each rank, gathered from all ranks.
        matrix: [N, E] replicas of each expert on each rank, from `place`.
        rank: whose part to return.
        policy: `even` or `balanced`, the same on all ranks.

    Returns:
        send [E, N], tokens of each expert that go to each rank, and receive [N, E], tokens of each
        expert that come from each rank; int64.

    Raises:
        ValueError: shapes that do not fit, negative numbers, or an expert that has tokens and no replica.
    """
    tokens_EN = array("tokens", tokens, np.int64, 2)
    matrix_NE = array("matrix", matrix, np.int64, 2)
    return _native.split_tokens(tokens_EN, matrix_NE, count("rank", rank), choice("policy", policy, SPLITS))


def imbalance(matrix: ArrayLike, load: ArrayLike, policy: SplitPolicy = "even") -> float:
    """Return the busiest node's load over the mean node's: 1 is perfect, N the worst; without load it is 1.

    With `even` a node bears of each expert what it holds of its replicas; with `balanced` the holders share
    in whatever parts make the busiest node lightest (see `split_tokens`).

        >>> imbalance([[1, 0], [1, 1]], [3, 1])  # 1.5 and 1.5 + 1, where the mean is 2
        1.25
        >>> imbalance([[1, 0], [1, 1]], [3, 1], policy="balanced")  # 2 and 1 + 1
        1.0

    Args:
        matrix: [N, E] replicas of each expert on each node.
        load: [E] tokens, or any measure of work; finite, 0 or more.
        policy: `even` or `balanced`.

    Raises:
        ValueError: no nodes, shapes that do not fit, numbers that are negative or not finite, or an expert
            that has load and no replica.
    """
    matrix_NE = array("matrix", matrix, np.int64, 2)
    return _native.imbalance(matrix_NE, array("load", load, np.float64, 1), choice("policy", policy, SPLITS))
