"""Small disks: file systems in memory that can be filled and freed. Needs the right to mount."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def fill(folder: Path) -> None:
    """Takes all the room that is left."""
    with contextlib.suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def free(folder: Path) -> None:
    """Gives back what `fill` has taken."""
    (folder / BALLAST).unlink()
