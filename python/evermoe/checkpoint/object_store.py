"""Locations of checkpoints: a folder, or a URL of an object store. `/` joins names to either."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from evermoe import _native

PATIENCE = 180.0
"""Seconds for which a request is retried by default."""
LOOK_SECONDS = 5.0
"""Seconds for which a member that already has state of the job waits for an object store to list saved units."""
_PROVIDERS = ("AWS_", "AZURE_", "GOOGLE_")
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")
_FLATTENED = re.compile(r"^(s3a?|gs|az|azure|adl|abfss?|https?|file):/[^/]")


@dataclass(frozen=True)
class ObjectStore:
    """Objects below a URL, by name; `src/store/objects.rs` implements the operations and the errors.

    Every failure is an `OSError`: `FileNotFoundError` where the bucket does not exist, `PermissionError` where
    credentials are missing or insufficient, `TimeoutError` and `ConnectionError` where the service was unavailable for
    longer than `patience`.
    """

    url: str
    patience: float
    """Seconds for which a request is retried."""
    objects: Any
    """The extension module's `ObjectStore`."""
    download_limit: float = 0.0
    """Maximum number of bytes per second that `read_into` reads; 0 for no limit."""

    @property
    def is_read_only(self) -> bool:
        """Whether the store cannot be written to, whatever the credentials."""
        return bool(self.objects.is_read_only)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        self.objects.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless the name is taken; return whether the object of that name now has these bytes."""
        return bool(self.objects.create(name, data))

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return an object's bytes; None if it does not exist.

        Raises:
            CorruptCopy: the object is larger than `most_bytes`.
        """
        data: bytes | None = self.objects.read(name, most_bytes)
        return data

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        nbytes: int | None = self.objects.size(name)
        return nbytes

    def read_into(self, name: str, start: int, out: Any) -> None:
        """Fill `out`, a uint8 array, with the bytes from `start` on."""
        self.objects.read_into(name, start, out)

    def below(self, name: str) -> list[tuple[str, int, float]]:
        """Return each object below a name: its name, bytes, and time of writing in seconds since 1970."""
        found: list[tuple[str, int, float]] = self.objects.list(name)
        return found

    def names(self) -> list[str]:
        """Return the names directly below the URL."""
        found: list[str] = self.objects.names()
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove the objects that exist."""
        self.objects.remove(list(names))


@dataclass(frozen=True)
class ObjectPath:
    """A name below an object store, with the part of the interface of `pathlib.Path` that is needed.

    The key of the store itself is empty.
    """

    place: ObjectStore
    key: str = ""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.place, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.place.url}/{self.key}" if self.key else self.place.url

    @property
    def name(self) -> str:
        """The last component, after the last slash."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The path up to the last slash of the key."""
        return ObjectPath(self.place, self.key.rpartition("/")[0])


Location = Path | ObjectPath
"""A folder or file, or an object or prefix of an object store."""


def locate(
    where: str | Path, *, patience: float = PATIENCE, upload_limit: float = 0.0, download_limit: float = 0.0
) -> Location:
    """Return the location of a path or URL.

    Args:
        where: a path or a URL: `s3://`, `gs://`, `az://`, `file://`, or the read-only `http(s)://`.
        patience: seconds for which requests are retried.
        upload_limit: maximum bytes per second that are written to a URL; 0 for no limit.
        download_limit: maximum bytes per second of units that are read from it; 0 for no limit.

    Raises:
        ValueError: the URL has an unknown scheme, contains credentials, or is not a string.
        PermissionError: there are no credentials for the URL.
    """
    if isinstance(where, Path) and _FLATTENED.match(str(where)):
        raise ValueError(f"expected a URL as a string, got a path, in which // has become /: {where}")
    text = str(where)
    if isinstance(where, Path) or not _URL.match(text):
        return Path(where)
    if text.startswith("file:"):
        split = urlsplit(text)
        if split.netloc not in ("", "localhost"):
            raise ValueError(f"expected file:///PATH on this machine, got a URL of {split.netloc!r}")
        return Path(unquote(split.path))
    return ObjectPath(_open(text.rstrip("/"), patience, upload_limit, download_limit, *_circumstances()))


def _circumstances() -> tuple[int, int]:
    """Return the rest of the cache key: the process, as a child cannot use its parent's stores, and the variables."""
    variables = sorted(each for each in os.environ.items() if each[0].startswith(_PROVIDERS))
    return os.getpid(), hash(tuple(variables))


@functools.lru_cache(maxsize=64)
def _open(url: str, patience: float, upload: float, download: float, process: int, variables: int) -> ObjectStore:
    """Open a store, once per process, variables and arguments."""
    if not hasattr(_native, "ObjectStore"):
        raise ValueError("this build of evermoe has no object stores: build it with the feature object-store")
    objects = _native.ObjectStore(url, patience, upload or None, download or None)
    return ObjectStore(url, patience, objects, download)


def hurried(where: Location, patience: float) -> Location:
    """Return the same location, for requests that are retried for at most `patience` seconds."""
    if isinstance(where, Path) or where.place.patience <= patience:
        return where
    place = where.place
    return ObjectPath(_open(place.url, patience, 0.0, place.download_limit, *_circumstances()), where.key)


def locate_below(where: str | Path) -> Location:
    """Return the location of a checkpoint or file, which may need files next to it; raises as `locate` does."""
    text = str(where)
    if isinstance(where, Path) or not _URL.match(text) or text.startswith("file:"):
        return locate(where)
    above, _, name = text.rstrip("/").rpartition("/")
    return locate(above) / name
