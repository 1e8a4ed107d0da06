"""Output of commands: the terminal, and files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


def console() -> Console:
    """Return a console as wide as the terminal; a pipe gets 100 columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def write_all(files: dict[str, tuple[str, bytes]]) -> None:
    """Write all files or none, each completely."""
    parts: dict[str, Path] = {}
    try:
        for flag, (name, content) in files.items():
            with _explained(flag, name):
                parts[flag] = _part(Path(name), content)
        for flag, part in parts.items():
            with _explained(flag, files[flag][0]):
                part.replace(files[flag][0])
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _part(path: Path, content: bytes) -> Path:
    """Write the content to a temporary file next to `path`, and return its path."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return part


@contextmanager
def _explained(flag: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {name}: cannot be written: {error.strerror}") from None
