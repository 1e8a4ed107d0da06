"""Content of a version's messages without the bytes that steps leave as they are, such as frozen weights.

    primary   captures the complete bundle in its own arena; sends the table of its digests and the other bytes
    holder    has the bytes from an earlier version; if digests differ, since a script has written frozen weights, or no
              earlier version is complete, it asks for the state that the primary has captured

So a version is the same, whichever way it was sent. All members know from the protection plan which bytes are left out,
and plan the same messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, pairwise

import torch

from evermoe._native import Arena
from evermoe.copies.snapshot.asked_states import AskedStates
from evermoe.copies.snapshot.bundles import BundleArena
from evermoe.copies.snapshot.round import STATES, SnapshotRound
from evermoe.copies.snapshot.segments import Segment, Segments, even_parts
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.state.stored import KeptCopies
from evermoe.state.unit import Unit
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)

Part = tuple[int, int]
"""Offset and bytes of a part of a bundle."""


def still_parts(arena: Arena, still: Mapping[str, Collection[str]], units: Mapping[str, Unit]) -> list[Part]:
    """Return the parts of a bundle that steps leave as they are, in order.

    Args:
        arena: of the bundle.
        still: by unit, names of its tensors that no step writes.
        units: all units, by name.
    """
    found = []
    for name, offset, _ in arena.units():
        specs = units[name].specs
        starts = accumulate((spec.nbytes for spec in specs), initial=offset)
        tensors = zip(specs, starts, strict=False)
        found += [(start, spec.nbytes) for spec, start in tensors if spec.name in still.get(name, ())]
    return found


def sent_parts(kept: BundleArena) -> list[Part]:
    """Return what a version of a bundle sends: of each unit all but what is still."""
    starts = [*(offset for _, offset, _ in kept.arena.units()), kept.arena.payload_bytes]
    found, left = [], deque(kept.still)
    for start, end in pairwise(starts):
        at = start
        while left and left[0][0] < end:
            first, nbytes = left.popleft()
            found.append((at, first - at))
            at = first + nbytes
        found.append((at, end - at))
    return [(offset, nbytes) for offset, nbytes in found if nbytes > 0]


class HeldParts(AskedStates):
    """Bundles without what their holders have from an earlier version.

    Args:
        store: the arenas of this rank.
    """

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__({kept.number for kept in (*store.own, *store.peers) if kept.still})

    def even_segments(self, sent: SnapshotRound, copies: KeptCopies) -> Segments:
        """Return messages of even size, without what holders have."""
        return Segments(
            [each for kept in sent.own for peer in kept.bundle.holders[1:] for each in _even(sent, kept, peer)],
            [each for kept in sent.peers for each in _even(sent, kept, kept.bundle.holders[0])],
        )

    def accept(self, sent: SnapshotRound, kept: BundleArena) -> bool:
        """Take what was left out from the newest earlier version, and make the bundle visible."""
        if kept.number not in self._made:
            return sent.commit(kept)
        before = kept.arena.versions()
        if before:
            data, old = STATES.data(sent, kept), torch.from_numpy(kept.arena.buffer(before[0][0]))
            for offset, nbytes in kept.still:
                data[offset : offset + nbytes] = old[offset : offset + nbytes]
                sent.courier.progress += 1
            if sent.commit(kept):
                return True
        self.asked.append(kept)
        why = "frozen weights were written" if before else "no earlier version is complete"
        step = step_of(sent.version)
        logger.info("%s: %s, so that the copy of step %d is sent entirely", kept.bundle.units[0], why, step)
        return True


def _even(sent: SnapshotRound, kept: BundleArena, peer: int) -> Iterator[Segment]:
    return even_parts(kept.number, peer, sent_parts(kept), kept.arena.units()[0][1], sent.store.chunk_bytes)
