"""Parts of a bundle's bytes that travel as one message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from evermoe._native import Arena
from evermoe.comm.tags import SNAPSHOT_EACH, SNAPSHOT_FIRST


class Segment(NamedTuple):
    """A part of a bundle's bytes that travels as one message."""

    bundle: int
    """Number of the bundle."""
    peer: int
    """The rank at the other end."""
    place: int
    """Number among the messages of this bundle from its primary to one holder; the same at both ends."""
    offset: int
    nbytes: int
    window: int | None = None
    """Window of the sender's step: see `Message.window`."""
    step: int | None = None
    """Earliest step of the version in which it is sent, 0 for the one after the version; None for any."""

    @property
    def tag(self) -> int:
        """Tag of the message."""
        return SNAPSHOT_FIRST + self.bundle * SNAPSHOT_EACH + self.place % SNAPSHOT_EACH


class Segments(NamedTuple):
    """Segments that this rank sends and receives, from the same plans on all ranks."""

    sends: Sequence[Segment]
    """In the order of sending."""
    receives: Sequence[Segment]


def joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return parts, each by its offset and bytes, with those that follow each other as one.

    >>> joined([(64, 10), (74, 6), (96, 4)])
    [(64, 16), (96, 4)]
    """
    found: list[tuple[int, int]] = []
    for offset, nbytes in parts:
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((offset, nbytes))
    return found


def even(number: int, arena: Arena, peer: int, left_out: Collection[str], most_bytes: int) -> Iterator[Segment]:
    """Yield segments of at most `most_bytes` of a bundle for a peer, in any window; omit units that the peer has."""
    units = arena.units()
    ends = [*(offset for _, offset, _ in units[1:]), arena.payload_bytes]
    parts = [(start, end - start) for (name, start, _), end in zip(units, ends, strict=True) if name not in left_out]
    return even_parts(number, peer, parts, units[0][1], most_bytes)


def even_parts(
    number: int, peer: int, parts: Iterable[tuple[int, int]], table_bytes: int, most_bytes: int
) -> Iterator[Segment]:
    """Yield segments of at most `most_bytes` of parts of a bundle, each by its offset and bytes, in any window.

    The table of digests comes last, since digests are known only when all units are captured.
    """
    cut = [
        (start, min(most_bytes, first + nbytes - start))
        for first, nbytes in joined(parts)
        for start in range(first, first + nbytes, most_bytes)
    ]
    for place, (start, nbytes) in enumerate([*cut, (0, table_bytes)]):
        yield Segment(number, peer, place, start, nbytes)
