"""Exchange of profiles between ranks: bytes, and the offset of their clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from evermoe.comm.group import Group


class Peers(Protocol):
    """The required exchanges; `connect` returns an implementation."""

    rank: int
    size: int

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank; lengths may differ."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor of the CPU."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a tensor of the CPU."""


def connect(group: Group | dist.ProcessGroup | None) -> Peers:
    """Return the peers of a session's group, of a group of `torch.distributed`, or of its default group (None).

    Raises:
        ValueError: the group is something else, or None while `torch.distributed` has no default group.
    """
    if isinstance(group, Group):
        return _Members(group)
    if isinstance(group, dist.ProcessGroup) or (group is None and dist.is_available() and dist.is_initialized()):
        return _Ranks(group)
    what = "None, and torch.distributed is not initialised" if group is None else repr(group)
    raise ValueError(f"group: expected an evermoe.comm.group.Group or a torch.distributed group, got {what}")


class _Members:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.all_gather_bytes = group.all_gather_bytes

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.exchange([(tensor, to)], [])

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._group.exchange([], [(tensor, source)])


class _Ranks:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_gpu = "gloo" not in str(dist.get_backend(group)) and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = [int(row) for row in self._gather(torch.tensor([len(data)]))]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(mine)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        return [row.cpu() for row in rows]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        dist.send(tensor.to(self._device), group=self._group, group_dst=to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        box = tensor.to(self._device)
        dist.recv(box, group=self._group, group_src=source)
        tensor.copy_(box)


class ClockOffset(NamedTuple):
    """Offset of a rank's clock from that of rank 0."""

    seconds: float
    """Seconds to add to this rank's clock."""
    error: float
    """Largest error of the offset in seconds."""


def offset_of(asked: float, came: float, answered: float, back: float) -> ClockOffset:
    """Return the offset from one round trip, as in NTP: half of the time in each direction, at worst all in one.

    Sent at 10.0 of the own clock, received at 15.2 of the other, answered at 15.3, back at 10.5:

        >>> offset_of(10.0, 15.2, 15.3, 10.5)
        ClockOffset(seconds=5.0, error=0.2)

    The round trip took 0.5 - 0.1 seconds; with an offset of 5.2 the outward trip would have taken no time.
    """
    return ClockOffset(
        round(((came - asked) + (answered - back)) / 2, 9), round(((back - asked) - (answered - came)) / 2, 9)
    )


def clock_offset(
    peers: Peers, rounds: int = 16, now: Callable[[], float] = lambda: time.perf_counter_ns() / 1e9
) -> ClockOffset:
    """Return the offset of rank 0's clock from this rank's, from the quickest of several round trips. Collective.

    Rank 0 answers one rank after the other, each `rounds` times; the quickest round trip has the smallest error.
    """
    if peers.rank == 0:
        for other in range(1, peers.size):
            for _ in range(rounds):
                peers.receive(torch.zeros(1, dtype=torch.float64), other)
                came = now()
                peers.send(torch.tensor([came, now()], dtype=torch.float64), other)
        return ClockOffset(0.0, 0.0)
    found = []
    for _ in range(rounds):
        box: Any = torch.zeros(2, dtype=torch.float64)
        asked = now()
        peers.send(torch.zeros(1, dtype=torch.float64), 0)
        peers.receive(box, 0)
        came, answered = box.tolist()
        found.append(offset_of(asked, came, answered, now()))
    return min(found, key=lambda offset: offset.error)
