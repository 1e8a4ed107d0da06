"""Bundles: units whose snapshots travel together, and the shared memory that their arenas need."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evermoe._native import Arena
from evermoe.planning.protection import OWN_VERSIONS
from evermoe.state.unit import LOOP_UNITS

HEAD_BYTES = 1 << 16
"""Approximate overhead of an arena in bytes: names and digests."""


@dataclass(frozen=True)
class Bundle:
    """Units that travel together: `holders[0]` is the primary, the others keep copies for it."""

    holders: tuple[int, ...]
    units: tuple[str, ...]

    def divided(self, *groups: Sequence[str]) -> list[Bundle]:
        """Return a bundle for each group of these units; none is empty.

        >>> [each.units for each in Bundle((0, 1), ("a", "b", "c")).divided(["b"], [], ["a", "c"])]
        [('b',), ('a', 'c')]
        """
        return [Bundle(self.holders, tuple(units)) for units in groups if units]

    def without(self, ranks: Collection[int]) -> Bundle:
        """Return the bundle without these ranks; without any holder if one of them is the primary."""
        if not self.holders or self.holders[0] in ranks:
            return Bundle((), self.units)
        return Bundle(tuple(rank for rank in self.holders if rank not in ranks), self.units)


@dataclass
class BundleArena:
    """An arena of this node, for a bundle of the protection plan."""

    number: int
    """Number of the bundle, the same on all its holders."""
    bundle: Bundle
    arena: Arena
    index: int = -1
    """The buffer that is being written."""
    still: Sequence[tuple[int, int]] = ()
    """Offset and bytes in a buffer of what steps leave as it is, in order."""


def bundles(
    units: Sequence[str], holders: Sequence[Sequence[int]], periods: Sequence[int] | None = None
) -> list[Bundle]:
    """Group units by the ranks that keep their copies, in order of first appearance; `LOOP_UNITS` have their own.

    Args:
        units: their names; a bundle takes the position of its first unit.
        holders: of each unit, its primary first.
        periods: steps between two copies of each unit, where they differ; a bundle's units are copied together.

    Example: holders [[0, 1], [2, 3], [0, 1]] of units a, b, c → (0, 1): a, c and (2, 3): b.
    """
    grouped: dict[tuple[tuple[int, ...], int, bool], list[str]] = {}
    for unit, ranks, period in zip(units, holders, periods or [1] * len(units), strict=True):
        grouped.setdefault((tuple(ranks), period, unit in LOOP_UNITS), []).append(unit)
    return [Bundle(ranks, tuple(names)) for (ranks, *_), names in grouped.items()]


class ArenaRoom(NamedTuple):
    """Shared memory for the arenas of a plan."""

    nbytes: int
    """Bytes that this member's arenas need, for both versions."""
    free: int
    """Free bytes of the folder, for all members of the node."""


def room_for(planned: Sequence[Bundle], rank: int, sizes: Mapping[str, int], directory: Path) -> ArenaRoom:
    """Compute the bytes that the arenas of a rank would need, and those free in their folder, which may not exist yet.

    Args:
        planned: all bundles.
        rank: of the member.
        sizes: bytes of each unit.
        directory: for the arenas.
    """
    nbytes = OWN_VERSIONS * sum(sizes[unit] for bundle in planned if rank in bundle.holders for unit in bundle.units)
    return ArenaRoom(nbytes, free_bytes(directory))


def free_bytes(directory: Path) -> int:
    """Return the free bytes of a folder, which may not exist yet."""
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    return shutil.disk_usage(existing).free


def arena_sizes(planned: Sequence[Bundle], rank: int, sizes: Mapping[str, int]) -> list[int]:
    """Return the approximate size in bytes of each arena of a rank."""
    found = [sum(sizes[unit] for unit in bundle.units) for bundle in planned if rank in bundle.holders]
    return [OWN_VERSIONS * nbytes + HEAD_BYTES for nbytes in found]
