"""Brings each rank the units that it lacks: from its own memory, or from other ranks in rounds of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.comm.group import Group

ROUND_BYTES = 256 << 20
"""Bytes that a rank sends in one round, and that it receives, at most; a larger unit has a round of its own."""


class Transfer(NamedTuple):
    """A unit that one rank gets from another, or from its own memory."""

    unit: str
    source: int
    destination: int
    kind: str
    """Kind of the copy at the source."""


class _Filling:
    """The newest round of one end, and how many bytes it has there."""

    def __init__(self) -> None:
        self._round = self._nbytes = 0

    def first_with_room(self, nbytes: int) -> int:
        is_full = self._nbytes > 0 and self._nbytes + nbytes > ROUND_BYTES
        return self._round + is_full

    def add(self, number: int, nbytes: int) -> None:
        if number > self._round:
            self._round, self._nbytes = number, 0
        self._nbytes += nbytes


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
        """Each transfer in the first round that has room at both ends, and none before one of the same end's.

        Example, of units of 100 MiB, as (source, destination): (0, 1), (0, 2), (0, 3), (2, 1), (3, 2) take the rounds
        0, 0, 1, 0, 0: rank 0 has sent 200 MiB by then.
        """
        rounds: list[list[Transfer]] = []
        sends, receives = defaultdict[int, _Filling](_Filling), defaultdict[int, _Filling](_Filling)
        for transfer in transfers:
            size, ends = self._sizes[transfer.unit], (sends[transfer.source], receives[transfer.destination])
            number = max(end.first_with_room(size) for end in ends)
            for end in ends:
                end.add(number, size)
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            rounds[number].append(transfer)
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
