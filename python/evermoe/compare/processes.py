"""Processes of a run, with those that they have started: their memory, and their end. From Linux's /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

KINDS = ("RssAnon:", "RssShmem:")
"""What counts as a process's memory: its own, and shared memory that it has touched; no files."""


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not, as far as they live."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def memory_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes and of all that they have started; shared memory counts in each that touched it."""
    total = 0
    for pid in {member for each in pids for member in family(each)}:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(KINDS):
                    total += int(line.split()[1]) * 1024
    return total


def kill(pid: int) -> None:
    """SIGKILL to a process and all that it has started."""
    for each in family(pid):  # the agent first, so that it starts nothing again
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
