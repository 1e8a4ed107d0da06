"""Who keeps copies of what."""

from __future__ import annotations

from collections.abc import Sequence

from evermoe import _native
from evermoe.planning._arguments import count


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
    return _native.copy_holders(list(nodes), count("copies", copies))


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
    holder_lists = [[count("holders", rank) for rank in unit] for unit in holders]
    sizes = [count("nbytes", size) for size in nbytes]
    return _native.primaries(holder_lists, sizes, count("ranks", ranks))


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
        list(primaries), [list(ranks) for ranks in active], list(nodes), count("copies", copies)
    )
