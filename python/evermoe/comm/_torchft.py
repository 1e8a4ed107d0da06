"""torchft's Lighthouse and its quorums, imported on first use: only members of a job need them."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


@functools.cache
def coordination() -> Any:
    """Import torchft's coordination."""
    os.environ.setdefault("RUST_LOG", "warn")  # read at import; by default it logs every quorum
    return importlib.import_module("torchft.coordination")
