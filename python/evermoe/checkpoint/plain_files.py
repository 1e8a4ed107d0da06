"""Plain files of a folder: written durably with default modes, and read without following links."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from evermoe._native import write_safetensors
from evermoe.errors import CorruptCopy, UnsupportedState
from evermoe.state.unit import Unit

T = TypeVar("T")


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and wait until their names are on disk."""
    missing = []
    above = path.absolute()
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file and wait until its content is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def in_groups(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield consecutive items that share a file: as many as have at most `most_bytes` together, but at least one.

    >>> list(in_groups([3, 4, 9, 1], int, 7))
    [[3, 4], [9], [1]]
    """
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


WRITING_THREADS = 4
"""Threads that write a file: a disk takes several blocks concurrently."""
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Names of the dtypes in safetensors files."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a new safetensors file and wait until its content is on disk: past the page cache, by several threads.

    Args:
        path: of the file; its name is on disk once the folder is flushed.
        tensors: by name.
        metadata: of the file.

    Raises:
        UnsupportedState: a tensor has a dtype that safetensors does not support.
        OSError: the file exists, or it cannot be written; then it is removed.
    """
    _write(path, tensors, metadata)


def _write(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, hashed: Sequence[Tensor] = ()
) -> list[int]:
    found = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedState(f"{name} is of {tensor.dtype}, which safetensors files do not support")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.append((name, _DTYPES[tensor.dtype], list(tensor.shape), data))
    return write_safetensors(path, found, metadata, threads=WRITING_THREADS, hashed=[each.numpy() for each in hashed])


def write_units(path: Path, units: Mapping[str, tuple[Unit, Tensor]]) -> dict[str, int]:
    """Write units to a new file, as `write_tensors` does, with tensors named `<unit>/<piece>`; return their digests.

    The digests are computed during the write.

    Args:
        path: of the file.
        units: by name, and their bytes, uint8 `[nbytes]`.
    """
    tensors = {
        f"{name}/{key}": tensor for name, (unit, data) in units.items() for key, tensor in unit.tensors(data).items()
    }
    made = _write(path, tensors, hashed=[data for _, data in units.values()])
    return dict(zip(units, made, strict=True))


def probe(folder: Path, name: str) -> None:
    """Check that a file can be written to the folder.

    Raises:
        OSError: it cannot.
    """
    path = folder / f"{PROBE}{name}"
    try:
        write_text(path, "x" * PROBE_BYTES)
    finally:
        path.unlink(missing_ok=True)


PROBE = ".probe-"
"""Prefix of the files that `probe` writes."""
PROBE_BYTES = 4096


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[int]:
    """Open a file for reading, without following a link and without blocking, as opening a pipe would.

    Raises:
        CorruptCopy: the file is missing, cannot be read or is not a plain file.
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
    """Read a file of bounded size.

    Raises:
        CorruptCopy: the file is missing, cannot be read, is not a plain file, or is too large.
    """
    with open_plain(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise CorruptCopy(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise CorruptCopy(f"{path} cannot be read: expected at most {most_bytes} bytes")
    return content
