"""Manifests of checkpoints and saves; reads the units that they name, and checks their digests."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evermoe._native import digest
from evermoe.checkpoint.manifest_json import from_text, to_text
from evermoe.checkpoint.object_file import open_object
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.plain_files import open_plain, read_plain
from evermoe.errors import CorruptCopy
from evermoe.state.extent import Extent
from evermoe.state.unit import complete_name

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""Maximum size of a manifest: enough for 400,000 units."""
CHECKPOINT, SAVE = "step", "save"
"""Beginnings of the names of checkpoints, which have all units of one version, and of saves, which have several."""
READS = 8
"""Units of an object store that are read ahead concurrently."""
BYTES = "bytes"
"""Name of the tensor that has a part of a unit, uint8 `[end - start]`."""


class Part(NamedTuple):
    """A range of a unit's bytes."""

    start: int
    end: int
    """One past the last byte."""
    of: int
    """Bytes of the complete unit."""

    @property
    def is_complete(self) -> bool:
        """Whether the range has all bytes of the unit."""
        return self.end - self.start == self.of


class Row(NamedTuple):
    """A version of a unit, or a part of its bytes, in a file."""

    unit: str
    file: str
    digest: int
    """xxh3-64 of all bytes of the unit, even of a part."""
    tensors: Sequence[str]
    """Names of its tensors, in the order of its bytes."""
    part: Part | None = None
    """Range of the bytes in the file, unless they are all."""
    version: int | None = None
    """Version of the unit; None: that of the manifest. Rows of a manifest that was read always have it."""
    origin: str | None = None
    """Name of the checkpoint or save that the file belongs to; None: the manifest's own. Always present when read."""
    extents: Mapping[str, Extent] | None = None
    """Of a shard, the places of its parts of tensors, by name; None for a unit that is none."""

    @property
    def complete(self) -> str:
        """Name of the unit of which this is a shard; the own name of one that is none."""
        return self.unit if self.extents is None else complete_name(self.unit)

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Row:
        """Return a row that has passed through JSON as a list."""
        row = cls(*values)
        return row._replace(part=None if row.part is None else Part(*row.part), extents=_as_extents(row.extents))

    @classmethod
    def of_fields(cls, fields: dict[str, Any], version: int, origin: str) -> Row:
        """Return the row of a unit's fields in the manifest of this version in the folder of this name."""
        part = Part(*fields["part"]) if "part" in fields else None
        value, version, origin = int(fields["digest"], 16), fields.get("version", version), fields.get("origin", origin)
        extents = _as_extents(fields.get("extents"))
        return cls(fields["name"], fields["file"], value, fields["tensors"], part, version, origin, extents)

    def to_fields(self, version: int) -> dict[str, Any]:
        """Return the fields of the row in a manifest of this version."""
        fields: dict[str, Any] = {"name": self.unit, "file": self.file}
        if self.origin is not None:
            fields["origin"] = self.origin
        if self.version not in (None, version):
            fields["version"] = self.version
        fields["digest"] = f"{self.digest:016x}"
        if self.part is not None:
            fields["part"] = list(self.part)
        if self.extents is not None:
            fields["extents"] = {name: [list(each) for each in extent] for name, extent in self.extents.items()}
        return fields | {"tensors": list(self.tensors)}


def _as_extents(lists: Mapping[str, Sequence[Sequence[int]]] | None) -> dict[str, Extent] | None:
    return None if lists is None else {name: Extent.from_lists(*each) for name, each in lists.items()}


@dataclass(frozen=True)
class Saved:
    """A version of a unit in a store."""

    rows: tuple[Row, ...]
    """One, or one for each part of the unit's bytes, in their order."""
    folder: Location
    """Folder or URL of the checkpoints."""

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.rows[0].unit

    @property
    def version(self) -> int:
        """Version of its bytes."""
        version = self.rows[0].version
        assert version is not None
        return version

    @property
    def digest(self) -> int:
        """xxh3-64 of its bytes."""
        return self.rows[0].digest

    @property
    def tensors(self) -> Sequence[str]:
        """Names of its tensors, in the order of its bytes."""
        return self.rows[0].tensors

    @property
    def extents(self) -> Mapping[str, Extent]:
        """The places of its parts of tensors, by name; empty unless it is a shard."""
        return self.rows[0].extents or {}

    @property
    def is_cut(self) -> bool:
        """Whether its bytes were saved in parts."""
        return self.rows[0].part is not None

    @property
    def files(self) -> list[Location]:
        """Files with its bytes, in their order."""
        return [self.folder / str(row.origin) / row.file for row in self.rows]

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`, read on each access; empty if it cannot be read or does not match the digest."""
        try:
            return read_saved(self)
        except CorruptCopy:
            return torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint or a save."""

    path: Location
    version: int
    layout: str
    """Layout of the model."""
    rows: tuple[Row, ...]

    @cached_property
    def saved(self) -> list[Saved]:
        """All versions of all units; those of a unit follow each other, the newest first."""
        order = {row.unit: at for at, row in reversed([*enumerate(self.rows)])}
        rows = sorted(self.rows, key=lambda row: (order[row.unit], -(row.version or 0), row.part or ()))
        grouped = itertools.groupby(rows, key=lambda row: (row.unit, row.version))
        return [Saved(tuple(group), self.path.parent) for _, group in grouped]

    @cached_property
    def units(self) -> dict[str, Saved]:
        """The newest version of each unit."""
        return {each.unit: each for each in reversed(self.saved)}

    @cached_property
    def divided(self) -> dict[str, list[Saved]]:
        """The units by the name of what they are shards of: a list with the unit itself where it is complete."""
        found: dict[str, list[Saved]] = {}
        for each in self.units.values():
            found.setdefault(each.rows[0].complete, []).append(each)
        return found

    @property
    def is_save(self) -> bool:
        """Whether units may have several versions."""
        return self.path.name.startswith(SAVE)

    @property
    def files(self) -> set[tuple[str, str]]:
        """Owner and name of every file that it uses."""
        return {(str(row.origin), row.file) for row in self.rows}


def manifest_text(version: int, layout: str, rows: Iterable[Row]) -> str:
    """Return the text of a manifest.

    Raises:
        ValueError: the rows contradict each other, or a name cannot be a file name.
    """
    return to_text(version, layout, [row.to_fields(version) for row in rows])


def read_manifest(path: Location) -> Manifest:
    """Read the manifest in folder `path`.

    Raises:
        CorruptCopy: the manifest is missing, damaged, of another format, or contains names that are not allowed.
    """
    content: bytes | None
    try:
        if isinstance(path, Path):
            content = read_plain(path / MANIFEST, MANIFEST_BYTES)
        else:
            content = path.place.read((path / MANIFEST).key, MANIFEST_BYTES)
    except (OSError, CorruptCopy) as error:
        raise _no_manifest(path, error) from None
    if not content:
        raise _no_manifest(path, "the file is missing" if content is None else "the checkpoint was removed")
    return parsed(path, content)


def parsed(path: Location, content: bytes) -> Manifest:
    """Parse the manifest of a folder; raises as `read_manifest` does."""
    try:
        fields = from_text(content)
    except (ValueError, RecursionError) as error:
        raise _no_manifest(path, error) from None
    version = fields["version"]
    rows = tuple(Row.of_fields(unit, version, path.name) for unit in fields["units"])
    return Manifest(path, version, fields["layout"], rows)


def _no_manifest(path: Location, reason: object) -> CorruptCopy:
    return CorruptCopy(f"{path / MANIFEST} is not a manifest of a checkpoint: {reason}")


# ---- units


def read_units(manifest: Manifest, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors of the newest version of each unit, with checked digests.

    Raises:
        CorruptCopy: a unit is missing, or cannot be read, or does not match its digest.
    """
    by_file: dict[Location, list[Saved]] = {}
    for name in names:
        found = manifest.units.get(name)
        if found is None:
            raise CorruptCopy(f"{manifest.path} has no unit {name}: it was written for another model")
        if found.is_cut:
            raise CorruptCopy(
                f"{manifest.path} has {name} in parts, which only a session can read: expected a checkpoint, which "
                "Checkpoints(interval=...) writes"
            )
        by_file.setdefault(found.files[0], []).append(found)
    if isinstance(manifest.path, Path):
        for path, units in by_file.items():
            yield from _read_file(path, units)
        return
    with ThreadPoolExecutor(READS, thread_name_prefix="evermoe-read") as pool:
        yield from _ahead(pool, [unit for units in by_file.values() for unit in units])


def _ahead(pool: ThreadPoolExecutor, units: Sequence[Saved]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield units in their order, and read some ahead while the previous one is used."""
    left = iter(units)
    coming: deque[Future[list[tuple[str, dict[str, Tensor]]]]] = deque()
    try:
        while True:
            for unit in itertools.islice(left, READS - len(coming)):
                coming.append(pool.submit(lambda unit=unit: list(_read_file(unit.files[0], [unit]))))  # type: ignore[misc]
            if not coming:
                return
            yield from coming.popleft().result()
    finally:
        for each in coming:
            each.cancel()


def _read_file(path: Location, units: Sequence[Saved]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield units of one file."""
    with _tensors_of(path) as read:
        for unit in units:
            tensors = read(unit.unit, unit.tensors)
            found = digest(as_bytes(tensors).numpy())
            if found != unit.digest:
                raise CorruptCopy(
                    f"{unit.unit} in {path}: expected digest {unit.digest:016x}, the bytes have {found:016x}"
                )
            yield unit.unit, tensors


def read_saved(saved: Saved) -> Tensor:
    """Return the unit's bytes, uint8 `[nbytes]`.

    Raises:
        CorruptCopy: a file cannot be read, or the bytes do not match the digest.
    """
    if not saved.is_cut:
        ((_, tensors),) = _read_file(saved.files[0], [saved])
        return as_bytes(tensors)
    parts = []
    for path in saved.files:
        with _tensors_of(path) as read:
            parts.append(as_bytes(read(saved.unit, [BYTES])))
    data = torch.cat(parts)
    if digest(data.numpy()) != saved.digest:
        raise CorruptCopy(f"{saved.unit} of version {saved.version}: its parts do not match the digest")
    return data


@contextlib.contextmanager
def _tensors_of(path: Location) -> Iterator[Callable[[str, Sequence[str]], dict[str, Tensor]]]:
    """Open a file; yield a function that returns some of a unit's tensors in it, by name."""
    with _opened(path) as (descriptor, fetch):
        try:
            # By its descriptor: the library opens the file twice, and another member may remove its name in between.
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as source:

                def read(unit: str, names: Sequence[str]) -> dict[str, Tensor]:
                    keys = {name: f"{unit}/{name}" for name in names}
                    fetch(list(keys.values()))
                    return {name: source.get_tensor(key) for name, key in keys.items()}

                yield read
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{path} cannot be read: {error}") from None


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
