"""Folders of named shared memory, which every user of a machine can see: whose they are, and who may look into them.

    /dev/shm/evermoe-1000-JOB/       of user 1000; mode 0700
        lock  begun  finished        of `evermoe run`
        PID.role  PID.answer         of `evermoe role`: the role that a process is to have; why it keeps its own
        NODE/*.arena                 the copies that this machine keeps

What lies in such a folder is believed after a crash, so one that another user has made, or could have written to, is
refused.
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
"""Where shared memory lives if nothing else is said."""
BEGUN, FINISHED = "begun", "finished"
"""Files by which the workers of a machine tell `evermoe run` that the job has begun, and that its last step is taken.
`EVERMOE_BEGUN` and `EVERMOE_FINISHED` name them."""
_OTHERS = 0o077


def job_folder(memory_dir: str | Path, job: str) -> Path:
    """Return a job's folder on this machine, with a folder for each node below it."""
    return Path(memory_dir) / f"evermoe-{os.geteuid()}-{job}"


def role_files(folder: Path, pid: int) -> tuple[Path, Path]:
    """Return the request file and the answer file with which `evermoe role` changes the role of a process."""
    return folder / f"{pid}.role", folder / f"{pid}.answer"


def replace_text(path: Path, text: str) -> None:
    """Create a file, or replace it, by one rename."""
    draft = path.with_name(f"{path.name}.writing")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def mark(what: str) -> None:
    """Report to `evermoe run`, if it started this process, that the job has `BEGUN` or `FINISHED`."""
    path = _mark(what)
    if path:
        with suppress(OSError):  # the folder is gone with the one that would look
            path.touch()


def is_marked(what: str) -> bool:
    """Return whether a worker of the same `evermoe run` has reported it."""
    path = _mark(what)
    return path is not None and path.exists()


def _mark(what: str) -> Path | None:
    path = os.environ.get(f"EVERMOE_{what.upper()}")
    return Path(path) if path else None


def node_name(given: str | None) -> str:
    """Name of the machine whose memory dies as one: as given, or else the host's.

    Raises:
        ValueError: it is not one, as of `check_name`.
    """
    name = socket.gethostname() if given is None else given
    check_name(
        "node" if given is not None else "the host's name, in place of which EVERMOE_NODE may name the node,", name
    )
    return name


def check_private(folder: Path) -> None:
    """Check a folder of shared memory, if it exists.

    Raises:
        UnsafeFolder: it is a link or a file, belongs to another user, or others may do something with it.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{folder} is a link or a file, not a folder of shared memory: remove it, or rename the job")
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"{folder} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}: what lies in it may "
            "not be this job's. Give the job another name, or another memory_dir"
        )
    if found.st_mode & _OTHERS:
        raise UnsafeFolder(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):o}, so that other users may have changed what lies in it: "
            "remove it if it is not known to be this job's, or set its mode to 700"
        )


def make_private(folder: Path) -> None:
    """Create a folder for this user alone, and its missing parents; check a folder that exists.

    Raises:
        UnsafeFolder: as of `check_private`. OSError: it cannot be made.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_private(folder)


def open_lock(path: Path) -> TextIO:
    """Open a file to lock, without following links; create it if it is missing.

    Raises:
        UnsafeFolder: it is a link.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        if path.is_symlink():
            raise UnsafeFolder(f"{path} is a link to another file: remove it") from None
        raise error
