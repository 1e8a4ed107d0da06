"""Owners of what is not an expert, where its optimizer state is not on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from evermoe.planning.selection import shard_modules

OWNER_SLACK = 0.1
"""Part by which a rank may have more bytes than if all had equally many, so that a unit stays where it is."""


def place_owners(
    nbytes: Sequence[int], active: Sequence[Collection[int]], copies: Sequence[Collection[int]], loads: Sequence[int]
) -> list[int]:
    """The owner of each unit that has one: few units move, and no rank has many more bytes than others.

    A unit stays where it is trained, goes where a copy of it is, or where the fewest bytes are, in this order, as long
    as a rank has room: the level up to which PEC's adaptive sharding (`shard_modules`) would fill all ranks,
    and a tenth more. Largest units first.

        >>> place_owners([30, 20, 10], active=[[0], [0], [0]], copies=[[1], [], []], loads=[0, 0])
        [0, 1, 1]

    Args:
        nbytes: bytes of each unit.
        active: ranks that train it now.
        copies: ranks that have a copy of it in memory.
        loads: by rank, bytes of what it holds beside: its experts.
    """
    parts = shard_modules(nbytes, len(loads), loads, alignment=1)
    filled = [
        load + sum(end - start for _, start, end in part) for load, part in zip(loads, parts, strict=True) if part
    ]
    limit = max(filled, default=0) * (1 + OWNER_SLACK)
    owners, left = {}, list(loads)

    def settle(units: Iterable[int], where: Sequence[Collection[int]], limit: float) -> None:
        for unit in units:
            ranks = [rank for rank in where[unit] if left[rank] + nbytes[unit] <= limit]
            if unit not in owners and ranks:
                owners[unit] = min(ranks, key=lambda rank: (left[rank], rank))
                left[owners[unit]] += nbytes[unit]

    largest_first = sorted(range(len(nbytes)), key=lambda unit: (-nbytes[unit], unit))
    settle(largest_first, active, limit)
    for unit in largest_first:
        settle([unit], copies, limit)
        settle([unit], [range(len(loads))] * len(nbytes), np.inf)
    return [owners[unit] for unit in range(len(nbytes))]
