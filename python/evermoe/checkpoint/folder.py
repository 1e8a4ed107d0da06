"""The folder of persisted units, which all members share: each file holds a few units of one version.

    FOLDER/persisted-VERSION-MEMBER/manifest.json        version, layout, digest of every unit; renamed last
    FOLDER/persisted-VERSION-MEMBER/units.safetensors    tensors named "<unit>/<piece>", of a part "<unit>/bytes"

Units with a manifest are durable one by one: the newest version of a unit may be in any member's file. A unit that
several members save in parts is durable once all parts of the version are. A version stays as long as a recovery from
this folder alone could use it: members do not persist at the same pace, and an expert's newest version is useless while
a unit that may not lag is older. The two newest versions of each unit always stay: one of them could be damaged, or be
removed when the job rolls back to an earlier version.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evermoe._native import digest, retained_versions
from evermoe.checkpoint.manifest import MANIFEST, Manifest, Part, as_bytes, read_manifest, read_part, read_units
from evermoe.checkpoint.object_store import Location
from evermoe.checkpoint.plain_files import flush, make_folder, write_tensors, write_text
from evermoe.checkpoint.saved import Saved
from evermoe.errors import CorruptCopy, LeftBehind
from evermoe.process.warn import warn
from evermoe.state.version import generation_of

PERSISTED = "persisted"
"""Name of the folder below that of the checkpoints."""
SPARE = 2
"""Number of newest versions of each unit that always stay."""
DATA, DRAFT = "units.safetensors", "manifest.json.writing"
_NAME = re.compile(r"^persisted-(\d{20})-(.+)$")


@dataclass(frozen=True)
class PersistedUnit:
    """A durable version of one unit."""

    unit: str
    version: int
    digest: int
    file: Location
    names: tuple[str, ...]
    """Names of its tensors in the file, in the order of its bytes."""
    parts: tuple[tuple[Location, Part], ...] = ()
    """For a unit that was saved in parts: their files, in the order of its bytes; `file` is the first."""

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`, read on each access; empty if it cannot be read or does not match the digest."""
        try:
            return read_persisted(self)
        except CorruptCopy:
            return torch.empty(0, dtype=torch.uint8)


def find_persisted(folder: Path, layout: str) -> list[PersistedUnit]:
    """Return the durable units of all members with this `UnitCatalog.layout`; by unit, newest version first.

    Unfinished and foreign files are ignored; an unreadable manifest is ignored with a warning.
    """
    return all_units(manifests(folder, layout, MANIFEST))


def all_units(durable: Sequence[Manifest]) -> list[PersistedUnit]:
    """Return the complete units; by unit, newest version first."""
    found = [unit for manifest in durable for unit in units_of(manifest)]
    found += [unit for unit, is_complete in _joined(durable) if is_complete]
    return sorted(found, key=lambda each: (each.unit, -each.version, str(each.file)))


def units_of(manifest: Manifest) -> Iterator[PersistedUnit]:
    """Yield the units that a manifest names, except those of which it has only a part."""
    for unit, (file, value) in manifest.units.items():
        if unit not in manifest.parts:
            found = manifest.folder_of(unit) / file
            yield PersistedUnit(unit, manifest.version, value, found, tuple(manifest.names[unit]))


def _joined(durable: Iterable[Manifest]) -> Iterator[tuple[PersistedUnit, bool]]:
    """Yield the units that were saved in parts, each with whether all its parts were found.

    Example: of the parts 0-64, 0-100 (saved earlier by another member) and 64-200, the first and the last make up a
    unit of 200 bytes.
    """
    found: dict[tuple[str, int, int], list[tuple[Part, Location, tuple[str, ...]]]] = defaultdict(list)
    for manifest in durable:
        for unit, part in manifest.parts.items():
            file, value = manifest.units[unit]
            names = tuple(manifest.names[unit])
            found[unit, manifest.version, value].append((part, manifest.folder_of(unit) / file, names))
    for (unit, version, value), parts in found.items():
        parts.sort(key=lambda each: each[0])
        first, start, names = parts[0]
        until: dict[int, tuple[tuple[Location, Part], ...]] = {0: ()}  # by end offset, the parts up to it
        for part, place, _ in parts:
            if part.start in until:
                until.setdefault(part.end, (*until[part.start], (place, part)))
        chosen = until.get(first.of, ())
        yield PersistedUnit(unit, version, value, chosen[0][0] if chosen else start, names, chosen), bool(chosen)


def read_persisted(found: PersistedUnit) -> Tensor:
    """Return the unit's bytes, uint8 `[nbytes]`.

    Raises:
        CorruptCopy: the bytes do not match the digest, or the file is missing or cannot be read.
    """
    if found.parts:
        data = torch.cat([read_part(file, found.unit) for file, _ in found.parts])
        if digest(data.numpy()) != found.digest:
            raise CorruptCopy(f"{found.unit} of version {found.version}: its parts do not match the digest")
        return data
    units, names = {found.unit: (found.file.name, found.digest)}, {found.unit: list(found.names)}
    ((_, tensors),) = read_units(Manifest(found.file.parent, found.version, units, names), [found.unit])
    return as_bytes(tensors)


def folder_name(version: int, member: str) -> str:
    """Return the folder name of one member's part of one version; names sort by version."""
    return f"persisted-{version:020d}-{member}"


def parsed_name(name: str) -> tuple[int, str] | None:
    """Return the version and the member of a `folder_name`; None for any other name."""
    match = _NAME.match(name)
    return (int(match[1]), match[2]) if match else None


def folders(folder: Path) -> list[tuple[Path, int, str]]:
    """Return (path, version, member) of each folder, finished or not; the newest version first."""
    found = []
    for path in sorted(folder.glob("persisted-*"), reverse=True):
        if (name := parsed_name(path.name)) and not path.is_symlink():
            found.append((path, *name))
    return found


def manifests(folder: Path, layout: str, name: str) -> list[Manifest]:
    """Return the manifests with this file name: `MANIFEST` for durable versions, `DRAFT` for all others.

    Newest first: a reader that finds a version of a member then also finds the versions that the member persisted
    earlier, even while the member continues to persist.
    """
    found = []
    for path, version, _ in folders(folder):
        if not (path / name).exists():
            continue
        try:
            manifest = read_manifest(path, name)
            if manifest.version != version:
                raise CorruptCopy(f"{path / name} is of version {manifest.version}")
        except CorruptCopy as error:
            if name == MANIFEST and (path / name).exists():  # it may have been removed meanwhile
                warn(f"saved units are ignored: {error}")
            continue
        if manifest.layout == layout:
            found.append(manifest)
    return found


def prune(folder: Path, layout: str, may_lag: Container[str]) -> None:
    """Remove the files whose units are all superseded, and what a killed member left unfinished.

    Members may prune concurrently: one that does not see the newest files removes less.
    """
    durable = manifests(folder, layout, MANIFEST)
    retained = retained_units(durable, may_lag)
    for manifest in durable:
        if all((unit, manifest.version) not in retained for unit in manifest.units):
            remove(manifest.path)
    for draft in manifests(folder, layout, DRAFT):
        retained = retained_units([*durable, draft], may_lag)
        if all((unit, draft.version) not in retained for unit in draft.units):
            remove(draft.path)


def retained_units(durable: Sequence[Manifest], may_lag: Container[str]) -> set[tuple[str, int]]:
    """Return the (unit, version) pairs that must stay."""
    complete: dict[str, set[int]] = {unit: set() for manifest in durable for unit in manifest.units}
    partial: dict[str, set[int]] = {unit: set() for unit in complete}
    for manifest in durable:
        for unit in manifest.units.keys() - manifest.parts.keys():
            complete[unit].add(manifest.version)
    for found, is_complete in _joined(durable):
        (complete if is_complete else partial)[found.unit].add(found.version)
    lagging = [index for index, unit in enumerate(complete) if unit in may_lag]
    versions = [sorted(found) for found in complete.values()]
    stay = retained_versions(versions, [sorted(each) for each in partial.values()], _open(durable), lagging, SPARE)
    return {(unit, version) for unit, kept in zip(complete, stay, strict=True) for version in kept}


def _open(durable: Iterable[Manifest]) -> list[int]:
    """Return versions that may still gain units. Each member saves in order and never returns to a skipped version."""
    saved: dict[str, set[int]] = defaultdict(set)
    savers: dict[int, set[str]] = defaultdict(set)
    for manifest in durable:
        if name := parsed_name(manifest.path.name):
            saved[name[1]].add(manifest.version)
        savers[manifest.version] |= set(manifest.members)
    return [
        version
        for version, members in sorted(savers.items())
        if not all(version in saved[each] for each in members)
        and all(version in saved[each] or max(saved[each], default=0) < version for each in members)
    ]


def is_undone(saved: int, version: int, generation: int) -> bool:
    """Return whether a rollback to a version by members of a generation discards a saved version; 0: any generation."""
    return saved > version and not (generation and generation_of(saved) >= generation)


def sweep(folder: Path, members: Container[str]) -> None:
    """Remove unfinished folders of other members: whoever wrote or removed them is dead or was left behind."""
    for path, _, owner in folders(folder):
        if owner not in members and not (path / MANIFEST).exists():
            remove(path)


def remove(path: Location) -> None:
    """Remove a version: rename its manifest first, delete the renamed one last so that `prune` can identify it.

    Subfolders that somebody added stay, and so does the version's folder in that case.
    """
    assert isinstance(path, Path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        os.rename(path / MANIFEST, path / DRAFT)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        for name in sorted(files, key=lambda name: name == DRAFT):
            (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another member was faster, or a reader still has a file open (NFS)
        path.rmdir()


class PartialFolder:
    """The folder of persisted units, as one member writes to it; see `evermoe.checkpoint.partial_store.PartialStore`.

    Args:
        where: shared by all members; created by `prepare_for` if it is missing.
        layout: `UnitCatalog.layout` of the model.
    """

    first_seconds: float | None = None

    def __init__(self, where: Path, layout: str) -> None:
        self.where, self.layout = where, layout

    def find_units(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """Return the durable units of all members."""
        return find_persisted(self.where, self.layout)

    def newest(self, member: str) -> int | None:
        """Return the newest version of which a member's part is durable."""
        durable = manifests(self.where, self.layout, MANIFEST)
        return max((m.version for m in durable if m.path.name == folder_name(m.version, member)), default=None)

    def prepare_for(self, member: str) -> None:
        """Prepare the folder for a member; remove what an earlier start of it left unfinished."""
        make_folder(self.where)
        for path, _, owner in folders(self.where):
            if owner == member and not (path / MANIFEST).exists():
                remove(path)

    def write(self, saved: Saved) -> Path:
        """Write a draft. The manifest comes first, under another name: `prune` then identifies an abandoned draft."""
        path = self.where / folder_name(saved.version, saved.member)
        remove(path)  # left by a failed attempt
        path.mkdir()
        write_text(path / DRAFT, saved.manifest(self.layout, dict.fromkeys(saved.units, DATA)))
        write_tensors(path / DATA, saved.tensors(saved.units))
        flush(path)
        return path

    def commit(self, draft: Path, generation: int) -> None:
        """Rename the draft's manifest, which makes the draft durable.

        Raises:
            LeftBehind: members of a newer generation persist to this folder.
            OSError: the new name may not be on disk.
        """
        name = parsed_name(draft.name)
        assert name is not None
        known = max(generation, generation_of(name[0]))
        if any(generation_of(found) > known for _, found, _ in folders(self.where)):  # may be another model's
            durable = manifests(self.where, self.layout, MANIFEST)
            newest = max((generation_of(each.version) for each in durable), default=0)
            if newest > known:
                remove(draft)
                raise LeftBehind(f"members of generation {newest} persist here, this one is of generation {known}")
        os.rename(draft / DRAFT, draft / MANIFEST)
        flush(draft)
        flush(self.where)

    def discard(self, draft: Path) -> None:
        """Remove a draft."""
        remove(draft)

    def rewind(self, version: int, generation: int) -> None:
        """Remove newer versions than this one, saved by members of earlier generations; 0: by any member."""
        for manifest in manifests(self.where, self.layout, MANIFEST):
            if is_undone(manifest.version, version, generation):
                remove(manifest.path)

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Remove what no recovery needs any more."""
        prune(self.where, self.layout, may_lag)

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Remove what processes other than the members of a generation left unfinished."""
        sweep(self.where, members)
