"""Exchange of JSON values: from every member to all, or from one member to all."""

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
