"""Owners of what is not an expert, where its optimizer state is not on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from evermoe import _native


def place_owners(
    nbytes: Sequence[int], active: Sequence[Collection[int]], copies: Sequence[Collection[int]], loads: Sequence[int]
) -> list[int]:
    """Return the owner of each unit that has one: few units move, and no rank has many more bytes than others.

    A unit stays where it is trained, goes where a copy of it is, or where the fewest bytes are, in this order, as long
    as a rank has room: the level up to which PEC's adaptive sharding (`shard_modules`) would fill all ranks,
    and a tenth more. Largest units first.

        >>> place_owners([30, 20, 10], active=[[0], [0], [0]], copies=[[1], [], []], loads=[0, 0])
        [0, 1, 1]

    Args:
        nbytes: bytes of each unit.
        active: ranks that train it now.
        copies: ranks that have a copy of it in memory.
        loads: by rank, bytes of its experts.

    Raises:
        ValueError: there is no rank, or the lists differ in length or name a rank that there is not.
    """
    return _native.place_owners(
        list(nbytes), [list(ranks) for ranks in active], [list(ranks) for ranks in copies], list(loads)
    )
