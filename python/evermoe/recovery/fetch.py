"""Brings each rank the units that it lacks: from its own memory, or from other ranks in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.comm.group import Group

ROUND_BYTES = 256 << 20
"""Bytes that the whole group exchanges in one round, at most; a larger unit has a round of its own."""


class Transfer(NamedTuple):
    """A unit that one rank gets from another, or from its own memory."""

    unit: str
    source: int
    destination: int
    kind: str
    """Kind of the copy at the source."""


class Fetch:
    """Moves units between the memories of a group's ranks.

    Args:
        group: all members.
        sizes: bytes of each unit.
        read: copies the bytes of a transfer whose source is this rank.
    """

    def __init__(self, group: Group, sizes: Mapping[str, int], read: Callable[[Transfer, Tensor], None]) -> None:
        self._group, self._sizes, self._read = group, sizes, read

    def local(self, transfers: Sequence[Transfer]) -> dict[str, Tensor]:
        """The units that this rank has in its own memory, read."""
        rank, fetched = self._group.rank, {}
        for transfer in transfers:
            if transfer.source == transfer.destination == rank:
                fetched[transfer.unit] = torch.zeros(self._sizes[transfer.unit], dtype=torch.uint8)
                self._read(transfer, fetched[transfer.unit])
        return fetched

    def remote(self, transfers: Sequence[Transfer]) -> dict[str, Tensor]:
        """The units that this rank gets from others; collective.

        Raises:
            PeerLost: another member is gone.
        """
        fetched: dict[str, Tensor] = {}
        for part in self._rounds([each for each in transfers if each.source != each.destination]):
            outgoing = sorted((t for t in part if t.source == self._group.rank), key=lambda t: t.destination)
            incoming = sorted((t for t in part if t.destination == self._group.rank), key=lambda t: t.source)
            received = self._group.all_to_all(
                self._pack(outgoing),
                self._bytes_by_rank(outgoing, lambda t: t.destination),
                self._bytes_by_rank(incoming, lambda t: t.source),
            )
            fetched |= self._unpack(incoming, received)
        return fetched

    def _rounds(self, transfers: Sequence[Transfer]) -> list[list[Transfer]]:
        rounds: list[list[Transfer]] = []
        room = 0
        for transfer in transfers:
            if room < self._sizes[transfer.unit] or not rounds:
                rounds.append([])
                room = ROUND_BYTES
            rounds[-1].append(transfer)
            room -= self._sizes[transfer.unit]
        return rounds

    def _bytes_by_rank(self, transfers: Sequence[Transfer], peer: Callable[[Transfer], int]) -> list[int]:
        found = [0] * self._group.size
        for transfer in transfers:
            found[peer(transfer)] += self._sizes[transfer.unit]
        return found

    def _pack(self, outgoing: Sequence[Transfer]) -> Tensor:
        """The bytes of all units that this rank sends, one after the other."""
        sizes = [self._sizes[transfer.unit] for transfer in outgoing]
        data = torch.zeros(sum(sizes), dtype=torch.uint8)
        for transfer, place in zip(outgoing, data.split(sizes), strict=True):
            self._read(transfer, place)
        return data

    def _unpack(self, incoming: Sequence[Transfer], received: Tensor) -> dict[str, Tensor]:
        parts = received.split([self._sizes[transfer.unit] for transfer in incoming])
        return {transfer.unit: part for transfer, part in zip(incoming, parts, strict=True)}
