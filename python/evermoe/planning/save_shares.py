"""Distribution of the bytes that several ranks hold, so that the rank that saves the most saves little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from evermoe.planning.holders import primaries
from evermoe.planning.selection import shard_modules

ALIGNMENT = 64
"""Bytes at whose multiples parts start."""


class Share(NamedTuple):
    """Some bytes of a unit that one rank saves."""

    unit: int
    start: int
    end: int
    """After the last."""


def save_shares(
    nbytes: Sequence[int],
    holders: Sequence[Sequence[int]],
    is_expert: Sequence[bool],
    ranks: int,
    alignment: int = ALIGNMENT,
) -> list[list[Share]]:
    """Compute for each rank the units, or parts of units, that it saves (PEC / MoC-System's adaptive sharding, ADPS).

    One of its holders saves all of an expert, the largest first by the holder with the fewest bytes; what a
    single rank holds is saved by that. The rest is cut by `shard_modules`, so that with the experts all save about as
    many bytes.

        >>> save_shares([100, 40, 60], [[0], [0, 1], [0, 1]], [True, False, False], 2, alignment=20)
        [[Share(unit=0, start=0, end=100)], [Share(unit=1, start=0, end=40), Share(unit=2, start=0, end=60)]]
        >>> save_shares([20, 100], [[0], [0, 1]], [True, False], 2, alignment=20)  # both save 60
        [[Share(unit=0, start=0, end=20), Share(unit=1, start=0, end=40)], [Share(unit=1, start=40, end=100)]]

    Args:
        nbytes: size of each unit that is saved now.
        holders: for each unit the ranks that hold it, at least one.
        is_expert: for each unit whether it is an expert.
        ranks: number of ranks.
        alignment: parts start at multiples of it.

    Raises:
        ValueError: lists of different lengths, a unit without holders, or a rank that there is not.
    """
    if not len(nbytes) == len(holders) == len(is_expert):
        raise ValueError(
            f"nbytes, holders, is_expert: expected as many of each, got {len(nbytes)}, {len(holders)}, {len(is_expert)}"
        )
    uncut = [unit for unit, held in enumerate(holders) if is_expert[unit] or len(held) == 1 or not nbytes[unit]]
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    savers = primaries([holders[unit] for unit in uncut], [nbytes[unit] for unit in uncut], ranks)
    for unit, rank in zip(uncut, savers, strict=True):
        shares[rank].append(Share(unit, 0, nbytes[unit]))
    by_holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for unit in sorted(set(range(len(nbytes))) - set(uncut)):
        by_holders[tuple(holders[unit])].append(unit)
    for among, units in by_holders.items():
        loads = [sum(share.end - share.start for share in shares[rank]) for rank in among]
        parts_R = shard_modules([nbytes[unit] for unit in units], len(among), loads, alignment)
        for rank, parts in zip(among, parts_R, strict=True):
            shares[rank] += [Share(units[module], start, end) for module, start, end in parts]
    return shares
