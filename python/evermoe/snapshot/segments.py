"""Parts of a bundle's bytes that travel as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evermoe.comm.tags import SNAPSHOT_EACH, SNAPSHOT_FIRST


class Segment(NamedTuple):
    """A part of a bundle's bytes that travels as one message."""

    bundle: int
    """Number of the bundle."""
    peer: int
    """The rank at the other end."""
    place: int
    """Number among the messages of this bundle from its primary to one holder; both ends count alike."""
    offset: int
    nbytes: int
    window: int | None = None
    """Window of the sender's step: see `Message.window`."""
    step: int | None = None
    """Step of the version before which it is not sent, 0 for the one after the version; None for any."""

    @property
    def tag(self) -> int:
        """Tag of the message."""
        return SNAPSHOT_FIRST + self.bundle * SNAPSHOT_EACH + self.place % SNAPSHOT_EACH


class Segments(NamedTuple):
    """Segments that this rank sends and receives, from the same plans on all ranks."""

    sends: Sequence[Segment]
    """In this order."""
    receives: Sequence[Segment]
