"""The mark of a verified checkpoint: a small file next to its manifest, and what a retention keeps by it.

    DIRECTORY/step-00000120/verified.json    {"version": …, "step": 131}

A checkpoint is verified if, in votes on later steps, members have compared all state that several of them train and
found no difference: when it was copied, the state was the same on all of them. This is known some steps after the
checkpoint was written. The mark names the version, so that it never holds for another checkpoint of the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from evermoe.checkpoint.manifest import SAVE
from evermoe.checkpoint.object_store import Location
from evermoe.checkpoint.plain_files import flush, read_plain, write_text
from evermoe.checkpoint.retention import Retention
from evermoe.errors import CorruptCopy

MARK = "verified.json"
MARK_BYTES = 1 << 10
"""Maximum size of a mark."""


class Complete(Protocol):
    """A complete checkpoint in a folder or an object store."""

    @property
    def version(self) -> int:
        """Version of its state."""

    @property
    def path(self) -> Location:
        """Its location."""


AnyComplete = TypeVar("AnyComplete", bound=Complete)


def mark_verified(path: Location, version: int, step: int) -> None:
    """Mark a checkpoint as verified by the vote on `step`.

    Raises:
        OSError: the mark cannot be written, for example because the checkpoint was removed.
    """
    text = json.dumps({"version": version, "step": step})
    if not isinstance(path, Path):
        path.place.create((path / MARK).key, text.encode())
        return
    draft = path / f"{MARK}.{uuid.uuid4().hex[:8]}"
    write_text(draft, text)
    os.replace(draft, path / MARK)
    flush(path)


def verified_at(path: Location, version: int) -> int | None:
    """Return the step in whose vote a checkpoint was verified; None if it has no valid mark.

    Raises:
        OSError: an object store did not answer.
    """
    if path.name.startswith(SAVE):
        return None
    content: bytes | None = None
    with contextlib.suppress(CorruptCopy):
        if isinstance(path, Path):
            content = read_plain(path / MARK, MARK_BYTES)
        else:
            try:
                content = path.place.read((path / MARK).key, MARK_BYTES)
            except PermissionError:  # a server that does not list its objects may answer so for a missing one
                if not path.place.is_read_only:
                    raise
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(content or b"")
        if isinstance(fields, dict) and fields.get("version") == version and type(fields.get("step")) is int:
            return int(fields["step"])
    return None


def superseded_of(
    found: Sequence[AnyComplete],
    retention: Retention,
    *,
    before: int | None = None,
    written: str | None = None,
    awaited: Collection[int] = (),
) -> list[AnyComplete]:
    """Return the checkpoints that need not stay, older ones first. The newest verified one stays.

    Args:
        found: all checkpoints, or all saves, older versions first.
        retention: those to keep.
        before: a version; newer ones stay and do not count. None counts all.
        written: name of a checkpoint that stays, whatever its version; others of the same version go.
        awaited: versions of checkpoints that stay because they may soon be verified.

    Raises:
        OSError: an object store did not answer.
    """
    counted = [each for each in found if before is None or each.version <= before]
    versions = retention.superseded({each.version for each in counted}).difference(awaited)
    if written is not None and before is not None:
        versions.add(before)
    going = [each for each in counted if each.version in versions and each.path.name != written]
    verified = next((each for each in reversed(going) if _is_verified(each)), None)
    if verified is None:
        return going
    newer = (each for each in reversed(found) if each.version > verified.version and each not in going)
    return going if any(map(_is_verified, newer)) else [each for each in going if each is not verified]


def _is_verified(each: Complete) -> bool:
    return verified_at(each.path, each.version) is not None
