"""Probability that nothing is lost when some nodes fail at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from evermoe import _native
from evermoe.planning._arguments import array, count, count_lists, names


@dataclass(frozen=True)
class Survival:
    """Probability that nothing is lost; `float(survival)` is the number."""

    probability: float
    """Probability from 0 to 1."""
    error: float
    """0 if exact; else the truth is within this of `probability` with a probability of at least 99.9 %."""
    samples: int | None
    """Number of samples drawn; None if exact."""

    @property
    def method(self) -> Literal["exact", "Monte Carlo"]:
        """Method by which the probability was found."""
        return "exact" if self.samples is None else "Monte Carlo"

    def __float__(self) -> float:
        return self.probability


def recovery_probability(
    matrix: ArrayLike,
    failures: int,
    *,
    domains: Sequence[Sequence[int]] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> Survival:
    """Compute the probability that every expert keeps a replica when `failures` of the nodes fail at once.

    All choices of failed nodes are equally likely. Exact, to about 1e-12, wherever that takes about a second or
    less, rings of thousands of nodes included; else by 100,000 samples (Hoeffding's bound is the `error`).

        >>> matrix = [[1, 1, 0], [1, 0, 1], [0, 1, 1]]  # three experts, each on two of three nodes
        >>> recovery_probability(matrix, failures=1)
        Survival(probability=1.0, error=0.0, samples=None)
        >>> round(float(recovery_probability(matrix, failures=1, domains=[[0, 1]])), 9)  # 0 and 1 fail together
        0.5

    Args:
        matrix: [N, E] replicas of each expert on each node, as from `place`.
        failures: number of nodes that fail; with `domains`, of domains.
        domains: lists of nodes that fail together; a node in none is a domain of its own.
        samples: number of samples to draw instead, up to 2^32.
        seed: of the samples; the same seed draws the same ones.

    Raises:
        ValueError: a negative number in `matrix`, more `failures` than nodes or domains, more than 2^20 nodes, a
            domain that is empty, names no node or one that another has, or `samples` out of range.
    """
    matrix_NE = array("matrix", matrix, np.int64, 2)
    groups = None if domains is None else count_lists("domains", domains)
    drawn = None if samples is None else count("samples", samples)
    return Survival(
        *_native.recovery_probability(matrix_NE, count("failures", failures), groups, drawn, count("seed", seed))
    )


def copy_recovery_probability(
    holders: Sequence[Sequence[int]],
    failures: int,
    *,
    nodes: Sequence[str] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> Survival:
    """Compute the probability that all keep a holder when `failures` of the nodes fail at once.

    Exact for any number of failures. For groups it is what Gemini (SOSP'23, §4) has in closed form up to
    twice the copies; its Corollary 1 is only a lower bound beyond that.

        >>> from evermoe.planning.holders import copy_holders
        >>> nodes = [f"node{number:02}" for number in range(16)]
        >>> found = copy_recovery_probability(copy_holders(nodes, replication=2), failures=2)
        >>> f"{found.probability:.1%}", found.method
        ('93.3%', 'exact')

    Args:
        holders: for each rank (or unit) the ranks that keep its state, as from `copy_holders`,
            `training_copy_holders` or `unit_copy_holders`.
        failures: number of nodes that fail.
        nodes: name of the node of each rank; without it `holders` has one list for each rank and each rank is a
            node of its own.
        samples: number of samples to draw instead, up to 2^32.
        seed: of the samples; the same seed draws the same ones.

    Raises:
        ValueError: a holder that is not a rank, more `failures` than nodes, more than 2^20 nodes, or `samples` out
            of range.
    """
    lists = count_lists("holders", holders)
    on = None if nodes is None else names("nodes", nodes)
    drawn = None if samples is None else count("samples", samples)
    return Survival(
        *_native.copy_recovery_probability(lists, count("failures", failures), on, drawn, count("seed", seed))
    )
