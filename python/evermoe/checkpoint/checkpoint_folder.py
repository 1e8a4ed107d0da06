"""The folder of a job's checkpoints and saves: complete ones, drafts, and what dead processes left behind.

    DIRECTORY/step-00000120                          complete; its manifest has the version and every unit's digest
    DIRECTORY/step-00000120/verified.json            see `evermoe.checkpoint.verified_mark`
    DIRECTORY/step-00000120-2                        the same step, written again after a rollback behind it
    DIRECTORY/step-00000160.writing-0000000003-7f01  a draft of the members of generation 3, attempt 7f01
    DIRECTORY/step-00000080.removing-…               no longer a checkpoint
    DIRECTORY/save-00000125                          a save: its manifest also names files of earlier saves
    DIRECTORY/save-00000110                          without a manifest: files that later saves use
    DIRECTORY/owner.json, owner.lock                 see `evermoe.checkpoint.owner`
    DIRECTORY/run.json                               see `evermoe.process.run_claim`

One rename turns a draft into a checkpoint and replaces nothing; another rename removes it. So a writer that was stopped
for hours and then continues can only add a checkpoint of steps that it has seen, which are older than the newest. It
removes no checkpoint that is newer than its own.

A save is removed by removing its manifest. Its files stay as long as the manifest of another save names them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from evermoe.checkpoint.manifest import CHECKPOINT, MANIFEST, SAVE, Manifest, Row, read_manifest
from evermoe.checkpoint.object_store import Location
from evermoe.checkpoint.owner import Claim, Owner, read_owner
from evermoe.checkpoint.plain_files import PROBE, flush, make_folder, probe, write_tensors, write_text
from evermoe.checkpoint.retention import NEWEST, SAVES, Retention, is_undone
from evermoe.checkpoint.unit_files import write_complete, write_frozen
from evermoe.checkpoint.unit_share import Share
from evermoe.checkpoint.verified_mark import superseded_of, verified_at
from evermoe.errors import CorruptCopy, FolderInUse, PersistFailed
from evermoe.process.run_claim import Run, RunClaim
from evermoe.process.warn import warn
from evermoe.state.version import generation_of, step_of

_COMPLETE = re.compile(rf"^({CHECKPOINT}|{SAVE})-(\d{{8,}})(?:-(\d+))?$")
_DRAFT = re.compile(rf"^(?:{CHECKPOINT}|{SAVE})-\d{{8,}}\.writing-(\d{{10,}})-.+$")
_REMOVING = re.compile(rf"^(?:{CHECKPOINT}|{SAVE})-\d{{8,}}(?:-\d+)?\.removing-")
BOTH = CHECKPOINT, SAVE
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class _Found(NamedTuple):
    version: int
    writing: int
    """Number of times that the step has been written."""
    path: Path
    manifest: Manifest


def find(directory: Path, layout: str | None = None) -> dict[int, Path]:
    """Return the complete checkpoints by version, without saves.

    Checkpoints that cannot be used are ignored with a warning: a damaged manifest, a link, or another model's.

    Args:
        directory: of the checkpoints; it may be missing.
        layout: of the model, `UnitCatalog.layout`; None for any.
    """
    return {found.version: found.path for found in _scan(directory, layout, warns=True)}


def find_manifests(directory: Path, layout: str, kinds: Collection[str]) -> list[Manifest]:
    """Return the manifests of checkpoints, of saves, or of both; see `find`. Older ones come first."""
    return [found.manifest for found in _scan(directory, layout, kinds, warns=True)]


def _scan(
    directory: Path, layout: str | None = None, kinds: Collection[str] = (CHECKPOINT,), *, warns: bool = False
) -> list[_Found]:
    """Return what is complete, older versions first; of one version, the one written last comes last."""
    found = []
    for entry in _entries(directory):
        match = _COMPLETE.match(entry.name)
        if match is None or match[1] not in kinds:
            continue
        try:
            if not entry.is_dir(follow_symlinks=False):
                raise CorruptCopy(f"{entry.path} is not a folder")
            if match[1] == SAVE and not os.path.lexists(os.path.join(entry.path, MANIFEST)):
                continue  # it was removed, but some of its files are in use
            manifest = _checked(Path(entry.path), int(match[2]), layout)
            found.append(_Found(manifest.version, int(match[3] or 1), Path(entry.path), manifest))
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
    """Bytes of all files that it uses."""
    units: int
    verified_at: int | None
    """Step in whose vote it was verified; None if it was not."""

    @staticmethod
    def of(manifest: Manifest, nbytes: int) -> Stored:
        """Return the checkpoint of a manifest, whose files have this number of bytes."""
        path, version = manifest.path, manifest.version
        return Stored(path, step_of(version), version, nbytes, len(manifest.units), verified_at(path, version))


def stored(directory: Path, kind: str = CHECKPOINT) -> list[Stored]:
    """Return what is complete of a kind, older versions first; what cannot be used is ignored with a warning.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    return [
        Stored.of(
            found.manifest,
            sum(_size(directory / owner / file) for owner, file in found.manifest.files) + _size(found.path / MANIFEST),
        )
        for found in _scan(directory, kinds=(kind,), warns=True)
    ]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def superseded(directory: Path, retention: Retention) -> list[Path]:
    """Return the checkpoints of a folder that a retention does not keep, older ones first."""
    return [each.path for each in superseded_of(_scan(directory), retention)]


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
        self.awaited: set[int] = set()
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
        return bool(_scan(self.directory, kinds=BOTH))

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
        found = _scan(self.directory, kinds=BOTH)
        return max([*drafts, *(generation_of(each.version) for each in found)], default=0)

    def draft(self, version: int, generation: int, attempt: str, kind: str = CHECKPOINT) -> Path:
        """Return the location where the members of a generation write a version; each attempt has its own."""
        return self.directory / f"{kind}-{step_of(version):08d}.writing-{generation:010d}-{attempt}"

    def newest_save(self, version: int, generation: int) -> Manifest | None:
        """Return the newest save after a recovery, and remove those that it has undone; see `CheckpointStore`."""
        found = _scan(self.directory, self._owner.layout, (SAVE,))
        undone = [each for each in found if is_undone(each.version, version, generation)]
        _remove_saves(self.directory, [each.path for each in undone])
        return next((each.manifest for each in reversed(found) if each not in undone), None)

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

    def write(self, draft: Path, rank: int, shares: Collection[Share]) -> list[Row]:
        """Write a rank's shares to files of the draft, which is created if it is missing.

        Args:
            draft: of the attempt.
            rank: of this member.
            shares: complete units, or parts of them. Parts get a file of their own: later saves use it less long. So do
                frozen units, whose file may be a link to that of an earlier checkpoint.

        Raises:
            PersistFailed: the folder now belongs to another job.
            OSError: the shares cannot be written.
        """
        self.create_draft(draft)
        frozen = [each for each in shares if each.is_frozen and not draft.name.startswith(SAVE)]
        complete = [each for each in shares if each.part is None and each not in frozen]
        cut = [each for each in shares if each.part is not None]
        rows: list[Row] = []
        if frozen:
            earlier = [each.manifest for each in _scan(self.directory, self._owner.layout)]
            rows += write_frozen(draft / f"frozen-{rank}.safetensors", frozen, earlier)
        if complete or not (cut or frozen):
            rows += write_complete(draft / f"units-{rank}.safetensors", complete)
        if cut:
            file = f"parts-{rank}.safetensors"
            write_tensors(draft / file, {key: tensor for each in cut for key, tensor in each.tensors().items()})
            rows += [each.row(file) for each in cut]
        return rows

    def publish(self, draft: Path, version: int, manifest: str) -> Path:
        """Turn a draft whose units are on disk into the checkpoint or save of its version; remove superseded ones.

        Raises:
            PersistFailed: the folder now belongs to another job.
            OSError: the draft cannot be renamed; nothing is removed.
        """
        write_text(draft / MANIFEST, manifest)
        flush(draft)
        self._check_owner()
        path = take_name(draft)
        if path.name.startswith(SAVE):
            saves = _scan(self.directory, kinds=(SAVE,))
            going = superseded_of(saves, SAVES, before=version, written=path.name)
            _remove_saves(self.directory, [each.path for each in going])
            return path
        self.remove_superseded(path, version)
        return path

    def remove_superseded(self, written: Path, version: int) -> None:
        """Remove the older checkpoints that need not stay, as a checkpoint was written or verified."""
        known, name = _scan(self.directory), written.name
        for each in superseded_of(known, self._retention, before=version, written=name, awaited=self.awaited):
            remove(each.path)

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
        _remove_saves(self.directory, ())
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


def take_name(draft: Path) -> Path:
    """Rename a draft that is on disk to the checkpoint or save of its step; replace nothing.

    Raises:
        OSError: it cannot be renamed.
    """
    name = draft.name.partition(".")[0]
    for writing in itertools.count(1):
        path = draft.with_name(name if writing == 1 else f"{name}-{writing}")
        try:
            os.rename(draft, path)
            break
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
    flush(path.parent)
    return path


def _remove_saves(directory: Path, going: Collection[Path]) -> None:
    """Remove saves; then remove the files of removed saves that no other save uses."""
    for path in going:
        with contextlib.suppress(OSError):  # another member was faster
            (path / MANIFEST).unlink()
            flush(path)
    names = [entry.name for entry in _entries(directory) if entry.name.startswith(f"{SAVE}-")]
    folders = [directory / name for name in names if _COMPLETE.match(name)]
    removed = [path for path in folders if not os.path.lexists(path / MANIFEST)]
    usable = _scan(directory, kinds=(SAVE,))
    damaged = {*folders} - {*removed} - {each.path for each in usable}
    oldest = min((each.path.name for each in usable), default="")
    if any(path.name >= oldest for path in damaged):
        return  # it may be readable later, and which files it uses is unknown
    used = {file for each in usable for file in each.manifest.files}
    for path in removed:
        for entry in _entries(path):
            if (path.name, entry.name) not in used and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # another member was faster
                    os.unlink(entry.path)
        with contextlib.suppress(OSError):  # some files stay
            path.rmdir()


def remove(path: Path) -> None:
    """Remove a checkpoint or draft; the rename that makes it invalid comes first."""
    going = path.with_name(f"{path.name.split('.')[0]}.removing-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):  # another member was faster
        os.rename(path, going)
        shutil.rmtree(going, ignore_errors=True)
