"""File systems that are too small, of disks and of the shared memory of nodes. Needs the right to mount."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from evermoe.process.memory_folder import job_folder
from support.harness import Job

BALLAST = "ballast"


@functools.cache
def may_mount() -> bool:
    """Whether this process may mount file systems: tried in a name space of its own, which leaves nothing."""
    line = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
    return not subprocess.run(line, capture_output=True, check=False).returncode


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A disk of this size at `folder`, which is made."""
    folder.mkdir()
    options = f"size={mebibytes}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def dying_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A disk of this size at `folder`, which is made: ext4 in a file next to it, for `freeze`.

    Raises:
        OSError: there is no ext4 here, or no file that can be a disk.
    """
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    folder.mkdir()
    for line in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        if subprocess.run(line, capture_output=True, check=False).returncode:
            raise OSError(f"{' '.join(line)} failed")
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", folder], capture_output=True, check=False)
        subprocess.run(["umount", "-l", folder], check=True)


def freeze(folder: Path) -> None:
    """Stop a disk: its writers wait until `thaw`, in the kernel."""
    subprocess.run(["fsfreeze", "-f", folder], check=True)


def thaw(folder: Path) -> None:
    """Let writes to a disk continue."""
    subprocess.run(["fsfreeze", "-u", folder], check=True)


def fill(folder: Path) -> None:
    """Takes all the room that is left."""
    with contextlib.suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def free(folder: Path) -> None:
    """Gives back what `fill` has taken."""
    (folder / BALLAST).unlink()


@contextlib.contextmanager
def small_memories(job: Job, folder: Path, names: Iterable[str]) -> Iterator[list[Path]]:
    """A file system of 64 MiB for the memory of each node."""
    nodes = [job_folder(folder, job.name) / name for name in names]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            node.parent.mkdir(parents=True, exist_ok=True)
            node.parent.chmod(0o700)
            stack.enter_context(small_disk(node, 64))
        yield nodes


def shrink(node: Path, part: float) -> None:
    """Leaves this part of what is used now."""
    stats = os.statvfs(node)
    used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
    assert used > 1 << 16
    subprocess.run(["mount", "-o", f"remount,size={int(used * part)}", node], check=True)
