"""Who keeps copies of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from evermoe import _native
from evermoe.planning._arguments import choice, count, count_lists, counts, names

CopyPolicy = Literal["mixed", "group", "ring", "previous"]
COPY_POLICIES: tuple[CopyPolicy, ...] = get_args(CopyPolicy)


class TrainingCopies(NamedTuple):
    """For each rank, the ranks that hold the same parameters and optimizer state, itself first."""

    parameters: list[list[int]]
    """Holders of each rank's parameters."""
    optimizer: list[list[int]]
    """Holders of each rank's optimizer state."""


def copy_holders(nodes: Sequence[str], replication: int, *, policy: CopyPolicy = "mixed") -> list[list[int]]:
    """For each rank, the ranks that keep copies of what it is primary for, itself first.

    Nodes are sorted by name and a node's copies go to the next nodes of its group or ring. "mixed" is Gemini's
    placement (SOSP'23, §4): groups of `replication` nodes, and a ring of the last ones if the groups do not come out
    even. "group" insists that they do. "ring" is one ring of all nodes, which survives less but loses less at a
    time; "previous" is that ring the other way round, to the nodes before, as in BAFT. With fewer nodes than
    copies all nodes are used; the ranks of a single node copy to each other.

        >>> copy_holders(["a", "b", "c", "d", "e"], replication=2)
        [[0, 1], [1, 0], [2, 3], [3, 4], [4, 2]]
        >>> copy_holders(["a", "b", "c", "d", "e"], replication=2, policy="ring")
        [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]

    Args:
        nodes: name of the node of each rank.
        replication: how many, the rank's own included; fewer where there are fewer nodes.
        policy: "mixed", "group", "ring" or "previous".

    Raises:
        ValueError: `replication` is 0 or, for "group", does not divide the number of nodes; `policy` is another.
    """
    return _native.copy_holders(
        names("nodes", nodes), count("replication", replication), choice("policy", policy, COPY_POLICIES)
    )


def training_copy_holders(
    nodes: Sequence[str],
    data_parallel: Sequence[int],
    pipeline: Sequence[int],
    replication: int,
    *,
    zero_stage: int = 0,
) -> TrainingCopies:
    """For each rank of a training job, who holds its parameters and its optimizer state, itself first.

    MoEtion's redundancy-aware placement (Algorithm 2, as its text describes it): what data-parallel peers on other
    nodes hold anyway counts as a copy; only what is left goes, once for all ranks that share it, to the next
    nodes without one, and all ranks receive equally many, to within one, where the nodes allow that.

        >>> found = training_copy_holders(["a", "b", "c", "d"], [0, 1, 0, 1], [0, 0, 1, 1], 2, zero_stage=1)
        >>> found.parameters  # peers have them
        [[0, 1], [1, 0], [2, 3], [3, 2]]
        >>> found.optimizer  # sharded over the peers: each part goes to the next node
        [[0, 1], [1, 2], [2, 3], [3, 0]]

    Args:
        nodes: name of the node of each rank; the ranks of a node fail together.
        data_parallel: data-parallel coordinate of each rank.
        pipeline: pipeline stage of each rank; ranks of one stage are data-parallel peers, so tensor- or
            expert-parallel parts of a stage need numbers of their own.
        replication: how many ranks are to hold everything, a rank's own state included. With fewer nodes than that, a
            node keeps more than one.
        zero_stage: 0 if peers have the same parameters and optimizer state, 1 or 2 if only the parameters, 3 if
            neither.

    Raises:
        ValueError: the lists differ in length, two ranks share coordinate and stage, `replication` is 0 or more than
            there are ranks, or `zero_stage` is more than 3.
    """
    found = _native.training_copy_holders(
        names("nodes", nodes),
        counts("data_parallel", data_parallel),
        counts("pipeline", pipeline),
        count("replication", replication),
        count("zero_stage", zero_stage),
    )
    return TrainingCopies(*found)


def primaries(holders: Sequence[Sequence[int]], nbytes: Sequence[int], ranks: int) -> list[int]:
    """For each unit, the rank that makes its copies.

    Largest units first, each to the holder with the fewest bytes so far.

        >>> primaries([[0, 1], [0, 1], [0, 1]], [2, 5, 2], ranks=2)
        [1, 0, 1]
    """
    return _native.primaries(count_lists("holders", holders), counts("nbytes", nbytes), count("ranks", ranks))


def unit_copy_holders(
    primaries: Sequence[int], active: Sequence[Sequence[int]], nodes: Sequence[str], replication: int
) -> list[list[int]]:
    """For each unit, the ranks that keep its copies: its primary, then `replication - 1` others.

    The others are the primary's partners of `copy_holders`; a partner on a node that trains on the unit anyway
    gives way to the next rank whose node does not, so that each copy protects against one more loss.

        >>> unit_copy_holders([2, 0], [[2, 3], [0]], ["a", "b", "c", "d"], replication=2)
        [[2, 0], [0, 1]]

    Args:
        primaries: for each unit, the rank that makes its copies, from `primaries`.
        active: for each unit, the ranks that hold it in the running model.
        nodes: name of the node of each rank.
        replication: how many, the primary's own included; fewer where there are fewer nodes.
    """
    return _native.unit_copy_holders(
        counts("primaries", primaries),
        count_lists("active", active),
        names("nodes", nodes),
        count("replication", replication),
    )
