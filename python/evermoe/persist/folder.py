"""The folder of persisted units, which all members share: a few units a file, each of its own version.

    FOLDER/persisted-VERSION-MEMBER/manifest.json        version, layout, digest of every unit; gets its name last
    FOLDER/persisted-VERSION-MEMBER/units.safetensors    tensors named "<unit>/<piece>", of a part "<unit>/bytes"

What has a manifest is durable, unit by unit: the newest version of a unit may be in any member's file. A unit that
several members save in parts is durable once all parts of the version are. A version stays
as long as a recovery from this folder alone would take it: members do not persist at one pace, and an expert's newest
version is of no use while that of a unit that may not lag is older. The two newest of each unit stay in any case: one
could be damaged, or go when the job goes back to a version before it.
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
from evermoe.errors import CorruptCopy, LeftBehind
from evermoe.persist.manifest import MANIFEST, Manifest, Part, as_bytes, read_manifest, read_part, read_units
from evermoe.persist.object_store import Location
from evermoe.persist.plain_files import flush, make_folder, write_tensors, write_text
from evermoe.persist.saved import Saved
from evermoe.state.version import generation_of
from evermoe.warn import warn

PERSISTED = "persisted"
"""Name of the folder below that of the checkpoints."""
SPARE = 2
"""How many of the newest versions of each unit stay in any case."""
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
    """Where it was saved in parts: their files, in the order of its bytes; `file` is the first."""

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`, read when it is asked for; empty if it cannot be read or does not match the digest."""
        try:
            return read_persisted(self)
        except CorruptCopy:
            return torch.empty(0, dtype=torch.uint8)


def find_persisted(folder: Path, layout: str) -> list[PersistedUnit]:
    """Finds the durable units of all members with this `UnitCatalog.layout`; by unit, newest version first.

    What is unfinished or foreign is passed over; so is what has an unreadable manifest, with a warning.
    """
    return all_units(manifests(folder, layout, MANIFEST))


def all_units(durable: Sequence[Manifest]) -> list[PersistedUnit]:
    """The units that are there whole; by unit, newest version first."""
    found = [unit for manifest in durable for unit in units_of(manifest)]
    found += [whole for whole, is_whole in _joined(durable) if is_whole]
    return sorted(found, key=lambda each: (each.unit, -each.version, str(each.file)))


def units_of(manifest: Manifest) -> Iterator[PersistedUnit]:
    """The units that a manifest names, without those that are there in part."""
    for unit, (file, value) in manifest.units.items():
        if unit not in manifest.parts:
            found = manifest.folder_of(unit) / file
            yield PersistedUnit(unit, manifest.version, value, found, tuple(manifest.names[unit]))


def _joined(durable: Iterable[Manifest]) -> Iterator[tuple[PersistedUnit, bool]]:
    """The units that were saved in parts, and whether all parts are there.

    Example: the parts from 0 to 64, from 0 to 100, which another member saved before, and from 64 to 200 are a unit of
    200 bytes: the first and the last.
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
        until: dict[int, tuple[tuple[Location, Part], ...]] = {0: ()}  # by end, the parts before it
        for part, place, _ in parts:
            if part.start in until:
                until.setdefault(part.end, (*until[part.start], (place, part)))
        chosen = until.get(first.of, ())
        yield PersistedUnit(unit, version, value, chosen[0][0] if chosen else start, names, chosen), bool(chosen)


def read_persisted(found: PersistedUnit) -> Tensor:
    """The unit's bytes, uint8 `[nbytes]`.

    Raises:
        CorruptCopy: they do not match the digest, or the file is gone or cannot be read.
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
    """Folder name of one member's part of one version; names sort by version."""
    return f"persisted-{version:020d}-{member}"


def parsed_name(name: str) -> tuple[int, str] | None:
    """Version and member of a `folder_name`; None for any other name."""
    match = _NAME.match(name)
    return (int(match[1]), match[2]) if match else None


def folders(folder: Path) -> list[tuple[Path, int, str]]:
    """(path, version, member) of what is in the folder, finished or not; the newest version first."""
    found = []
    for path in sorted(folder.glob("persisted-*"), reverse=True):
        if (name := parsed_name(path.name)) and not path.is_symlink():
            found.append((path, *name))
    return found


def manifests(folder: Path, layout: str, name: str) -> list[Manifest]:
    """Manifests with this file name: `MANIFEST` for what is durable, `DRAFT` for what is not yet, or no longer.

    Newest first: who finds a version of a member then finds those that it persisted before, also while it continues.
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
                warn(f"saved units are passed over: {error}")
            continue
        if manifest.layout == layout:
            found.append(manifest)
    return found


def prune(folder: Path, layout: str, may_lag: Container[str]) -> None:
    """Removes the files of which no unit is needed any more, also what a killed member left half done.

    Members may do it at the same time: one that does not see the newest files removes less.
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
    """(unit, version) of what must stay."""
    whole: dict[str, set[int]] = {unit: set() for manifest in durable for unit in manifest.units}
    partial: dict[str, set[int]] = {unit: set() for unit in whole}
    for manifest in durable:
        for unit in manifest.units.keys() - manifest.parts.keys():
            whole[unit].add(manifest.version)
    for found, is_whole in _joined(durable):
        (whole if is_whole else partial)[found.unit].add(found.version)
    lagging = [index for index, unit in enumerate(whole) if unit in may_lag]
    versions = [sorted(found) for found in whole.values()]
    stay = retained_versions(versions, [sorted(each) for each in partial.values()], _open(durable), lagging, SPARE)
    return {(unit, version) for unit, kept in zip(whole, stay, strict=True) for version in kept}


def _open(durable: Iterable[Manifest]) -> list[int]:
    """Versions of which more may come: each member saves in order, so that what it left out never does."""
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
    """Whether what is saved is taken back by members of a generation that go on from a version; 0: of any."""
    return saved > version and not (generation and generation_of(saved) >= generation)


def sweep(folder: Path, members: Container[str]) -> None:
    """Removes what is not durable and of none of these members: who wrote or removed it is dead, or was left behind."""
    for path, _, owner in folders(folder):
        if owner not in members and not (path / MANIFEST).exists():
            remove(path)


def remove(path: Location) -> None:
    """Removes a version: first it ceases to be durable; until its last byte is gone, `prune` knows what it was.

    Folders that somebody has put there stay, and so does the version's then.
    """
    assert isinstance(path, Path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        os.rename(path / MANIFEST, path / DRAFT)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        for name in sorted(files, key=lambda name: name == DRAFT):
            (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another member was quicker, or a reader's file is still there (NFS)
        path.rmdir()


class PartialFolder:
    """The folder, as one member writes to it; see `evermoe.persist.partial_store.PartialStore`.

    Args:
        where: shared by all members; made by `join` if it is missing.
        layout: `UnitCatalog.layout` of the model.
    """

    first_seconds: float | None = None

    def __init__(self, where: Path, layout: str) -> None:
        self.where, self.layout = where, layout

    def find(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """The durable units of all members."""
        return find_persisted(self.where, self.layout)

    def newest(self, member: str) -> int | None:
        """The newest version of which a member's part is durable."""
        durable = manifests(self.where, self.layout, MANIFEST)
        return max((m.version for m in durable if m.path.name == folder_name(m.version, member)), default=None)

    def join(self, member: str) -> None:
        """A member begins to write here; removes what an earlier start of it has left half done."""
        make_folder(self.where)
        for path, _, owner in folders(self.where):
            if owner == member and not (path / MANIFEST).exists():
                remove(path)

    def write(self, saved: Saved) -> Path:
        """Everything but the manifest's name. The manifest comes first, so that `prune` knows what a dead draft was."""
        path = self.where / folder_name(saved.version, saved.member)
        remove(path)  # what a failed attempt left
        path.mkdir()
        write_text(path / DRAFT, saved.manifest(self.layout, dict.fromkeys(saved.units, DATA)))
        write_tensors(path / DATA, saved.tensors(saved.units))
        flush(path)
        return path

    def commit(self, draft: Path, generation: int) -> None:
        """Gives the manifest its name.

        Raises:
            LeftBehind: newer members persist here.
            OSError: the name may not be on disk.
        """
        name = parsed_name(draft.name)
        assert name is not None
        known = max(generation, generation_of(name[0]))
        if any(generation_of(found) > known for _, found, _ in folders(self.where)):  # it might be another model's
            durable = manifests(self.where, self.layout, MANIFEST)
            newest = max((generation_of(each.version) for each in durable), default=0)
            if newest > known:
                remove(draft)
                raise LeftBehind(f"members of generation {newest} persist here, this one is of generation {known}")
        os.rename(draft / DRAFT, draft / MANIFEST)
        flush(draft)
        flush(self.where)

    def discard(self, draft: Path) -> None:
        """Removes a draft."""
        remove(draft)

    def rewind(self, version: int, generation: int) -> None:
        """Removes what is newer than a version and of members before a generation; 0: of all members."""
        for manifest in manifests(self.where, self.layout, MANIFEST):
            if is_undone(manifest.version, version, generation):
                remove(manifest.path)

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Removes what no recovery needs any more."""
        prune(self.where, self.layout, may_lag)

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Removes what others than the members of a generation have left half done."""
        sweep(self.where, members)
