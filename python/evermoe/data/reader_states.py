"""States of readers in a tensor of fixed size, the unit `readers`: the same on all members."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator

import torch

from evermoe.data.reader import ReaderState

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<qqq")
"""Of each state: its epoch, the number of samples, and bytes."""


class ReaderStates:
    """The latest states of all readers that the members have exchanged, and the newer ones of this member.

    Args:
        readers: number of readers.
        nbytes: room for the state of each.
    """

    def __init__(self, readers: int, nbytes: int) -> None:
        self.tensor = torch.zeros(readers, nbytes, dtype=torch.uint8)
        """The exchanged states, `[readers, nbytes]`."""
        self._own: dict[int, ReaderState] = {}
        self._has_warned = False

    def add(self, reader: int, state: ReaderState) -> None:
        """Note a newer state of a reader of this member."""
        nbytes, room = _HEAD.size + len(state.data), self.tensor.shape[1]
        if nbytes <= room:
            self._own[reader] = state
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the state of reader %d takes %d bytes, and state_bytes leaves %d: a member that takes it over reads "
                "again what the epoch has consumed since its last state that fits",
                reader,
                nbytes,
                room,
            )

    def before(self, reader: int, epoch: int, number: int) -> ReaderState | None:
        """Return the latest state of a reader in an epoch that is not after a sample; None without one."""
        known = (self._own.get(reader), self._exchanged(reader))
        fitting = [each for each in known if each is not None and each.epoch == epoch and each.number <= number]
        return max(fitting, key=lambda each: each.number, default=None)

    def own(self, readers: Iterable[int]) -> bytes:
        """Return the states of these readers that this member has taken, for the others."""
        found = [(reader, self._own[reader]) for reader in readers if reader in self._own]
        return b"".join(struct.pack("<q", reader) + _packed(state) for reader, state in found)

    def keep(self, data: bytes) -> None:
        """Take over the states of another member, or of this one, as `own` returns them."""
        for reader, state in _unpacked(data):
            packed = torch.frombuffer(bytearray(_packed(state)), dtype=torch.uint8)
            self.tensor[reader].zero_()
            self.tensor[reader, : len(packed)] = packed

    def _exchanged(self, reader: int) -> ReaderState | None:
        row = self.tensor[reader]
        epoch, number, nbytes = _HEAD.unpack(row[: _HEAD.size].numpy().tobytes())
        data = row[_HEAD.size : _HEAD.size + nbytes].numpy().tobytes()
        return ReaderState(epoch, number, data) if nbytes else None


def _packed(state: ReaderState) -> bytes:
    return _HEAD.pack(state.epoch, state.number, len(state.data)) + state.data


def _unpacked(data: bytes) -> Iterator[tuple[int, ReaderState]]:
    at = 0
    while at < len(data):
        (reader,) = struct.unpack_from("<q", data, at)
        epoch, number, nbytes = _HEAD.unpack_from(data, at + 8)
        at += 8 + _HEAD.size
        yield reader, ReaderState(epoch, number, data[at : at + nbytes])
        at += nbytes
