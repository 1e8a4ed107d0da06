"""Shared memory that a spare reserves in advance: files of zeros that become arenas."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evermoe.copies.snapshot.bundles import free_bytes
from evermoe.process.memory_folder import make_private
from evermoe.profile import memory

logger = logging.getLogger(__name__)

RESERVED_AT_ONCE = 64 << 20
"""Bytes that are reserved between two checks for a stop: tens of milliseconds."""
SUFFIX = ".room"


class SpareRoom:
    """Files with reserved space, in the folder of a member's future arenas.

    The pages of these files are already allocated and zeroed, so an arena that takes one over does not wait for memory.
    Other members of the node may remove the files when they are short of memory.

    Args:
        directory: of the arenas of this node.
        member: id of this member.
    """

    def __init__(self, directory: Path, member: str) -> None:
        self._directory, self._member = directory, member
        self._files: dict[Path, int] = {}
        """Bytes of each file."""
        self._is_over = threading.Event()

    @property
    def nbytes(self) -> int:
        """Reserved bytes that have not been taken."""
        return sum(self._files.values())

    def reserve_files(self, sizes: Sequence[int], kept_free: int = 0) -> None:
        """Reserve files of these sizes in place of the previous ones; if memory is short, reserve none and warn.

        May run in any thread; `take_file` and `release` stop it.

        Args:
            sizes: bytes of each file.
            kept_free: bytes of the host's memory that must stay free for this member's other needs.
        """
        self._drop()
        arenas = sum(path.stat().st_blocks * 512 for path in self._directory.glob("*.arena"))
        wanted, free = sum(sizes), free_bytes(self._directory)
        host = memory.free_host_bytes()
        problem = ""
        # The node's members need as much again when members change.
        if free < wanted + arenas:
            problem = f"{free} are free in {self._directory} and its members may need {arenas} of them"
        elif host is not None and host < wanted + arenas + kept_free:
            problem = f"this host has {host} free, and its members and this one may need {arenas + kept_free} of them"
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

    def stop_reserving(self) -> None:
        """Stop reserving files."""
        self._is_over.set()

    def take_file(self, nbytes: int) -> Path | None:
        """Return the file that fits an arena of `nbytes` bytes best; None if none is left."""
        existing = {path: size for path, size in self._files.items() if path.exists()}
        if not existing:
            return None
        large = [path for path, size in existing.items() if size >= nbytes]
        path = min(large, key=lambda each: existing[each]) if large else max(existing, key=lambda each: existing[each])
        del self._files[path]
        return path

    def release(self) -> None:
        """Remove the files that were not taken."""
        self._is_over.set()
        self._drop()

    def _drop(self) -> None:
        for path in list(self._files):
            path.unlink(missing_ok=True)
        self._files.clear()


def release_all(directory: Path) -> bool:
    """Remove the files that spares have reserved on this node; return whether it found any."""
    found = list(directory.glob(f"*{SUFFIX}"))
    for path in found:
        with suppress(FileNotFoundError):
            path.unlink()
    return bool(found)
