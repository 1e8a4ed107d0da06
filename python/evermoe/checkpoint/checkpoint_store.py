"""The same interface to checkpoints in a folder and in an object store."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from evermoe.checkpoint import checkpoint_folder
from evermoe.checkpoint.attempts import ATTEMPT, LOOKS, Attempts, Cleaner, Found, give_up_older, scan, sort, write_index
from evermoe.checkpoint.checkpoint_bucket import CheckpointBucket
from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, Stored
from evermoe.checkpoint.manifest import CHECKPOINT, MANIFEST, Manifest, Row, read_manifest
from evermoe.checkpoint.object_store import Location, ObjectPath, locate_below
from evermoe.checkpoint.owner import Owner, no_job
from evermoe.checkpoint.retention import NEWEST, Retention
from evermoe.checkpoint.unit_share import Share
from evermoe.checkpoint.verified_mark import superseded_of, verified_at
from evermoe.errors import CorruptCopy
from evermoe.process.run_claim import Run
from evermoe.process.warn import warn


class CheckpointStore(Protocol):
    """A job's checkpoints, as one member writes them; see `CheckpointFolder` and `CheckpointBucket` for the details.

    An attempt at a checkpoint is a draft: every rank writes its units to it, then rank 0 publishes it. Only then does
    it appear, complete. Superseded checkpoints are removed after that, so a job always has a checkpoint. A draft that
    was given up never becomes one.

    A save is written the same way. It contains some units, and names the files of all others in earlier saves. These
    files stay as long as a save names them.
    """

    awaited: set[int]
    """Versions of checkpoints that stay until it is known whether they are verified, and their marks are written."""

    @property
    def directory(self) -> Any:
        """Folder or URL of the checkpoints."""

    def newest_generation(self) -> int:
        """Return the newest generation that wrote here."""

    def found(self) -> Run | None:
        """Return the run that the store belongs to; where the store has locks, only a run with living members."""

    def claim_for(self, run: Run, patience: float) -> None:
        """Claim the store for a run; see `evermoe.process.run_claim`.

        Raises:
            FolderInUse: living members of another run hold it.
        """

    def newest_save(self, version: int, generation: int) -> Manifest | None:
        """Return the newest save after a recovery; remove saves of newer versions, which the recovery has undone.

        Args:
            version: the version from which the job resumed.
            generation: generation of the members that resumed. Their own saves stay.

        Raises:
            OSError: an object store did not answer.
        """

    def draft(self, version: int, generation: int, attempt: str, kind: str = CHECKPOINT) -> Any:
        """Return the location where the members of a generation write a version: of a checkpoint, or of a save."""

    def write(self, draft: Any, rank: int, shares: Collection[Share]) -> list[Row]:
        """Write a rank's shares and return their rows for the manifest."""

    def publish(self, draft: Any, version: int, manifest: str) -> Any:
        """Turn a draft into the checkpoint or save of its version, and remove those that it supersedes."""

    def remove_superseded(self, written: Any, version: int) -> None:
        """Remove the older checkpoints that need not stay, as the one of a version was written or verified."""

    def discard(self, draft: Any) -> None:
        """Remove a draft unless it has become a checkpoint."""

    def sweep(self, generation: int) -> None:
        """Remove what the members of older generations left behind."""

    def close(self) -> None:
        """Release the store for other jobs."""


def open_store(where: Location, owner: Owner, member: str, retention: Retention = NEWEST) -> CheckpointStore:
    """Open the checkpoints at a location for a member that writes; see `CheckpointFolder` and `CheckpointBucket`.

    Raises:
        ValueError: another job runs at the location, or the checkpoints are of another model.
        OSError: the location cannot be written to.
    """
    if isinstance(where, ObjectPath):
        return CheckpointBucket(where.place, owner, member, retention)
    return CheckpointFolder(where, owner, member, retention)


def is_read_only(where: Location) -> bool:
    """Return whether a location is a URL that cannot be written to, whatever the credentials."""
    return isinstance(where, ObjectPath) and where.place.is_read_only


def find(where: Location, layout: str | None = None) -> Mapping[int, Location]:
    """Return the complete checkpoints by version, as `checkpoint_folder.find` does.

    Raises:
        OSError: an object store did not answer.
    """
    if isinstance(where, ObjectPath):
        return {found.version: found.manifest.path for found in _scan(where, layout)}
    return checkpoint_folder.find(where, layout)


def find_manifests(where: Location, layout: str, kinds: Collection[str]) -> list[Manifest]:
    """Return the manifests of checkpoints, of saves, or of both, older ones first; raises as `find` does."""
    if isinstance(where, ObjectPath):
        return [found.manifest for found in _scan(where, layout, kinds)]
    return checkpoint_folder.find_manifests(where, layout, kinds)


def newest_verified(where: Location) -> tuple[int, Location] | None:
    """Return version and location of the newest verified checkpoint; raises as `find` does."""
    found = reversed([*find(where).items()])
    return next(((version, path) for version, path in found if verified_at(path, version) is not None), None)


def verified_or_saves(manifests: Collection[Manifest]) -> list[Manifest]:
    """Return the manifests without those of unverified checkpoints; raises as `find` does."""
    with ThreadPoolExecutor(LOOKS) as pool:
        steps = pool.map(lambda each: verified_at(each.path, each.version), manifests)
        return [each for each, step in zip(manifests, steps, strict=True) if each.is_save or step is not None]


def _scan(where: ObjectPath, layout: str | None = None, kinds: Collection[str] = (CHECKPOINT,)) -> list[Found]:
    if not is_single(where):
        return scan(where.place, layout, kinds, warns=True)
    try:
        manifest = read_manifest(locate_below(where.place.url))
        if layout is not None and manifest.layout != layout:
            raise CorruptCopy(f"{where} belongs to another model or optimizer")
    except CorruptCopy as error:
        warn(f"a checkpoint is ignored: {error}")
        return []
    return [Found(manifest.version, 0, manifest)]


def is_single(where: Location) -> bool:
    """Return whether a location is the URL of one checkpoint, which is read-only."""
    return isinstance(where, ObjectPath) and where.place.is_read_only and bool(ATTEMPT.match(where.name))


def stored(where: Location, kind: str = CHECKPOINT) -> list[Stored]:
    """Return what is complete of a kind, older versions first; what cannot be used is ignored with a warning.

    Raises:
        OSError: the location cannot be read.
    """
    if not isinstance(where, ObjectPath):
        return checkpoint_folder.stored(where, kind)
    return [Stored.of(found.manifest, _nbytes(found.manifest)) for found in _scan(where, kinds=(kind,))]


def _nbytes(manifest: Manifest) -> int:
    """Return the bytes of all files that a checkpoint in an object store uses, its manifest included."""
    path = manifest.path
    assert isinstance(path, ObjectPath)
    keys = [f"{owner}/{file}" for owner, file in {*manifest.files, (path.name, MANIFEST)}]
    with ThreadPoolExecutor(LOOKS) as pool:
        return sum(pool.map(lambda key: path.place.size((path.parent / key).key) or 0, keys))


def superseded(where: Location, retention: Retention) -> list[Location]:
    """Return the checkpoints that a retention does not keep, older ones first; raises as `stored` does."""
    if not isinstance(where, ObjectPath):
        return list(checkpoint_folder.superseded(where, retention))
    return [found.path for found in superseded_of(scan(where.place), retention)]


def prune(where: Location, retention: Retention, *, abandoned: bool = False) -> Iterator[Location]:
    """Remove the checkpoints that a retention does not keep, and yield each of them.

    Args:
        where: folder or URL in which no job runs.
        retention: the checkpoints to keep.
        abandoned: whether attempts of dead jobs are given up, too.

    Raises:
        ValueError: a job runs at the location, or an attempt is undecided.
        OSError: the location cannot be read or written.
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
    known = seen.read_all()
    undecided = [name for name, each in known.items() if each.is_open]
    if undecided:
        raise ValueError(
            f"{where}: {undecided[0]} is being written, or its job died: if no job runs here, give it "
            "up with --abandoned"
        )
    cleaner = Cleaner(seen)
    for found in superseded_of(sort(known), retention):
        cleaner.remove_checkpoint(found.path.name)
        yield found.path
    write_index(seen)
    cleaner.remove_files(now=time.time())
