"""Plain files of a folder: made durable with the modes of any new file, and read without being led elsewhere."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from evermoe._native import write_safetensors
from evermoe.errors import CorruptCopy, UnsupportedState
from evermoe.state.unit import Unit


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


WRITING_THREADS = 4
"""Threads that write a file: a disk takes several blocks at a time."""
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
"""What safetensors calls them."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a new safetensors file and waits until its content is on disk: past the page cache, by several threads.

    Args:
        path: of the file; its name is on disk once the folder is flushed.
        tensors: by name.
        metadata: of the file.

    Raises:
        UnsupportedState: a tensor is of a dtype that safetensors has not.
        OSError: there is such a file, or it cannot be written; then none is left.
    """
    _write(path, tensors, metadata)


def _write(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, hashed: Sequence[Tensor] = ()
) -> list[int]:
    found = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedState(f"{name} is of {tensor.dtype}, for which safetensors files have no type")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.append((name, _DTYPES[tensor.dtype], list(tensor.shape), data))
    return write_safetensors(path, found, metadata, threads=WRITING_THREADS, hashed=[each.numpy() for each in hashed])


def write_units(path: Path, units: Mapping[str, tuple[Unit, Tensor]]) -> dict[str, int]:
    """Writes units to a new file, as `write_tensors` does, with tensors named `<unit>/<piece>`; returns their digests.

    These are made meanwhile.

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
