"""Shared memory that a spare reserves before it is needed: files of zeros that become arenas."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evermoe.memory_folder import make_private
from evermoe.profile import memory
from evermoe.snapshot.bundles import free_bytes

logger = logging.getLogger(__name__)

RESERVED_AT_ONCE = 64 << 20
"""Bytes that are reserved before it checks whether to continue: tens of milliseconds."""
SUFFIX = ".room"


class SpareRoom:
    """Files with their space reserved, in the folder where a member's arenas will be.

    A file system in memory has given a file its pages, all zero, so an arena that takes such a file over has nothing to
    wait for. Other members of the node may remove the files where they are short of memory themselves.

    Args:
        directory: of the arenas of this node.
        member: this one's id.
    """

    def __init__(self, directory: Path, member: str) -> None:
        self._directory, self._member = directory, member
        self._files: dict[Path, int] = {}
        """Bytes of each."""
        self._is_over = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved and have not been taken."""
        return sum(self._files.values())

    def reserve(self, sizes: Sequence[int], beside: int = 0) -> None:
        """Reserve files of these sizes in place of the previous ones, or none with a warning where memory is short.

        In any thread; `take` and `release` end it.

        Args:
            sizes: bytes of each.
            beside: bytes that must stay free in the host's memory, for what else this member will need.
        """
        self._drop()
        arenas = sum(path.stat().st_blocks * 512 for path in self._directory.glob("*.arena"))
        wanted, free = sum(sizes), free_bytes(self._directory)
        host = memory.free_host_bytes()
        problem = ""
        # The node's members need as much again as they have when members change.
        if free < wanted + arenas:
            problem = f"{free} are free in {self._directory} and its members may need {arenas} of them"
        elif host is not None and host < wanted + arenas + beside:
            problem = f"this host has {host} free, and its members and this one may need {arenas + beside} of them"
        else:
            try:
                make_private(self._directory.parent)
                make_private(self._directory)
                for number, nbytes in enumerate(sizes):
                    self._make(number, nbytes)
            except OSError as error:
                problem = str(error)
        if problem:
            self._drop()
            logger.warning("this spare reserves no memory: it would need %d bytes, and %s", wanted, problem)

    def _make(self, number: int, nbytes: int) -> None:
        path = self._directory / f"{self._member}-{number}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for start in range(0, nbytes, RESERVED_AT_ONCE):
                if self._is_over.is_set():
                    break
                os.posix_fallocate(descriptor, start, min(RESERVED_AT_ONCE, nbytes - start))
                self._files[path] = min(start + RESERVED_AT_ONCE, nbytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Reserves no more."""
        self._is_over.set()

    def take(self, nbytes: int) -> Path | None:
        """Return the file whose room fits best for an arena of `nbytes` bytes; None if none is left."""
        existing = {path: size for path, size in self._files.items() if path.exists()}
        if not existing:
            return None
        large = [path for path, size in existing.items() if size >= nbytes]
        path = min(large, key=lambda each: existing[each]) if large else max(existing, key=lambda each: existing[each])
        del self._files[path]
        return path

    def release(self) -> None:
        """Gives back what was not taken."""
        self._is_over.set()
        self._drop()

    def _drop(self) -> None:
        for path in list(self._files):
            path.unlink(missing_ok=True)
        self._files.clear()


def release_all(directory: Path) -> bool:
    """Gives back what spares have reserved on this node; returns whether there was anything."""
    found = list(directory.glob(f"*{SUFFIX}"))
    for path in found:
        with suppress(FileNotFoundError):
            path.unlink()
    return bool(found)
