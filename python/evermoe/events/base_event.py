"""Base class of the events, and their listeners."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


def name_of(kind: type[Event]) -> str:
    """Return the name of a kind of event in logs: that of its class, in snake case (`member_lost`)."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True)
class Event:
    """Base class of all events of a session."""

    @property
    def name(self) -> str:
        """Name of the kind of event in logs: see `name_of`."""
        return name_of(type(self))

    def fields(self) -> dict[str, Any]:
        """Return the event's fields by name, with values that JSON can represent."""
        return asdict(self)


Listener = Callable[[Event], None]
"""Callback for each event of a session."""
