"""torchft, imported on first use: it takes a second, and only members of a job need it."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, NamedTuple


class Torchft(NamedTuple):
    """The two modules of torchft that are used."""

    coordination: Any
    """The Lighthouse and its quorums."""
    process_group: Any
    """Process groups that can be aborted."""


@functools.cache
def torchft() -> Torchft:
    """Import torchft."""
    os.environ.setdefault("RUST_LOG", "warn")  # read at import; by default it logs every quorum
    return Torchft(*(importlib.import_module(f"torchft.{name}") for name in Torchft._fields))
