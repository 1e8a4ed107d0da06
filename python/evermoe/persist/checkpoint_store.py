"""Checkpoints wherever they are: a folder or an object store behind the same few functions, by what the place is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from evermoe.errors import CorruptCopy
from evermoe.persist import attempts, checkpoint_folder
from evermoe.persist.attempts import ATTEMPT, LOOKS, Attempts, Cleaner, Found, give_up_older, scan, write_index
from evermoe.persist.checkpoint_bucket import CheckpointBucket
from evermoe.persist.checkpoint_folder import CheckpointFolder, Stored
from evermoe.persist.folder import PersistedUnit, units_of
from evermoe.persist.manifest import MANIFEST, Entry, Manifest, read_manifest
from evermoe.persist.object_store import Location, ObjectPath, locate_below
from evermoe.persist.owner import Owner, no_job, read_owner
from evermoe.persist.retention import NEWEST, Retention
from evermoe.run_claim import Run
from evermoe.state.unit import Unit
from evermoe.state.version import step_of
from evermoe.warn import warn


class CheckpointStore(Protocol):
    """A job's checkpoints, as one member writes them; `CheckpointFolder` and `CheckpointBucket` have the details.

    An attempt at a checkpoint is a draft: every rank writes its units to it, then rank 0 publishes it. It is complete
    from then on, and nothing of it is there before. It is published after all that it replaces, so a job always has
    the checkpoint before; and one that was given up never becomes one.
    """

    @property
    def directory(self) -> Any:
        """Where the checkpoints are."""

    def newest_generation(self) -> int:
        """The newest generation that wrote here."""

    def found(self) -> Run | None:
        """The run that the place belongs to: of living members, where it has locks."""

    def take(self, run: Run, patience: float) -> None:
        """Takes the place for a run; see `evermoe.run_claim`.

        Raises:
            FolderInUse: members of another run live and hold it.
        """

    def draft(self, version: int, generation: int, attempt: str) -> Any:
        """Where the members of a generation write a version."""

    def write(self, draft: Any, rank: int, units: Mapping[str, tuple[Unit, Tensor]]) -> Mapping[str, Entry]:
        """Writes a rank's units, and says where they are."""

    def publish(self, draft: Any, version: int, manifest: str) -> Any:
        """Makes a draft the checkpoint of its version, and removes what that supersedes."""

    def discard(self, draft: Any) -> None:
        """Removes a draft, unless it has become a checkpoint."""

    def sweep(self, generation: int) -> None:
        """Removes what the members of older generations have left."""

    def close(self) -> None:
        """Lets other jobs have the place."""


def open_store(where: Location, owner: Owner, member: str, retention: Retention = NEWEST) -> CheckpointStore:
    """The checkpoints at a place, for a member that writes; see `CheckpointFolder` and `CheckpointBucket`.

    Raises:
        ValueError: another job runs there, or the checkpoints are of another model.
        OSError: it cannot be written there.
    """
    if isinstance(where, ObjectPath):
        return CheckpointBucket(where.place, owner, member, retention)
    return CheckpointFolder(where, owner, member, retention)


def is_read_only(where: Location) -> bool:
    """Whether a place is a URL to which nothing can be written, whatever the credentials."""
    return isinstance(where, ObjectPath) and where.place.is_read_only


def find(where: Location, layout: str | None = None) -> Mapping[int, Location]:
    """Complete checkpoints by version, as `checkpoint_folder.find` has it.

    Raises:
        OSError: an object store did not answer.
    """
    if isinstance(where, ObjectPath):
        return {found.version: found.manifest.path for found in _scan(where, layout)}
    return checkpoint_folder.find(where, layout)


def _scan(where: ObjectPath, layout: str | None = None) -> list[Found]:
    if not is_single(where):
        return scan(where.place, layout, tells=True)
    try:
        manifest = read_manifest(locate_below(where.place.url))
        if layout is not None and manifest.layout != layout:
            raise CorruptCopy(f"{where} belongs to another model or optimizer")
    except CorruptCopy as error:
        warn(f"a checkpoint is passed over: {error}")
        return []
    return [Found(manifest.version, 0, manifest)]


def is_single(where: Location) -> bool:
    """Whether a place is the URL of one checkpoint, which can only be read."""
    return isinstance(where, ObjectPath) and where.place.is_read_only and bool(ATTEMPT.match(where.name))


def find_saved(where: Location, layout: str) -> list[PersistedUnit]:
    """The units of all complete checkpoints of this layout; raises as `find` does."""
    if isinstance(where, ObjectPath):
        return [unit for found in _scan(where, layout) for unit in units_of(found.manifest)]
    return checkpoint_folder.find_saved(where, layout)


def stored(where: Location) -> list[Stored]:
    """The complete checkpoints, older versions first; what cannot be used is passed over with a warning.

    Raises:
        OSError: the place cannot be read.
    """
    if not isinstance(where, ObjectPath):
        return checkpoint_folder.stored(where)
    return [
        Stored(
            found.manifest.path,
            step_of(found.version),
            found.version,
            _nbytes(found.manifest),
            len(found.manifest.units),
        )
        for found in _scan(where)
    ]


def _nbytes(manifest: Manifest) -> int:
    """Bytes of all files that a checkpoint in an object store uses, its manifest among them."""
    path = manifest.path
    assert isinstance(path, ObjectPath)
    files = {(manifest.folder_of(unit) / file) for unit, (file, _) in manifest.units.items()} | {path / MANIFEST}
    with ThreadPoolExecutor(LOOKS) as pool:
        return sum(pool.map(lambda file: path.place.size(_key(file)) or 0, files))


def _key(file: Location) -> str:
    assert isinstance(file, ObjectPath)
    return file.key


def owner_of(where: Location) -> Owner | None:
    """The job that a place belongs to; None if it names none that can be read.

    Raises:
        OSError: an object store did not answer.
    """
    return read_owner(where)


def superseded(where: Location, retention: Retention) -> list[Location]:
    """The checkpoints that a retention does not keep, older ones first; raises as `stored` does."""
    if not isinstance(where, ObjectPath):
        return list(checkpoint_folder.superseded(where, retention))
    return [found.path for found in attempts.superseded(Attempts(where.place).look(), retention)]


def prune(where: Location, retention: Retention, *, abandoned: bool = False) -> Iterator[Location]:
    """Removes the checkpoints that a retention does not keep, and tells each one.

    Args:
        where: no job runs there.
        retention: what stays.
        abandoned: whether attempts of jobs that died are given up, too.

    Raises:
        ValueError: a job runs there, or an attempt is undecided.
        OSError: the place cannot be read or written.
    """
    if not isinstance(where, ObjectPath):
        with no_job(where):
            for path in checkpoint_folder.superseded(where, retention):
                checkpoint_folder.remove(path)
                yield path
        return
    seen = Attempts(where.place)
    if abandoned:
        give_up_older(seen, None)
    known = seen.look()
    undecided = [name for name, each in known.items() if each.is_open]
    if undecided:
        raise ValueError(
            f"{where}: {undecided[0]} is being written, or was begun by a job that died: if no job runs there, give it "
            "up with --abandoned"
        )
    cleaner = Cleaner(seen)
    for found in attempts.superseded(known, retention):
        cleaner.remove(found.path.name)
        yield found.path
    write_index(seen)
    cleaner.clean(now=time.time())
