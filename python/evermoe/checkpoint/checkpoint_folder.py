"""The folder of a job's checkpoints: complete ones, drafts, and what dead processes left behind.

    DIRECTORY/step-00000120                          complete; its manifest has the version and every unit's digest
    DIRECTORY/step-00000120-2                        the same step, written again after a rollback behind it
    DIRECTORY/step-00000160.writing-0000000003-7f01  a draft of the members of generation 3, attempt 7f01
    DIRECTORY/step-00000080.removing-…               no longer a checkpoint
    DIRECTORY/owner.json, owner.lock                 see `evermoe.checkpoint.owner`
    DIRECTORY/run.json                               see `evermoe.process.run_claim`

One rename turns a draft into a checkpoint and replaces nothing; another rename removes it. So a writer that was stopped
for hours and then continues can only add a checkpoint of steps that it has seen, which are older than the newest. It
removes no checkpoint that is newer than its own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from evermoe.checkpoint.folder import PERSISTED, PersistedUnit, folders, units_of
from evermoe.checkpoint.manifest import MANIFEST, Entry, Manifest, read_manifest
from evermoe.checkpoint.object_store import Location
from evermoe.checkpoint.owner import Claim, Owner, read_owner
from evermoe.checkpoint.plain_files import PROBE, flush, make_folder, probe, write_text, write_units
from evermoe.checkpoint.retention import NEWEST, Retention
from evermoe.errors import CorruptCopy, FolderInUse, PersistFailed
from evermoe.process.run_claim import Run, RunClaim
from evermoe.process.warn import warn
from evermoe.state.unit import Unit
from evermoe.state.version import generation_of, step_of

_COMPLETE = re.compile(r"^step-(\d{8,})(?:-(\d+))?$")
_DRAFT = re.compile(r"^step-\d{8,}\.writing-(\d{10,})-.+$")
_REMOVING = re.compile(r"^step-\d{8,}(?:-\d+)?\.removing-")
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class _Found(NamedTuple):
    version: int
    writing: int
    """Number of times that the step has been written."""
    path: Path
    manifest: Manifest


def find(directory: Path, layout: str | None = None) -> dict[int, Path]:
    """Return the complete checkpoints by version.

    Checkpoints that cannot be used are ignored with a warning: a damaged manifest, a link, or another model's.

    Args:
        directory: of the checkpoints; it may be missing.
        layout: of the model, `UnitCatalog.layout`; None for any.
    """
    return {found.version: found.path for found in _scan(directory, layout, warns=True)}


def find_saved(directory: Path, layout: str) -> list[PersistedUnit]:
    """Return the units of all complete checkpoints of this layout; see `find`."""
    return [unit for found in _scan(directory, layout, warns=True) for unit in units_of(found.manifest)]


def _scan(directory: Path, layout: str | None = None, *, warns: bool = False) -> list[_Found]:
    """Return the complete checkpoints, older versions first; of one version, the one written last comes last."""
    found = []
    for entry in _entries(directory):
        match = _COMPLETE.match(entry.name)
        if match is None:
            continue
        try:
            if not entry.is_dir(follow_symlinks=False):
                raise CorruptCopy(f"{entry.path} is not a folder")
            manifest = _checked(Path(entry.path), int(match[1]), layout)
            found.append(_Found(manifest.version, int(match[2] or 1), Path(entry.path), manifest))
        except CorruptCopy as error:
            if warns and os.path.lexists(entry.path):  # it may have been removed meanwhile
                warn(f"a checkpoint is ignored: {error}")
    return sorted(found, key=lambda each: (each.version, each.writing, each.path.name))


def _checked(path: Path, step: int, layout: str | None) -> Manifest:
    manifest = read_manifest(path)
    if step_of(manifest.version) != step:
        raise CorruptCopy(f"{path / MANIFEST} is of step {step_of(manifest.version)}")
    if layout is not None and manifest.layout != layout:
        raise CorruptCopy(f"{path} belongs to another model or optimizer")
    return manifest


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Return the entries of the folder; none, with a warning, if it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        warn(f"checkpoints in {directory} cannot be listed: {error}")
        return []


class Stored(NamedTuple):
    """A complete checkpoint, as `evermoe checkpoints list` shows it."""

    path: Location
    step: int
    """Steps taken in it."""
    version: int
    nbytes: int
    """Bytes of all its files."""
    units: int


def stored(directory: Path) -> list[Stored]:
    """Return the complete checkpoints, older versions first; those that cannot be used are ignored with a warning.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    return [
        Stored(
            found.path,
            step_of(found.version),
            found.version,
            sum(file.stat().st_size for file in found.path.iterdir()),
            len(found.manifest.units),
        )
        for found in _scan(directory, warns=True)
    ]


def superseded(
    directory: Path, retention: Retention, *, before: int | None = None, written: Path | None = None
) -> list[Path]:
    """Return the checkpoints that a retention does not keep, older ones first.

    Args:
        directory: of the checkpoints.
        retention: the checkpoints to keep.
        before: a version; newer checkpoints stay and do not count. None counts all.
        written: a folder that stays, whatever its version; others of the same version are removed.
    """
    found = [each for each in _scan(directory) if before is None or each.version <= before]
    going = retention.superseded({each.version for each in found})
    if written is not None and before is not None:
        going.add(before)
    return [each.path for each in found if each.version in going and each.path != written]


class CheckpointFolder:
    """The folder of checkpoints, as one member of a job writes to it.

    Args:
        directory: on a file system that all members share; created if it is missing.
        owner: the member's job, and the layout of its model.
        member: its name, unique among all processes of the job.
        retention: checkpoints to keep when a new one is complete.

    Raises:
        ValueError: another job runs in the folder, or its checkpoints are of another model.
        OSError: the folder cannot be written to, and the job has not written to it before.
    """

    def __init__(self, directory: Path, owner: Owner, member: str, retention: Retention = NEWEST) -> None:
        self.directory = directory
        self._retention = retention
        self._owner, self._member = owner, member
        self._claim: Claim | None = None
        self._run_claim = RunClaim(directory, "the checkpoint store", 0o666)
        self._run: Run | None = None
        try:
            make_folder(directory)
            probe(directory, member)
            self._claim = Claim(directory, owner, is_used=self._is_used())
        except OSError as error:
            problem = f"checkpoints: {directory} cannot be written to: {error.strerror or error}"
            if read_owner(directory) != owner:
                raise OSError(
                    error.errno, f"{problem}. Free space, make it writable, or give another folder"
                ) from error
            warn(f"{problem}. Job {owner.job!r} continues, and tries to write each scheduled checkpoint")

    def _is_used(self) -> bool:
        persisted = self.directory / PERSISTED
        return bool(_scan(self.directory)) or (persisted.is_dir() and any(persisted.iterdir()))

    def found(self) -> Run | None:
        """Return the run whose living members hold the folder."""
        return self._run_claim.found()

    def claim_for(self, run: Run, patience: float) -> None:
        """Claim the folder for a run; if it cannot be written to now, claim it later.

        Raises:
            FolderInUse: living members of another run hold it.
        """
        self._run = run
        with contextlib.suppress(OSError):
            self._run_claim.claim_for(run, patience)

    def newest_generation(self) -> int:
        """Return the newest generation that wrote here, drafts included; that of the running job must be newer."""
        drafts = [int(match[1]) for entry in _entries(self.directory) if (match := _DRAFT.match(entry.name))]
        drafts += [generation_of(version) for _, version, _ in folders(self.directory / PERSISTED)]
        return max([*drafts, *(generation_of(found.version) for found in _scan(self.directory))], default=0)

    def draft(self, version: int, generation: int, attempt: str) -> Path:
        """Return the location where the members of a generation write a version; each attempt has its own."""
        return self.directory / f"{_name(version)}.writing-{generation:010d}-{attempt}"

    def create_draft(self, draft: Path) -> None:
        """Create a draft's folder, unless another member already has.

        Raises:
            PersistFailed: the folder now belongs to another job.
            OSError: the draft cannot be created.
        """
        self._check_owner()
        make_folder(draft)

    def _check_owner(self) -> None:
        if self._claim is None:
            try:
                self._claim = Claim(self.directory, self._owner, is_used=self._is_used())
            except ValueError as error:
                raise PersistFailed(str(error)) from None
        self._claim.check_owner()
        try:
            if self._run is not None:
                self._run_claim.claim_for(self._run, 0.0)
        except FolderInUse as error:
            raise PersistFailed(str(error)) from None
        if refusal := self._run_claim.refusal():
            raise PersistFailed(refusal)

    def write(self, draft: Path, rank: int, units: Mapping[str, tuple[Unit, Tensor]]) -> dict[str, Entry]:
        """Write a rank's units to a file of the draft, which is created if it is missing.

        Args:
            draft: of the attempt.
            rank: of this member.
            units: by name, and their bytes, uint8 `[nbytes]`.

        Raises:
            PersistFailed: the folder now belongs to another job.
            OSError: the units cannot be written.
        """
        self.create_draft(draft)
        file = f"units-{rank}.safetensors"
        digests = write_units(draft / file, units)
        return {name: (file, digests[name], [spec.name for spec in unit.specs]) for name, (unit, _) in units.items()}

    def publish(self, draft: Path, version: int, manifest: str) -> Path:
        """Turn a draft whose units are on disk into the checkpoint of its version; remove the superseded ones.

        Raises:
            PersistFailed: the folder now belongs to another job.
            OSError: the draft cannot be renamed; nothing is removed.
        """
        write_text(draft / MANIFEST, manifest)
        flush(draft)
        self._check_owner()
        path = take_name(draft, version)
        for each in superseded(self.directory, self._retention, before=version, written=path):
            remove(each)
        return path

    def discard(self, draft: Path) -> None:
        """Remove a draft unless it has become a checkpoint."""
        remove(draft)

    def sweep(self, generation: int) -> None:
        """Remove what processes left behind that died while they wrote or removed a checkpoint.

        Args:
            generation: of the members, this one included. Drafts of older generations will never be complete: their
                writers are dead, or were stopped and left behind.
        """
        with contextlib.suppress(OSError):
            if self._run_claim.refusal():
                return
        for entry in _entries(self.directory):
            draft = _DRAFT.match(entry.name)
            if draft and int(draft[1]) < generation:
                self.discard(Path(entry.path))
            elif _REMOVING.match(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(PROBE):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def close(self) -> None:
        """Release the folder for other jobs and runs."""
        self._run_claim.release()
        if self._claim is not None:
            self._claim.close()


def take_name(draft: Path, version: int) -> Path:
    """Rename a draft that is on disk to the checkpoint of its version; replace nothing.

    Raises:
        OSError: it cannot be renamed.
    """
    for writing in itertools.count(1):
        path = draft.with_name(_name(version) if writing == 1 else f"{_name(version)}-{writing}")
        try:
            os.rename(draft, path)
            break
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
    flush(path.parent)
    return path


def _name(version: int) -> str:
    return f"step-{step_of(version):08d}"


def remove(path: Path) -> None:
    """Remove a checkpoint or draft; the rename that makes it invalid comes first."""
    going = path.with_name(f"{path.name.split('.')[0]}.removing-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):  # another member was faster
        os.rename(path, going)
        shutil.rmtree(going, ignore_errors=True)
