"""Attempts at checkpoints and saves in an object store: finds complete ones, and removes files that nothing uses.

The rules are at the head of `evermoe.checkpoint.checkpoint_bucket`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from evermoe.checkpoint.manifest import CHECKPOINT, MANIFEST, MANIFEST_BYTES, SAVE, Manifest, parsed
from evermoe.checkpoint.object_store import ObjectPath, ObjectStore
from evermoe.errors import CorruptCopy
from evermoe.process.warn import warn
from evermoe.state.version import step_of

INDEX = "index.json"
LOOKS = 8
"""Manifests that are read concurrently."""
WRITES = 4
"""Files that a member writes concurrently; it holds this number of files in memory."""
EXPIRY_SECONDS = 7 * 86400.0
"""Age at which an empty manifest is removed."""
ATTEMPT = re.compile(rf"^({CHECKPOINT}|{SAVE})-(\d{{8,}})(?:\.(\d{{10}})-\w+|-\d+)?$")
"""Names of attempts: kind, step, and generation of the members that write."""


class Known(NamedTuple):
    """State of an attempt."""

    manifest: Manifest | None
    """None while the attempt is undecided, and after it was given up or removed."""
    is_over: bool = False
    """Whether it was given up or removed, which is final."""
    nbytes: int = 0
    """Bytes of the manifest."""
    problem: str = ""
    """Reason why the manifest cannot be used."""

    @property
    def is_open(self) -> bool:
        """Whether it may still become a checkpoint."""
        return self.manifest is None and not self.is_over and not self.problem


class Attempts:
    """The attempts below a URL, with a cache of what cannot change any more.

    A decided attempt stays decided: its manifest never changes, except that it may be emptied.
    """

    def __init__(self, place: ObjectStore) -> None:
        self.place = place

    def read_all(self) -> dict[str, Known]:
        """Return all attempts by name, in their current state.

        Raises:
            OSError: the attempts cannot be listed or read.
        """
        names = [name for name in self._names() if ATTEMPT.match(name)]
        with ThreadPoolExecutor(LOOKS) as pool:
            found = dict(zip(names, pool.map(self._look_at, names), strict=True))
        _seen[self.place.url] = found
        return found

    def _names(self) -> list[str]:
        if not self.place.is_read_only:
            return self.place.names()
        content = self.place.read(INDEX, MANIFEST_BYTES)
        if content is None:
            raise FileNotFoundError(
                2,
                f"{self.place.url} has no {INDEX}, and HTTP cannot list files: expected a folder to which a job "
                "has written by another URL, or the URL of a checkpoint",
            )
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return [str(name) for name in json.loads(content)["checkpoints"]]
        raise CorruptCopy(f"{self.place.url}/{INDEX} is not a list of checkpoints")

    def _look_at(self, name: str) -> Known:
        key, path = f"{name}/{MANIFEST}", ObjectPath(self.place, name)
        seen = _seen.get(self.place.url, {}).get(name)
        if seen is not None and seen.is_over:
            return seen
        if seen is not None and seen.manifest is not None and self.place.size(key) == seen.nbytes:
            return seen._replace(manifest=replace(seen.manifest, path=path))
        try:
            content = self.place.read(key, MANIFEST_BYTES)
            if not content:
                return Known(None, is_over=content is not None)
            return Known(parsed(path, content), nbytes=len(content))
        except CorruptCopy as error:
            return Known(None, problem=str(error))


_seen: dict[str, dict[str, Known]] = {}
"""The latest state that this process has read, by URL. A value is replaced, never modified."""


def files_of(known: Iterable[Known]) -> set[tuple[str, str]]:
    """Return the attempt and the name of every file that checkpoints and saves use."""
    return {file for each in known if each.manifest is not None for file in each.manifest.files}


class Found(NamedTuple):
    """A complete checkpoint."""

    version: int
    writing: int
    """Generation of the members that wrote it."""
    manifest: Manifest

    @property
    def path(self) -> ObjectPath:
        """Location of the checkpoint."""
        path = self.manifest.path
        assert isinstance(path, ObjectPath)
        return path


def scan(
    place: ObjectStore, layout: str | None = None, kinds: Collection[str] = (CHECKPOINT,), *, warns: bool = False
) -> list[Found]:
    """Return what is complete, older versions first; of one version, the one written last comes last.

    Raises:
        OSError: the checkpoints cannot be listed or read.
        CorruptCopy: the list of a read-only store is damaged.
    """
    return sort(Attempts(place).read_all(), layout, kinds, warns=warns)


def sort(
    known: Mapping[str, Known],
    layout: str | None = None,
    kinds: Collection[str] = (CHECKPOINT,),
    *,
    warns: bool = False,
) -> list[Found]:
    """Return what is complete of a layout in the order of `scan`; warn of what cannot be used."""
    found = []
    for name, each in known.items():
        match = ATTEMPT.match(name)
        assert match is not None
        if match[1] not in kinds:
            continue
        problem, manifest = each.problem, each.manifest
        if manifest is not None and step_of(manifest.version) != int(match[2]):
            problem = f"{manifest.path / MANIFEST} is of step {step_of(manifest.version)}"
        elif manifest is not None and layout is not None and manifest.layout != layout:
            problem = f"{manifest.path} belongs to another model or optimizer"
        if problem and warns:
            warn(f"a checkpoint is ignored: {problem}")
        elif not problem and manifest is not None:
            found.append(Found(manifest.version, int(match[3] or 0), manifest))
    return sorted(found, key=lambda each: (each.version, each.writing, each.path.name))


class Cleaner:
    """Gives attempts up, removes checkpoints, and then removes the files that nothing uses any more."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts, self._place = attempts, attempts.place

    def give_up(self, name: str) -> bool:
        """Keep an attempt from becoming a checkpoint; return False if it already is one.

        Raises:
            OSError: the outcome is unknown.
        """
        return self._place.create(f"{name}/{MANIFEST}", b"")

    def remove_checkpoint(self, name: str) -> None:
        """Empty the manifest of a checkpoint, which makes it invalid; its files remain.

        Raises:
            OSError: it may still be a checkpoint.
        """
        self._place.put(f"{name}/{MANIFEST}", b"")

    def remove_files(self, names: Collection[str] | None = None, now: float | None = None) -> bool:
        """Remove the files of decided attempts unless a checkpoint uses them; return False if it is too early.

        Args:
            names: of the attempts to clean; None for all.
            now: seconds since 1970, by which empty manifests expire; None keeps all of them.

        Raises:
            OSError: some files remain.
        """
        known = self._attempts.read_all()
        if any(each.is_open for each in known.values()):
            return False
        used = files_of(known.values())
        over = {name for name, each in known.items() if each.is_over}
        for name in sorted(over if names is None else over & set(names)):
            self._clean_one(name, used, now)
        return True

    def _clean_one(self, name: str, used: Collection[tuple[str, str]], now: float | None) -> None:
        found = {key.rpartition("/")[2]: modified for key, _, modified in self._place.below(name)}
        going = [file for file in found if file != MANIFEST and (name, file) not in used]
        if now is not None and len(going) == len(found) - 1 and now - found.get(MANIFEST, now) > EXPIRY_SECONDS:
            going.append(MANIFEST)  # removed last
        if going:
            self._place.remove([f"{name}/{file}" for file in going])


def give_up_older(attempts: Attempts, generation: int | None) -> None:
    """Give up all attempts of earlier generations; None: of all generations.

    Raises:
        OSError: some attempts may remain.
    """
    for name, each in attempts.read_all().items():
        match = ATTEMPT.match(name)
        if each.is_open and match and (generation is None or int(match[3] or 0) < generation):
            Cleaner(attempts).give_up(name)


def write_index(attempts: Attempts) -> None:
    """Write the names of the checkpoints for readers that cannot list; the file may lag behind the store.

    Raises:
        OSError: the file cannot be written.
    """
    names = [each.path.name for each in sort(attempts.read_all())]
    attempts.place.put(INDEX, json.dumps({"checkpoints": names}).encode())
