"""Safetensors files in object stores: read on demand, into anonymous memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from evermoe.checkpoint.object_store import ObjectPath
from evermoe.errors import CorruptCopy

FIRST_BYTES = 1 << 20
"""Bytes that are read of a file before its header is known: all bytes of a smaller one."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors, which refuses a longer header."""


class ObjectFile:
    """A local image of a file in an object store: of the same size, with zeros where nothing was read yet.

    Raises:
        CorruptCopy: the file is missing or empty.
        OSError: the file cannot be read.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path, size = path, path.place.size(path.key)
        if not size:
            raise CorruptCopy(
                f"{path} cannot be read: expected a file, found {'nothing' if size is None else '0 bytes'}"
            )
        self.descriptor = os.memfd_create("evermoe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self._bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
            self._read_to = 0
            self._read(0, min(size, FIRST_BYTES))
            self._read_to = min(size, FIRST_BYTES)
            header_bytes = int.from_bytes(self._bytes[:_LENGTH_BYTES].tobytes(), "little")
            self._header_end = min(size, _LENGTH_BYTES + min(header_bytes, _MAX_HEADER_BYTES))
            self._read(FIRST_BYTES, self._header_end)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _read(self, start: int, end: int) -> None:
        start = max(start, self._read_to)
        if start < end:
            self._path.place.read_into(self._path.key, start, self._bytes[start:end])

    def fetch_tensors(self, keys: Sequence[str]) -> None:
        """Read tensors, whose header has been checked."""
        header = json.loads(self._bytes[_LENGTH_BYTES : self._header_end].tobytes())
        offsets = [offset for key in keys if key in header for offset in header[key]["data_offsets"]]
        if offsets:
            self._read(self._header_end + min(offsets), self._header_end + max(offsets))

    def close(self) -> None:
        """Close the descriptor. Bytes that were read stay as long as tensors use them."""
        os.close(self.descriptor)


@contextlib.contextmanager
def open_object(path: ObjectPath) -> Iterator[ObjectFile]:
    """Open a file in an object store; raise `CorruptCopy` for any file that cannot be read."""
    try:
        file = ObjectFile(path)
    except OSError as error:
        raise CorruptCopy(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        yield file
    finally:
        file.close()
