"""Persisted units in an object store, whose objects cannot be renamed; `evermoe.checkpoint.folder` says what is kept.

    URL/persisted/manifests/persisted-VERSION-MEMBER.begun        first
    URL/persisted/persisted-VERSION-MEMBER/units-0.safetensors    tensors as in a folder; units-1, ...
    URL/persisted/manifests/persisted-VERSION-MEMBER.json         last: version, layout, file and digest of every unit
    URL/persisted/manifests/generation-0000000003                 the members of this generation have resumed

The store needs only create-only writes, and lists that show every earlier write. The rules:

1. Whoever creates a manifest decides the outcome of that part of a version. The writer creates the manifest; another
process creates an empty one, and then the part never becomes durable.
2. A writer announces a draft, writes it, looks for a newer generation than its own, and commits. Members that resume
announce their generation, look for drafts, and empty the manifests of rolled back versions. One of the two sees the
other, however long either is suspended in between.
3. Removing its manifest makes a version that no recovery needs non-durable; its files are removed afterwards.
4. Empty manifests stay for a week, so that a delayed request cannot make a rolled back version durable. A manifest that
such a request restores after 3 names files that no longer exist, so no recovery uses it.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from safetensors.torch import save

from evermoe.checkpoint.attempts import EXPIRY_SECONDS, LOOKS, WRITES
from evermoe.checkpoint.folder import PersistedUnit, all_units, folder_name, is_undone, parsed_name, retained_units
from evermoe.checkpoint.manifest import MANIFEST_BYTES, Manifest, parsed
from evermoe.checkpoint.object_store import LOOK_SECONDS, ObjectPath, ObjectStore, hurried
from evermoe.checkpoint.owner import read_owner
from evermoe.checkpoint.saved import Saved, SavedUnit
from evermoe.errors import CorruptCopy, LeftBehind, PersistFailed
from evermoe.process.warn import warn
from evermoe.state.version import generation_of

MANIFESTS = "manifests"
FILE_BYTES = 64 << 20
"""Smaller units share a file up to this size, since a request has a fixed cost."""
_DURABLE, _BEGUN = ".json", ".begun"
_GENERATION = re.compile(r"^generation-(\d{10})$")


class _Part(NamedTuple):
    """A member's part of a version, as listed."""

    version: int
    member: str
    nbytes: int | None = None
    """Bytes of its manifest: 0 if it was given up or rolled back, None while it is undecided."""
    modified: float = 0.0
    """Seconds since 1970 when the manifest was written."""


class _Listed(NamedTuple):
    """The result of listing the store."""

    parts: dict[str, _Part]
    """By name."""
    generations: list[int]


class _Draft(NamedTuple):
    name: str
    version: int
    manifest: str


class PartialBucket:
    """Units that are persisted below a URL; see the module's description.

    Args:
        where: a location below the URL.
        layout: `UnitCatalog.layout` of the model.
        job: the job that writes; None skips the comparison with the owner of the URL.
    """

    first_seconds: float | None = LOOK_SECONDS

    def __init__(self, where: ObjectPath, layout: str, job: str | None = None) -> None:
        self.where, self.layout, self._job = where, layout, job
        self._patient, quick = where.place, hurried(where, LOOK_SECONDS)
        assert isinstance(quick, ObjectPath)
        self._quick = quick.place
        self._read: dict[str, Manifest] = {}
        """Manifests that were read last; they never change. Replaced, never modified."""

    # ---- reads

    def _key(self, name: str) -> str:
        return (self.where / MANIFESTS / name).key

    def _list(self, place: ObjectStore) -> _Listed:
        return _list(ObjectPath(place, self.where.key))

    def _manifests(self, place: ObjectStore, listed: _Listed) -> list[Manifest]:
        """Return the durable manifests, newest first; warn of those that cannot be used."""
        names = sorted((name for name, part in listed.parts.items() if part.nbytes), reverse=True)
        known = {name: self._read[name] for name in names if name in self._read}
        new = [name for name in names if name not in known]
        with ThreadPoolExecutor(LOOKS, thread_name_prefix="evermoe-read") as pool:
            contents = pool.map(lambda name: place.read(self._key(name + _DURABLE), MANIFEST_BYTES), new)
            for name, content in zip(new, contents, strict=True):
                if not content:
                    continue  # removed meanwhile
                try:
                    known[name] = _checked(self.where / name, content, listed.parts[name].version)
                except CorruptCopy as error:
                    warn(f"saved units are ignored: {error}")
        self._read = known
        return [known[name] for name in names if name in known and known[name].layout == self.layout]

    def find_units(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """Return the durable units of all members; see `PartialStore`."""
        place = self._patient if is_patient else self._quick
        return all_units(self._manifests(place, self._list(place)))

    def newest(self, member: str) -> int | None:
        """Return the newest version of which a member's part is durable."""
        parts = self._list(self._quick).parts.values()
        return max((part.version for part in parts if part.nbytes and part.member == member), default=None)

    # ---- writes

    def prepare_for(self, member: str) -> None:
        """Prepare the store for a member; drafts of an earlier start of it never become durable."""
        self._give_up(self._list(self._quick), lambda part: part.member == member)

    def write(self, saved: Saved) -> _Draft:
        """Write a member's part of a version to some files."""
        name = folder_name(saved.version, saved.member)
        self._patient.put(self._key(name + _BEGUN), b"")
        files = {f"units-{at}.safetensors": units for at, units in enumerate(_files(saved.units))}

        def put(file: str) -> None:
            tensors = {key: tensor.contiguous() for key, tensor in saved.tensors(files[file]).items()}
            self._patient.put((self.where / name / file).key, save(tensors))

        with ThreadPoolExecutor(WRITES, thread_name_prefix="evermoe-write") as pool:
            for _ in pool.map(put, files):
                pass
        file_of = {unit: file for file, units in files.items() for unit in units}
        return _Draft(name, saved.version, saved.manifest(self.layout, file_of))

    def commit(self, draft: _Draft, generation: int) -> None:
        """Make a member's part of a version durable, unless other members resumed without it; see `PartialStore`.

        Raises:
            LeftBehind: other members resumed without it.
            PersistFailed: the URL now belongs to another job.
            OSError: the part may not be durable.
        """
        owner = None if self._job is None else read_owner(ObjectPath(self._patient))
        if owner is not None and owner.job != self._job:
            raise PersistFailed(
                f"{self.where} now belongs to job {owner.job!r}, not to {self._job!r}: give each its own URL"
            )
        known = max(generation, generation_of(draft.version))
        newest = max(self._list(self._patient).generations, default=0)
        if newest > known:
            self.discard(draft)
            raise LeftBehind(f"members of generation {newest} persist here, this one is of generation {known}")
        if not self._patient.create(self._key(draft.name + _DURABLE), draft.manifest.encode()):
            self.discard(draft)
            raise LeftBehind(f"{draft.name} was given up by members that continued without this one")

    def discard(self, draft: _Draft) -> None:
        """Remove a draft whose manifest was never sent, or was given up."""
        self._remove_files(draft.name)

    def _remove_files(self, name: str) -> None:
        """Remove the draft's files, then its announcement: until then a reader can see that there are files."""
        self._patient.remove([key for key, _, _ in self._patient.below((self.where / name).key)])
        self._patient.remove([self._key(name + _BEGUN)])

    # ---- removals

    def rewind(self, version: int, generation: int) -> None:
        """Roll back newer versions than this one, saved by earlier generations; `sweep` removes their files."""
        if generation:
            self._quick.create(self._key(f"generation-{generation:010d}"), b"")
        listed = self._list(self._quick)
        if generation and max(listed.generations) > generation:
            raise LeftBehind(f"members of generation {max(listed.generations)} continue without those of {generation}")
        parts = {name: part for name, part in listed.parts.items() if part.nbytes != 0}
        undone = [name for name, part in parts.items() if is_undone(part.version, version, generation)]
        with ThreadPoolExecutor(LOOKS, thread_name_prefix="evermoe-rewind") as pool:
            for _ in pool.map(lambda name: self._quick.put(self._key(name + _DURABLE), b""), undone):
                pass

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Remove versions that no recovery needs, and drafts that the member failed to write."""
        listed = self._list(self._patient)
        durable = self._manifests(self._patient, listed)
        retained = retained_units(durable, may_lag)
        going = [each for each in durable if all((unit, each.version) not in retained for unit in each.units)]
        if going:
            names = [each.path.name for each in going]
            self._patient.remove([self._key(name + _DURABLE) for name in names])
            files = {(each.path.name, file) for each in going for file, _ in each.units.values()}
            self._patient.remove([(self.where / name / file).key for name, file in sorted(files)])
            self._patient.remove([self._key(name + _BEGUN) for name in names])
        self._give_up(listed, lambda part: part.member == member)

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Give up the drafts of other processes, and remove files of rolled back versions; in the background."""
        threading.Thread(target=self._sweep, args=(members, generation), name="evermoe-sweep", daemon=True).start()

    def _sweep(self, members: Collection[str], generation: int, now: float | None = None) -> None:
        with contextlib.suppress(OSError):  # the next sweep repeats it
            listed = self._list(self._patient)
            self._give_up(listed, lambda part: part.member not in members and generation_of(part.version) < generation)
            expired = (time.time() if now is None else now) - EXPIRY_SECONDS
            for name, part in self._list(self._patient).parts.items():
                if part.nbytes == 0:
                    self._remove_files(name)
                    if part.modified < expired:
                        self._patient.remove([self._key(name + _DURABLE)])
            older = sorted(listed.generations)[:-1]
            self._patient.remove([self._key(f"generation-{each:010d}") for each in older])

    def _give_up(self, listed: _Listed, is_given_up: Callable[[_Part], bool]) -> None:
        """Keep undecided parts from becoming durable, and remove their files."""
        for name, part in listed.parts.items():
            if part.nbytes is None and is_given_up(part) and self._patient.create(self._key(name + _DURABLE), b""):
                self._remove_files(name)


def _list(where: ObjectPath) -> _Listed:
    parts: dict[str, _Part] = {}
    shown = []
    for key, nbytes, modified in where.place.below((where / MANIFESTS).key):
        file = key.rpartition("/")[2]
        stem, dot, kind = file.rpartition(".")
        if match := _GENERATION.match(file):
            shown.append(int(match[1]))
        elif (name := parsed_name(stem)) is None:
            continue
        elif dot + kind == _DURABLE:
            parts[stem] = _Part(*name, nbytes, modified)
        elif dot + kind == _BEGUN:
            parts.setdefault(stem, _Part(*name))
    return _Listed(parts, shown)


def generations(where: ObjectPath) -> list[int]:
    """Return the generations that have persisted units at this location, or resumed from it.

    Raises:
        OSError: the location cannot be listed.
    """
    listed = _list(where)
    return [*listed.generations, *(generation_of(part.version) for part in listed.parts.values())]


def _checked(path: ObjectPath, content: bytes, version: int) -> Manifest:
    manifest = parsed(path, content)
    if manifest.version != version:
        raise CorruptCopy(f"{path} is of version {manifest.version}")
    return manifest


def _files(units: Mapping[str, SavedUnit]) -> Iterator[list[str]]:
    """Yield the names of the units of each file."""
    names: list[str] = []
    nbytes = 0
    for name, unit in units.items():
        if names and nbytes + unit.nbytes > FILE_BYTES:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += unit.nbytes
    if names:
        yield names
