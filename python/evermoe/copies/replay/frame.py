"""Frames: what a member sends another in a step. The layout is that of `src/replay/frame.rs`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evermoe._native import FRAME_HEAD_BYTES, digest, fill_frame
from evermoe.copies.replay.source import Record, max_bytes
from evermoe.errors import PeerLost

SIZE_BYTES = 8
"""Bytes of the size of a record."""


class Frame:
    """Memory for a message to or from a peer: the sizes of all records, then the records that fit.

    A checksum of the sizes comes first, since they say how much to wait for. Each record has its own.

    Args:
        max_records: maximum number of records in a step.
        head_bytes: room for records that are sent with their sizes.
        tail_bytes: bytes of the other records in most steps; memory that is kept.
    """

    def __init__(self, max_records: int, head_bytes: int, tail_bytes: int = 0) -> None:
        self._most, self._start = max_records, FRAME_HEAD_BYTES + SIZE_BYTES * max_records
        self.data = torch.empty(self._start + head_bytes, dtype=torch.uint8)
        self._tail = torch.empty(tail_bytes, dtype=torch.uint8)
        self._checksum = self.data[:FRAME_HEAD_BYTES].numpy()
        self._size_bytes = self.data[FRAME_HEAD_BYTES : self._start].numpy()
        self._sizes = self._size_bytes.view(np.int64)

    def check_sizes(self, peer: int) -> None:
        """Check the sizes that a peer has sent.

        Raises:
            PeerLost: they are damaged.
        """
        if int.from_bytes(self._checksum.tobytes(), "little") != digest(self._size_bytes):
            raise PeerLost(f"the sizes of member {peer}'s messages do not match their checksum; members agree again")

    def write_records(self, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
        """Write records. Return the memory to send, and the tail with the records that do not fit."""
        needed = sum(map(max_bytes, records))
        tail = self._tail
        if len(tail) < needed > len(self.data) - self._start:
            tail = torch.empty(needed, dtype=torch.uint8)
        end, tail_end = fill_frame(self.data.numpy(), self._most, records, tail.numpy())
        return self.data[:end], tail[:tail_end]

    def tail_bytes(self) -> int:
        """Return the bytes of the records that do not fit."""
        return int(self._sizes.sum()) - (self._fitting()[1] - self._start)

    def split_records(self, tail: Tensor | None) -> list[tuple[Tensor, list[int]]]:
        """Return pieces of memory with consecutive records, and the sizes of these records.

        `tail` has the records that do not fit.
        """
        fitting, end = self._fitting()
        sizes = [size for size in self._sizes.tolist() if size]
        head = (self.data[self._start : end], sizes[:fitting])
        return [head] if tail is None else [head, (tail, sizes[fitting:])]

    def _fitting(self) -> tuple[int, int]:
        """Return the number of records that fit, and where the last of them ends."""
        end, fitting = self._start, 0
        for size in self._sizes.tolist():
            if not size or end + size > len(self.data):
                break
            end, fitting = end + size, fitting + 1
        return fitting, end
