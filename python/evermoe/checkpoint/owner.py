"""Ownership of a checkpoint folder: at most one job may write to it.

    FOLDER/owner.json   name of the job, layout of its model, checksum of both; replaced by one rename
    FOLDER/owner.lock   locked by every member of the job for as long as it lives, shared among them

A job that has ended or died holds no lock. The next one may take over the folder and its checkpoints, unless they are
of another model. Where the file system has no locks, the next job may always take it over; the previous job then finds
the other name in `owner.json` before it publishes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evermoe._native import digest
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.plain_files import flush, read_plain, write_text
from evermoe.errors import CorruptCopy, PersistFailed
from evermoe.process.run_claim import try_lock

OWNER, LOCK = "owner.json", "owner.lock"
OWNER_FORMAT = 2
OWNER_BYTES = 64 << 10
"""Maximum size of `owner.json`."""
CLAIM_SECONDS = 10.0
"""Time for which another member may hold the lock exclusively, to write `owner.json`."""
_PAUSE_SECONDS = 0.05


class Owner(NamedTuple):
    """Content of `owner.json`."""

    job: str
    layout: str
    """`UnitCatalog.layout` of its model."""


def read_owner(where: Location) -> Owner | None:
    """Return the owner of a location; None if `owner.json` is missing or unreadable.

    Raises:
        OSError: an object store did not answer.
    """
    try:
        content: bytes | None
        if isinstance(where, ObjectPath):
            content = where.place.read((where / OWNER).key, OWNER_BYTES)
        else:
            content = read_plain(where / OWNER, OWNER_BYTES)
    except CorruptCopy:
        return None
    try:
        fields = json.loads(content or b"")
        owner = Owner(fields["job"], fields["layout"])
        return owner if fields == _fields(owner) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def owner_text(owner: Owner) -> str:
    """Return the content of `owner.json`."""
    return json.dumps(_fields(owner))


def _fields(owner: Owner) -> dict[str, object]:
    """Return the fields of the file. The checksum makes a damaged file equal to none, and never another job's."""
    checksum = digest(np.frombuffer(json.dumps(owner).encode(), np.uint8))
    return {"format": OWNER_FORMAT, **owner._asdict(), "checksum": f"{checksum:016x}"}


def write_owner(folder: Path, owner: Owner) -> None:
    """Replace `owner.json` atomically."""
    draft = folder / f"{OWNER}.writing"
    write_text(draft, owner_text(owner))
    os.replace(draft, folder / OWNER)
    flush(folder)


@contextlib.contextmanager
def no_job(folder: Path) -> Iterator[None]:
    """Keep jobs from starting in a folder.

    Raises:
        ValueError: a job runs in the folder.
        OSError: the folder cannot be locked.
    """
    with open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = read_owner(folder)
            raise ValueError(f"job {owner.job if owner else ''!r} runs in {folder}: wait until it has ended") from None
        yield


class Claim:
    """A member's claim on the folder for its job, for as long as it is open.

    Args:
        folder: must exist.
        owner: the job.
        is_used: whether the folder contains saved state, which another model could not read.

    Raises:
        ValueError: another job runs in the folder, or its saved state is of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, owner: Owner, *, is_used: bool) -> None:
        self._folder, self._owner = folder, owner
        self._file = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb")  # noqa: SIM115
        try:
            self._acquire(is_used)
        except BaseException:
            self.close()
            raise

    def _acquire(self, is_used: bool) -> None:
        if try_lock(self._file.fileno(), fcntl.LOCK_EX):
            self._check_model(read_owner(self._folder), is_used)
            if read_owner(self._folder) != self._owner:
                write_owner(self._folder, self._owner)
        deadline = time.monotonic() + CLAIM_SECONDS
        while not try_lock(self._file.fileno(), fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise ValueError(f"{self._folder / LOCK} is locked by another process: give this job another folder")
            time.sleep(_PAUSE_SECONDS)  # a lock with a timeout must be polled
        found = read_owner(self._folder)
        if found is None:
            write_owner(self._folder, self._owner)
        elif found.job != self._owner.job:
            raise ValueError(
                f"checkpoints: {self._folder} belongs to job {found.job!r}, which is running; this is job "
                f"{self._owner.job!r}. Give it a folder of its own, or wait until {found.job!r} has ended"
            )
        else:
            self._check_model(found, is_used)

    def _check_model(self, found: Owner | None, is_used: bool) -> None:
        if is_used and found is not None and found.layout != self._owner.layout:
            raise ValueError(
                f"checkpoints: {self._folder} has checkpoints of job {found.job!r}, which trained another model or "
                f"optimizer than this job, {self._owner.job!r}, or with another number of readers or another "
                "state_bytes of ElasticReaders. Give it a folder of its own, or remove that one"
            )

    def check_owner(self) -> None:
        """Check that no other job has taken over the folder.

        Raises:
            PersistFailed: another job owns it.
        """
        found = read_owner(self._folder)
        if found is not None and found.job != self._owner.job:
            raise PersistFailed(
                f"{self._folder} now belongs to job {found.job!r}, not to {self._owner.job!r}: give each its own folder"
            )

    def close(self) -> None:
        """Release the claim; the folder keeps the job's name."""
        self._file.close()
