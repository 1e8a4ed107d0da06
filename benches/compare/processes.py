"""Processes of a run and their descendants: their memory, and their end. Reads Linux's /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

KINDS = ("RssAnon:", "RssShmem:")
"""Memory that counts: private memory, and shared memory that the process has touched; no files."""


def family(pid: int) -> list[int]:
    """Return the live processes that a process has started, directly or not, and itself."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes and their descendants; shared memory counts in each that touched it."""
    total = 0
    for pid in {member for each in pids for member in family(each)}:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(KINDS):
                    total += int(line.split()[1]) * 1024
    return total


def kill(pid: int) -> None:
    """SIGKILL a process and its descendants."""
    for each in family(pid):  # the agent first, so that it restarts nothing
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
