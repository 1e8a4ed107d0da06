"""Folders of named shared memory, which every user of a machine can see: their names, owners and permissions.

    /dev/shm/evermoe-1000-JOB/       of user 1000; mode 0700
        lock  begun  finished        of `evermoe run`
        PID.role  PID.answer         of `evermoe role`: the requested role of a process; why it keeps its own
        NODE/*.arena                 the copies that this machine keeps

A recovery trusts the content of such a folder. So a folder is refused if another user has created it, or could have
written to it.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from evermoe.errors import UnsafeFolder
from evermoe.options import check_name

DEFAULT = "/dev/shm"
"""Default location of shared memory."""
BEGUN, FINISHED = "begun", "finished"
"""Files with which the workers of a machine report to `evermoe run` that the job has begun, and that its last step is
taken. `EVERMOE_BEGUN` and `EVERMOE_FINISHED` name them."""
_OTHERS = 0o077


def job_folder(memory_dir: str | Path, job: str) -> Path:
    """Return a job's folder on this machine, which has a subfolder for each node."""
    return Path(memory_dir) / f"evermoe-{os.geteuid()}-{job}"


def role_files(folder: Path, pid: int) -> tuple[Path, Path]:
    """Return the files in a job's folder for a process: the role that `evermoe role` requests, and the answer."""
    return folder / f"{pid}.role", folder / f"{pid}.answer"


def replace_text(path: Path, text: str) -> None:
    """Create a file, or replace it with one rename."""
    draft = path.with_name(f"{path.name}.writing")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def mark(what: str) -> None:
    """Report `BEGUN` or `FINISHED` to `evermoe run`, if this process is one of its workers."""
    path = _mark(what)
    if path:
        with suppress(OSError):  # `evermoe run` has ended and removed the folder
            path.touch()


def is_marked(what: str) -> bool:
    """Return whether a worker of the same `evermoe run` has reported `what`."""
    path = _mark(what)
    return path is not None and path.exists()


def _mark(what: str) -> Path | None:
    path = os.environ.get(f"EVERMOE_{what.upper()}")
    return Path(path) if path else None


def node_name(given: str | None) -> str:
    """Return the name of this node, whose memory fails as a unit: the given name, or else the host's.

    Raises:
        ValueError: the name is invalid, see `check_name`.
    """
    name = socket.gethostname() if given is None else given
    check_name(
        "node" if given is not None else "the host's name, in place of which EVERMOE_NODE may name the node,", name
    )
    return name


def check_private(folder: Path) -> None:
    """Check a folder of shared memory, if it exists.

    Raises:
        UnsafeFolder: it is a link or a file, belongs to another user, or grants other users any permission.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{folder} is a link or a file, not a folder of shared memory: remove it, or rename the job")
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"{folder} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}: its content may not "
            "be this job's. Give the job another name, or another memory_dir"
        )
    if found.st_mode & _OTHERS:
        raise UnsafeFolder(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):o}, so that other users may have changed its content: "
            "set its mode to 700 if you know that it is this job's, otherwise remove it"
        )


def make_private(folder: Path) -> None:
    """Create a private folder and its missing parents; check it if it exists.

    Raises:
        UnsafeFolder: as for `check_private`. OSError: the folder cannot be created.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_private(folder)


def open_lock(path: Path) -> TextIO:
    """Open a file for locking, without following a link; create it if it is missing.

    Raises:
        UnsafeFolder: it is a link.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        if path.is_symlink():
            raise UnsafeFolder(f"{path} is a link to another file: remove it") from None
        raise error
