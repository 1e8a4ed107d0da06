"""Manifests of units that are saved together; reads those units and checks their digests."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evermoe._native import digest, format_manifest, parse_manifest
from evermoe.checkpoint.object_file import open_object
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.plain_files import open_plain, read_plain
from evermoe.errors import CorruptCopy
from evermoe.state.version import step_of

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""Maximum size of a manifest: enough for 400,000 units."""
READS = 8
"""Units of an object store that are read ahead concurrently."""


class Part(NamedTuple):
    """A range of a unit's bytes."""

    start: int
    end: int
    """One past the last byte."""
    of: int
    """Bytes of the complete unit."""

    @classmethod
    def all_of(cls, nbytes: int) -> Part:
        """Return all `nbytes` bytes of a unit."""
        return cls(0, nbytes, nbytes)

    @property
    def is_complete(self) -> bool:
        """Whether the range has all bytes of the unit."""
        return self.end - self.start == self.of


BYTES = "bytes"
"""Name of the tensor that has a part, uint8 `[end - start]`."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder: a version and, per unit, its file and the xxh3-64 digest of the complete unit's bytes."""

    path: Location
    version: int
    units: dict[str, tuple[str, int]]
    names: dict[str, list[str]]
    """Per unit: the names of its tensors, in the order of its bytes."""
    layout: str = ""
    """Layout of the model."""
    origins: dict[str, str] = field(default_factory=dict)
    """Per unit whose file belongs to another checkpoint: the name of that checkpoint, next to this one."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Per unit that was saved in part: its range of bytes."""
    members: tuple[str, ...] = ()
    """Members that save the units which may not lag, each with a manifest; empty where one member saves all of them."""

    def folder_of(self, unit: str) -> Location:
        """Return the location of the folder with the unit's file."""
        origin = self.origins.get(unit)
        return self.path if origin is None else self.path.with_name(origin)


Entry = tuple[str, int, Sequence[str]] | tuple[str, int, Sequence[str], str | None]
"""File of a unit, digest of its bytes, names of its tensors, and the checkpoint that owns the file, if another."""


def manifest_text(
    version: int,
    layout: str,
    units: Mapping[str, Entry],
    parts: Mapping[str, Part] | None = None,
    members: Sequence[str] = (),
) -> str:
    """Return the text of a manifest: for each unit its entry, and its part if it was saved in part.

    Raises:
        ValueError: a name cannot be a file name, or occurs twice.
    """
    rows = [
        (name, entry[0], (*entry, None)[3], entry[1], (parts or {}).get(name), list(entry[2]))
        for name, entry in units.items()
    ]
    return format_manifest(version, step_of(version), layout, list(members), rows)


def read_manifest(path: Location, name: str = MANIFEST) -> Manifest:
    """Read the manifest in folder `path`.

    Raises:
        CorruptCopy: the manifest is missing, damaged, of another format, or contains names that are not allowed.
    """
    return parsed(path, _content(path, name), name)


def _content(path: Location, name: str) -> bytes:
    if isinstance(path, Path):
        try:
            return read_plain(path / name, MANIFEST_BYTES)
        except CorruptCopy as error:
            raise _no_manifest(path, name, error) from None
    try:
        content = path.place.read((path / name).key, MANIFEST_BYTES)
    except (OSError, CorruptCopy) as error:
        raise _no_manifest(path, name, error) from None
    if not content:
        raise _no_manifest(path, name, "the file is missing" if content is None else "the checkpoint was removed")
    return content


def parsed(path: Location, content: bytes, name: str = MANIFEST) -> Manifest:
    """Parse the manifest of a folder; raises as `read_manifest` does."""
    try:
        version, step, layout, members, rows = parse_manifest(content)
        if step != step_of(version):
            raise CorruptCopy(f"version {version} has taken {step_of(version)} steps, not {step}")
    except CorruptCopy as error:
        raise _no_manifest(path, name, error) from None
    units = {unit: (file, value) for unit, file, _, value, _, _ in rows}
    names = {unit: tensors for unit, *_, tensors in rows}
    origins = {unit: origin for unit, _, origin, _, _, _ in rows if origin is not None}
    parts = {unit: Part(*part) for unit, *_, part, _ in rows if part is not None}
    return Manifest(path, version, units, names, layout, origins, parts, tuple(members))


def _no_manifest(path: Location, name: str, reason: object) -> CorruptCopy:
    return CorruptCopy(f"{path / name} is not a manifest of a checkpoint: {reason}")


def read_units(manifest: Manifest, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors of each unit, with checked digests.

    Raises:
        CorruptCopy: a unit is missing, or cannot be read, or does not match its digest.
    """
    by_file: dict[tuple[str | None, str], list[str]] = {}
    for name in names:
        if name not in manifest.units:
            raise CorruptCopy(f"{manifest.path} has no unit {name}: it was written for another model")
        by_file.setdefault((manifest.origins.get(name), manifest.units[name][0]), []).append(name)
    if isinstance(manifest.path, Path):
        for members in by_file.values():
            yield from _read_file(manifest, members)
        return
    with ThreadPoolExecutor(READS, thread_name_prefix="evermoe-read") as pool:
        yield from _ahead(pool, manifest, [name for members in by_file.values() for name in members])


def _ahead(
    pool: ThreadPoolExecutor, manifest: Manifest, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield units in their order, and read some ahead while the previous one is used."""
    left = iter(names)
    coming: deque[Future[list[tuple[str, dict[str, Tensor]]]]] = deque()
    try:
        while True:
            for name in itertools.islice(left, READS - len(coming)):
                coming.append(pool.submit(lambda name=name: list(_read_file(manifest, [name]))))  # type: ignore[misc]
            if not coming:
                return
            yield from coming.popleft().result()
    finally:
        for each in coming:
            each.cancel()


def _read_file(manifest: Manifest, members: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the units of one file."""
    path = manifest.folder_of(members[0]) / manifest.units[members[0]][0]
    with _opened(path) as (descriptor, fetch):
        try:
            # By its descriptor: the library opens the file twice, and another member may remove its name in between.
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as source:
                for name in members:
                    keys = {key: f"{name}/{key}" for key in manifest.names[name]}
                    fetch(list(keys.values()))
                    tensors = {key: source.get_tensor(long) for key, long in keys.items()}
                    found, expected = digest(as_bytes(tensors).numpy()), manifest.units[name][1]
                    if found != expected:
                        raise CorruptCopy(
                            f"{name} in {path}: expected digest {expected:016x}, the bytes have {found:016x}"
                        )
                    yield name, tensors
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{path} cannot be read: {error}") from None


def read_part(file: Location, unit: str) -> Tensor:
    """Return the part of a unit in a file, uint8 `[end - start]`; only the complete unit can be checked.

    Raises:
        CorruptCopy: the file cannot be read.
    """
    key = f"{unit}/{BYTES}"
    with _opened(file) as (descriptor, fetch):
        try:
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as source:
                fetch([key])
                return as_bytes({BYTES: source.get_tensor(key)})
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{file} cannot be read: {error}") from None


@contextlib.contextmanager
def _opened(path: Location) -> Iterator[tuple[int, Callable[[Sequence[str]], None]]]:
    """Open a file; yield its descriptor, and a function that fetches the tensors with these keys."""
    if isinstance(path, ObjectPath):
        with open_object(path) as file:
            yield file.descriptor, file.fetch_tensors
    else:
        with open_plain(path) as descriptor:
            yield descriptor, lambda keys: None


def as_bytes(tensors: dict[str, Tensor]) -> Tensor:
    """Return a unit's bytes, uint8 `[nbytes]`, from its tensors in order."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])
