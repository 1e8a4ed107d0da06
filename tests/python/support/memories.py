"""File systems that are too small: of disks, and of the shared memory of nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from evermoe.memory_folder import job_folder
from support.harness import Job


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount file systems")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def small_memories(job: Job, folder: Path, names: Iterable[str]) -> Iterator[list[Path]]:
    """A file system of 64 MiB for the memory of each node."""
    nodes = [job_folder(folder, job.name) / name for name in names]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            node.mkdir(parents=True, mode=0o700)
            node.parent.chmod(0o700)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", node], check=True)
            stack.callback(subprocess.run, ["umount", "-l", node], check=True)
        yield nodes


def shrink(node: Path, part: float) -> None:
    """Leaves this part of what is used now."""
    stats = os.statvfs(node)
    used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
    assert used > 1 << 16
    subprocess.run(["mount", "-o", f"remount,size={int(used * part)}", node], check=True)
