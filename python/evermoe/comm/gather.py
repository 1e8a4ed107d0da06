"""What each member knows, or one of them, told to all."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor


class GathersBytes(Protocol):
    """Members that can tell each other bytes, such as a `Group`."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What each member brought, by rank."""


class AddsTensors(Protocol):
    """Members that can add tensors, such as a `Group`."""

    rank: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over all members, in place."""


def gather_json(group: GathersBytes, value: object) -> list[Any]:
    """What each member brought, by rank, as JSON returns it (tuples become lists); collective."""
    return [json.loads(text) for text in group.all_gather_bytes(json.dumps(value).encode())]


def share_json(group: AddsTensors, value: object, source: int = 0) -> Any:
    """What the member of rank `source` brought, as JSON returns it (tuples become lists); collective.

    Its bytes travel to each member once or twice; `gather_json` makes room for as many from every member.

    Args:
        group: the members.
        value: of the source; those of the others are ignored.
        source: rank of the member that knows.
    """
    text = json.dumps(value).encode() if group.rank == source else b""
    nbytes = int(group.all_reduce(torch.tensor([len(text)])))
    data = torch.zeros(nbytes, dtype=torch.uint8)  # which add nothing to the source's
    if text:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(group.all_reduce(data).numpy().tobytes())
