"""Parts of a tensor that processes of an island divide, and where they overlap with the parts of another division."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """Place of a part in the tensor that is divided."""

    full: tuple[int, ...]
    """Shape of the complete tensor."""
    offset: tuple[int, ...]
    """Index of the part's first element in the complete tensor."""
    shape: tuple[int, ...]
    """Shape of the part."""

    @classmethod
    def complete(cls, shape: Sequence[int]) -> Extent:
        """Return the extent of a tensor that is not divided."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def from_lists(cls, full: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Extent:
        """Return an extent that has passed through JSON as lists."""
        return cls(tuple(full), tuple(offset), tuple(shape))

    def overlap(self, other: Extent) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the elements that two parts of a tensor have in common; None if there are none.

        Returns:
            Their index in this part, and their index in the other one.
        """
        mine, theirs = [], []
        for first, length, start, count in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low, high = max(first, start), min(first + length, start + count)
            if low >= high:
                return None
            mine.append(slice(low - first, high - first))
            theirs.append(slice(low - start, high - start))
        return tuple(mine), tuple(theirs)
