"""Frames: what a member sends another in a step. Their layout is that of `src/replay/frame.rs`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evermoe._native import FRAME_HEAD_BYTES, digest, fill_frame
from evermoe.errors import PeerLost
from evermoe.replay.source import Record, most_bytes

SIZE_BYTES = 8
"""Bytes of the size of a record."""


class Frame:
    """Memory for what is sent to a peer, or comes from it: the sizes of all records, then those that fit.

    A checksum of the sizes comes first: they say how much to wait for. The records have their own.

    Args:
        most_records: of a step.
        head_bytes: room for records that are sent with their sizes.
        tail_bytes: of the records beside these in most steps: memory that is kept.
    """

    def __init__(self, most_records: int, head_bytes: int, tail_bytes: int = 0) -> None:
        self._most, self._start = most_records, FRAME_HEAD_BYTES + SIZE_BYTES * most_records
        self.data = torch.empty(self._start + head_bytes, dtype=torch.uint8)
        self._tail = torch.empty(tail_bytes, dtype=torch.uint8)
        self._checksum = self.data[:FRAME_HEAD_BYTES].numpy()
        self._size_bytes = self.data[FRAME_HEAD_BYTES : self._start].numpy()
        self._sizes = self._size_bytes.view(np.int64)

    def check(self, peer: int) -> None:
        """Checks the sizes that a peer has sent.

        Raises:
            PeerLost: they are damaged.
        """
        if int.from_bytes(self._checksum.tobytes(), "little") != digest(self._size_bytes):
            raise PeerLost(f"the sizes of the messages of member {peer} do not match their checksum: agree anew")

    def fill(self, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        """Writes records; the part of the memory that is to be sent, and the tail: those that are not in it."""
        needed = sum(map(most_bytes, records))
        tail = self._tail
        if len(tail) < needed > len(self.data) - self._start:
            tail = torch.empty(needed, dtype=torch.uint8)
        end, tail_end = fill_frame(self.data.numpy(), self._most, records, tail.numpy())
        return self.data[:end], tail[:tail_end]

    def tail_bytes(self) -> int:
        """Bytes of the records that do not fit."""
        return int(self._sizes.sum()) - (self._fitting()[1] - self._start)

    def parts(self, tail: Tensor | None) -> list[tuple[Tensor, list[int]]]:
        """The records, as pieces of memory in which they lie one after the other, and their sizes.

        `tail`: those that do not fit.
        """
        fitting, end = self._fitting()
        sizes = [size for size in self._sizes.tolist() if size]
        head = (self.data[self._start : end], sizes[:fitting])
        return [head] if tail is None else [head, (tail, sizes[fitting:])]

    def _fitting(self) -> tuple[int, int]:
        """How many records fit, and where the last of them ends."""
        end, fitting = self._start, 0
        for size in self._sizes.tolist():
            if not size or end + size > len(self.data):
                break
            end, fitting = end + size, fitting + 1
        return fitting, end
