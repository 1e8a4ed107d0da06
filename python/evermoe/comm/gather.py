"""Exchange of JSON values and bytes: from every member to all, or from one member to all or to another one."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor


class GathersBytes(Protocol):
    """A group that can gather bytes, such as a `Group`."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each member, by rank."""


class AddsTensors(Protocol):
    """A group that can sum tensors, such as a `Group`."""

    rank: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all members, and return it."""


def gather_json(group: GathersBytes, value: object) -> list[Any]:
    """Return the value of each member, by rank, as JSON returns it (tuples become lists); collective."""
    return [json.loads(text) for text in group.all_gather_bytes(json.dumps(value).encode())]


class ExchangesTensors(Protocol):
    """Group whose members send tensors to each other."""

    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], tag: int
    ) -> None:
        """Send each tensor to its rank, and receive each from its rank."""


def send_bytes(group: ExchangesTensors, data: bytes, rank: int, tag: int) -> None:
    """Send bytes to a member, which calls `receive_bytes`."""
    group.exchange([(torch.tensor([len(data)]), rank)], [], tag)
    if data:
        group.exchange([(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)], [], tag)


def receive_bytes(group: ExchangesTensors, rank: int, tag: int) -> bytes:
    """Return the bytes that a member sends with `send_bytes`."""
    size = torch.zeros(1, dtype=torch.int64)
    group.exchange([], [(size, rank)], tag)
    data = torch.empty(int(size), dtype=torch.uint8)
    if len(data):
        group.exchange([], [(data, rank)], tag)
    return data.numpy().tobytes()


def share_json(group: AddsTensors, value: object, source: int = 0) -> Any:
    """Return the value of rank `source`, as JSON returns it (tuples become lists); collective.

    Its bytes travel to each member once or twice. `gather_json` would allocate that number of bytes for every member.

    Args:
        group: the members.
        value: the value; only that of the source is used.
        source: rank of the member whose value is returned.
    """
    text = json.dumps(value).encode() if group.rank == source else b""
    nbytes = int(group.all_reduce(torch.tensor([len(text)])))
    data = torch.zeros(nbytes, dtype=torch.uint8)  # zeros add nothing to the bytes of the source
    if text:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(group.all_reduce(data).numpy().tobytes())
