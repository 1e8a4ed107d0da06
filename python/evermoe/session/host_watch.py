"""Warnings before a host runs out of memory, or the checkpoint folder out of room.

The kernel kills a process for which there is no memory left, and the process cannot log why.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evermoe.session.gpu_health import Problem

MIN_PART, MIN_BYTES = 0.02, 4 << 30
"""Memory is short where less than this part of it is free, and less than these bytes."""
GIB = 1 << 30


class Memory(NamedTuple):
    """Memory of a host, or of a control group with a limit."""

    owner: str
    total: int
    free: int
    """Bytes that programs can get without swapping."""

    @property
    def is_short(self) -> bool:
        """Whether a process may soon be killed."""
        return self.free < min(MIN_PART * self.total, MIN_BYTES)


def find_memory(root: Path = Path("/")) -> Iterator[Memory]:
    """Yield the memory of the host, and of each control group with a limit that this process belongs to (cgroup v2).

    Args:
        root: contains `proc` and `sys`.
    """
    fields = dict(_numbers(root / "proc/meminfo", 1024))
    if "MemAvailable:" in fields:
        yield Memory("the host", fields["MemTotal:"], fields["MemAvailable:"])
    groups = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = groups / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    for folder in (own, *own.parents):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            cached = dict(_numbers(folder / "memory.stat", 1))
            freed = cached.get("active_file", 0) + cached.get("inactive_file", 0)
            yield Memory("the control group", int(limit), int(limit) - int(used) + freed)
        if folder == groups:
            return


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(path: Path, unit: int) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        name, number, *_ = line.split()
        yield name, int(number) * unit


def find_host_problems(folder: Path | None, nbytes: int) -> Iterator[Problem]:
    """Yield what may soon end this process or its checkpoints.

    Args:
        folder: of the checkpoints; None without one.
        nbytes: of a checkpoint.
    """
    for memory in find_memory():
        if memory.is_short:
            yield Problem(
                f"{memory.owner} has less than {MIN_PART:.0%} of its {memory.total / GIB:.0f} GiB free", False
            )
    try:
        if folder is None or not folder.exists():
            return
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            yield Problem(f"the checkpoint folder {folder} cannot be written to: its file system is read-only", False)
        elif not any(folder.glob("*.writing-*")) and shutil.disk_usage(folder).free < nbytes:
            size = f"{nbytes / GIB:.3g} GiB"
            yield Problem(f"the checkpoint folder {folder} has less room than a checkpoint needs, {size}", False)
    except OSError as error:
        yield Problem(f"the checkpoint folder {folder} cannot be reached: {error.strerror}", False)
