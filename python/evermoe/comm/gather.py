"""What each member knows, told to all."""

from __future__ import annotations

import json
from typing import Any, Protocol


class GathersBytes(Protocol):
    """Members that can tell each other bytes, such as a `Group`."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What each member brought, by rank."""


def gather_json(group: GathersBytes, value: object) -> list[Any]:
    """What each member brought, by rank, as JSON returns it (tuples become lists); collective."""
    return [json.loads(text) for text in group.all_gather_bytes(json.dumps(value).encode())]
