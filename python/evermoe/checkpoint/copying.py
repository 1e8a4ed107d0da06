"""Copies a checkpoint to another location: the copy is complete, or it does not exist."""

from __future__ import annotations

import uuid
from pathlib import Path

from torch import Tensor

from evermoe.checkpoint.attempts import Attempts, Cleaner, write_index
from evermoe.checkpoint.checkpoint_bucket import announce_draft, put_tensors
from evermoe.checkpoint.checkpoint_folder import take_name
from evermoe.checkpoint.checkpoint_store import find
from evermoe.checkpoint.manifest import MANIFEST, Manifest, Row, Saved, manifest_text, read_units
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.plain_files import flush, in_groups, make_folder, write_tensors, write_text
from evermoe.checkpoint.verified_mark import mark_verified, verified_at
from evermoe.state.version import generation_of, step_of

FILE_BYTES = 1 << 30
"""Maximum size of a file in a folder, unless one unit is larger; the copy holds this number of bytes in memory."""


def copy(manifest: Manifest, to: Location) -> Location | None:
    """Copy a checkpoint with its mark, and check the digest of each unit.

    If `to` already has its version, copy the mark alone, and return None.

    Raises:
        ValueError: the manifest is of a save.
        CorruptCopy: a unit is missing, or does not match its digest; nothing is copied.
        OSError: the copy cannot be written.
    """
    if manifest.is_save:
        raise ValueError(f"{manifest.path} is a save, whose units have several versions: expected a checkpoint")
    known = find(to, manifest.layout).get(manifest.version)
    if known is not None:
        _copy_mark(manifest, known)
        return None
    step, generation = step_of(manifest.version), generation_of(manifest.version)
    word = uuid.uuid4().hex[:8]
    copied: Location
    if isinstance(to, ObjectPath):
        copied = _to_bucket(manifest, to / f"step-{step:08d}.{generation:010d}-{word}")
    else:
        copied = _to_folder(manifest, to / f"step-{step:08d}.writing-{generation:010d}-{word}")
    _copy_mark(manifest, copied)
    return copied


def _copy_mark(manifest: Manifest, to: Location) -> None:
    """Mark a copy as verified if the checkpoint is, which may have become known since it was copied."""
    verified = verified_at(manifest.path, manifest.version)
    if verified is not None and verified_at(to, manifest.version) is None:
        mark_verified(to, manifest.version, verified)


def _to_bucket(manifest: Manifest, draft: ObjectPath) -> ObjectPath:
    announce_draft(draft, Owner("evermoe checkpoints copy", manifest.layout))
    attempts = Attempts(draft.place)
    try:
        numbered = enumerate(read_units(manifest, list(manifest.units)))
        rows = [_put(manifest.units[name], draft, at, tensors) for at, (name, tensors) in numbered]
        text = manifest_text(manifest.version, manifest.layout, rows)
        if not draft.place.create((draft / MANIFEST).key, text.encode()):
            raise FileExistsError(17, f"{draft} was given up by a job that runs at its location")
    except BaseException:
        if Cleaner(attempts).give_up(draft.name):
            Cleaner(attempts).remove_files([draft.name])
        raise
    write_index(attempts)
    return draft


def _put(unit: Saved, draft: ObjectPath, number: int, tensors: dict[str, Tensor]) -> Row:
    file = f"{number:05d}.safetensors"
    put_tensors(draft / file, {f"{unit.unit}/{key}": tensor for key, tensor in tensors.items()})
    return Row(unit.unit, file, unit.digest, unit.tensors, extents=unit.rows[0].extents)


def _to_folder(manifest: Manifest, draft: Path) -> Path:
    make_folder(draft)
    rows: list[Row] = []
    units = read_units(manifest, list(manifest.units))
    groups = in_groups(units, lambda unit: sum(tensor.nbytes for tensor in unit[1].values()), FILE_BYTES)
    for at, group in enumerate(groups):
        file = f"units-{at}.safetensors"
        write_tensors(draft / file, {f"{name}/{key}": each for name, unit in group for key, each in unit.items()})
        known = manifest.units
        rows += [
            Row(name, file, known[name].digest, list(unit), extents=known[name].rows[0].extents) for name, unit in group
        ]
    write_text(draft / MANIFEST, manifest_text(manifest.version, manifest.layout, rows))
    flush(draft)
    return take_name(draft)
