"""Plain files of a folder: made durable with the modes of any new file, and read without being led elsewhere."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from evermoe.errors import CorruptCopy


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it that are missing; all their names are on disk."""
    missing = []
    above = path.absolute()
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file and waits until its content is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file and waits until its content is on disk."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata)  # replaces the file by one for the owner alone
    path.chmod(mode)
    flush(path)


def probe(folder: Path, name: str) -> None:
    """Tries whether a file can be written to the folder.

    Raises:
        OSError: it cannot.
    """
    path = folder / f"{PROBE}{name}"
    try:
        write_text(path, "x" * PROBE_BYTES)
    finally:
        path.unlink(missing_ok=True)


PROBE = ".probe-"
"""Start of the names of files that try whether a folder can be written to."""
PROBE_BYTES = 4096


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[int]:
    """Opens a file for reading: never through a link, and never waits, as it would for a pipe.

    Raises:
        CorruptCopy: it is missing, cannot be read or is no plain file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptCopy(f"{path} cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptCopy(f"{path} cannot be read: expected a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Reads a file of bounded size.

    Raises:
        CorruptCopy: it is missing, cannot be read, is no plain file or too large.
    """
    with open_plain(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise CorruptCopy(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise CorruptCopy(f"{path} cannot be read: expected at most {most_bytes} bytes")
    return content
