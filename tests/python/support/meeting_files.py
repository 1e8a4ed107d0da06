"""Files by which the processes of a test wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def meet(folder: str | Path, mine: str, others: Iterable[str]) -> None:
    """Leave a file in the folder, and wait until those of the others exist."""
    Path(folder, mine).touch()
    while not all(Path(folder, other).exists() for other in others):
        time.sleep(0.001)
