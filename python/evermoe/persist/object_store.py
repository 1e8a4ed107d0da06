"""Where checkpoints are: a folder, or a URL of an object store. Names below either are joined by `/`."""

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
"""Seconds for which a request is tried again by default."""
LOOK_SECONDS = 5.0
"""Time for which a member that has state of the job asks an object store for what is saved there."""
_PROVIDERS = ("AWS_", "AZURE_", "GOOGLE_")
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")
_FLATTENED = re.compile(r"^(s3a?|gs|az|azure|adl|abfss?|https?|file):/[^/]")


@dataclass(frozen=True)
class ObjectStore:
    """Objects below a URL, by their names; `src/store/objects.rs` has the operations and the errors.

    All that can go wrong is an `OSError`: `FileNotFoundError` where there is no such bucket, `PermissionError` where
    credentials are missing or do not suffice, `TimeoutError` and `ConnectionError` where the service was away for
    longer than the patience.
    """

    url: str
    patience: float
    """Seconds for which a request is tried again."""
    objects: Any
    """The extension module's `ObjectStore`."""
    download_limit: float = 0.0
    """Bytes per second that `read_into` reads at most; 0 for no limit."""

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written there, whatever the credentials."""
        return bool(self.objects.is_read_only)

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, or replaces it."""
        self.objects.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Makes an object unless the name is taken; whether the object of that name has these bytes now."""
        return bool(self.objects.create(name, data))

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """An object's bytes; None if there is none.

        Raises:
            CorruptCopy: it is larger.
        """
        data: bytes | None = self.objects.read(name, most_bytes)
        return data

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        nbytes: int | None = self.objects.size(name)
        return nbytes

    def read_into(self, name: str, start: int, out: Any) -> None:
        """Fills `out`, a uint8 array, with the bytes from `start` on."""
        self.objects.read_into(name, start, out)

    def below(self, name: str) -> list[tuple[str, int, float]]:
        """Name, bytes, and seconds since 1970 when it was written, of each object below a name."""
        found: list[tuple[str, int, float]] = self.objects.list(name)
        return found

    def names(self) -> list[str]:
        """Names directly below the URL."""
        found: list[str] = self.objects.names()
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects, if they are there."""
        self.objects.remove(list(names))


@dataclass(frozen=True)
class ObjectPath:
    """A name below a place, with what of `pathlib.Path` is needed; the key of the place itself is empty."""

    place: ObjectStore
    key: str = ""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.place, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.place.url}/{self.key}" if self.key else self.place.url

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """What comes before the last slash of the key."""
        return ObjectPath(self.place, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        """Another name beside this one."""
        return self.parent / name


Location = Path | ObjectPath
"""A folder or file, or what is below a URL."""


def locate(
    where: str | Path, *, patience: float = PATIENCE, upload_limit: float = 0.0, download_limit: float = 0.0
) -> Location:
    """The place that a path or URL names.

    Args:
        where: a path; or `s3://`, `gs://`, `az://`, `http(s)://`, which can only be read, or `file://`.
        patience: seconds for which requests are tried again.
        upload_limit: bytes per second that are written to a URL at most; 0 for no limit.
        download_limit: bytes per second of units that are read from it at most; 0 for no limit.

    Raises:
        ValueError: the URL has another scheme, or credentials, or is no text.
        PermissionError: there are no credentials for it.
    """
    if isinstance(where, Path) and _FLATTENED.match(str(where)):
        raise ValueError(f"expected a URL as a text, got a path, in which // has become /: {where}")
    text = str(where)
    if isinstance(where, Path) or not _URL.match(text):
        return Path(where)
    if text.startswith("file:"):
        split = urlsplit(text)
        if split.netloc not in ("", "localhost"):
            raise ValueError(f"expected file:///PATH of this machine, got one of {split.netloc!r}")
        return Path(unquote(split.path))
    return ObjectPath(_open(text.rstrip("/"), patience, upload_limit, download_limit, *_circumstances()))


def _circumstances() -> tuple[int, int]:
    """What else a place depends on: the process, as those of a parent are of no use to a child, and the variables."""
    variables = sorted(each for each in os.environ.items() if each[0].startswith(_PROVIDERS))
    return os.getpid(), hash(tuple(variables))


@functools.lru_cache(maxsize=64)
def _open(url: str, patience: float, upload: float, download: float, process: int, variables: int) -> ObjectStore:
    """A place, once for the same circumstances."""
    if not hasattr(_native, "ObjectStore"):
        raise ValueError("this build of evermoe has no object stores: build it with the feature object-store")
    objects = _native.ObjectStore(url, patience, upload or None, download or None)
    return ObjectStore(url, patience, objects, download)


def hurried(where: Location, patience: float) -> Location:
    """The same location, for requests that are tried again for so many seconds at most."""
    if isinstance(where, Path) or where.place.patience <= patience:
        return where
    place = where.place
    return ObjectPath(_open(place.url, patience, 0.0, place.download_limit, *_circumstances()), where.key)


def locate_below(where: str | Path, *, patience: float = PATIENCE) -> Location:
    """What is in a place, such as a checkpoint, which may need what is beside it; raises as `locate` does."""
    text = str(where)
    if isinstance(where, Path) or not _URL.match(text) or text.startswith("file:"):
        return locate(where)
    above, _, name = text.rstrip("/").rpartition("/")
    found = locate(above, patience=patience)
    return found / name
