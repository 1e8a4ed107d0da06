"""States of readers in a tensor of fixed size, the unit `session.readers`: the same on all members."""

from __future__ import annotations

import itertools
import json
import logging
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from evermoe.data.plain_state import from_json, to_json

logger = logging.getLogger(__name__)

STATE_PERIOD = 16
"""Batches between two states of a reader."""
SMALL_STATE = 4096
"""Bytes of a state that worker processes take after each batch."""
EXCHANGE_PERIOD = 16
"""Minimum number of batches between two exchanges of states."""
EXCHANGE_BYTES = 64 << 10
"""Bytes of states that members exchange for each batch, on average."""
MAX_IDLE_PERIOD = 1024
"""Maximum number of batches between two exchanges where no reader has given a state."""

_HEAD = struct.Struct("<qqq")
"""Of each state: its epoch, the number of samples, and bytes."""


class ReaderState(NamedTuple):
    """The state of a reader, from which it continues."""

    epoch: int
    number: int
    """Samples of the epoch that it had read."""
    data: bytes
    """State of its iterable, as `packed` returns it."""


def packed(state: Any) -> bytes:
    """Return a state as compressed JSON.

    Raises:
        TypeError: it has a value that is neither JSON nor a tensor, an array, bytes or a tuple.
    """
    return zlib.compress(json.dumps(to_json(state)).encode(), 1)


def unpacked(data: bytes) -> Any:
    """Invert `packed`."""
    return from_json(json.loads(zlib.decompress(data)))


class ReaderStates:
    """The latest states of all readers that the members have exchanged, and the newer ones of this member.

    Each has room for `nbytes`.
    """

    def __init__(self, readers: int, nbytes: int) -> None:
        self.tensor = torch.zeros(readers, nbytes, dtype=torch.uint8)
        """The exchanged states, `[readers, nbytes]`."""
        self.batch = 0
        """Number in the job of the next batch."""
        self.exchange_at = EXCHANGE_PERIOD
        """Number of the batch with which members exchange states next."""
        self.owned: Iterable[int] = ()
        """The readers of which this member gives the states."""
        self._own: dict[int, ReaderState] = {}
        self._has_warned = False

    @property
    def is_due(self) -> bool:
        """Whether members exchange states with the next batch."""
        return self.batch >= self.exchange_at

    def add(self, reader: int, state: ReaderState) -> None:
        """Note a newer state of a reader of this member."""
        nbytes, room = _HEAD.size + len(state.data), self.tensor.shape[1]
        if nbytes <= room:
            self._own[reader] = state
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the state of reader %d takes %d bytes, and state_bytes is %d: a member that resumes, or takes "
                "the reader over, reads again all samples since the last state that fits. Begin the job again with a "
                "larger state_bytes: it is that of its checkpoints, too",
                reader,
                nbytes,
                room,
            )

    def forget_own(self) -> None:
        """Forget what this member has not exchanged: it goes back, and the states may be later than its place."""
        self._own.clear()

    def before(self, reader: int, epoch: int, number: int) -> ReaderState | None:
        """Return the latest state of a reader in an epoch that is not after a sample; None without one."""
        found = self.latest(reader, epoch, number)
        return None if found is None or found.epoch != epoch else found

    def latest(self, reader: int, epoch: int, number: int) -> ReaderState | None:
        """Return the latest state of a reader that is not after a sample of an epoch; None without one."""
        known = (self._own.get(reader), self._exchanged(reader))
        fitting = [each for each in known if each is not None and each[:2] <= (epoch, number)]
        return max(fitting, key=lambda each: each[:2], default=None)

    def own(self) -> bytes:
        """Return the states of this member's readers, for all members to keep."""
        found = [(reader, self._own[reader]) for reader in self.owned if reader in self._own]
        return b"".join(struct.pack("<q", reader) + _headed(state) for reader, state in found)

    def keep(self, states: Sequence[bytes]) -> None:
        """Keep the states of all members' readers, the same on all of them, and set the next exchange."""
        for reader, state in itertools.chain.from_iterable(map(_divided, states)):
            data, row = np.frombuffer(_headed(state), np.uint8), self.tensor[reader].numpy()
            row[: len(data)], row[len(data) :] = data, 0
        nbytes = sum(map(len, states))
        period = nbytes // EXCHANGE_BYTES
        if not nbytes and not self.tensor.any():  # readers may have no states, or none yet
            period = min(self.batch, MAX_IDLE_PERIOD)
        self.exchange_at = self.batch + max(EXCHANGE_PERIOD, period)

    def _exchanged(self, reader: int) -> ReaderState | None:
        row = self.tensor[reader]
        epoch, number, nbytes = _HEAD.unpack(row[: _HEAD.size].numpy().tobytes())
        data = row[_HEAD.size : _HEAD.size + nbytes].numpy().tobytes()
        return ReaderState(epoch, number, data) if nbytes else None


def states_of(data: object) -> ReaderStates | None:
    """Return the states that members exchange of an `ElasticReaders` or an `ElasticLoader`; None if there are none."""
    found = getattr(data, "states", None)
    return found if isinstance(found, ReaderStates) else None


def _headed(state: ReaderState) -> bytes:
    return _HEAD.pack(state.epoch, state.number, len(state.data)) + state.data


def _divided(data: bytes) -> Iterator[tuple[int, ReaderState]]:
    at = 0
    while at < len(data):
        (reader,) = struct.unpack_from("<q", data, at)
        epoch, number, nbytes = _HEAD.unpack_from(data, at + 8)
        at += 8 + _HEAD.size
        yield reader, ReaderState(epoch, number, data[at : at + nbytes])
        at += nbytes
