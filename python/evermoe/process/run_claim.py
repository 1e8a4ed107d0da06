"""Claim of a folder by one run of a job: refuses a second start of the job while members of the first one are alive.

    FOLDER/run.json    names the run; each live member of the run that uses the folder holds a shared lock on it

A run is the training of one group of members, and of those that join them. Its first members agree on its nonce, and
claim the folders before they write to them or remove files (`evermoe.session.same_run`). A lock ends with its process.
So after a run has crashed or ended, the next one can claim its folders; a live run keeps them.

On a file system without locks, and in an object store, the next run always takes the folder over. The previous run
finds the other nonce before it publishes anything.

Limits: locks of NFS reach other hosts only if it is mounted without `nolock` and `local_lock`. A process keeps the lock
that it inherits by a fork outside Python.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from evermoe.errors import FolderInUse, UnsafeFolder

RUN = "run.json"
RUN_BYTES = 16 << 10
"""Maximum size of `run.json`."""
_PAUSE_SECONDS = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOOPBACK = ("localhost", "127.", "[::1]")


@dataclass(frozen=True)
class Run:
    """Content of `run.json`."""

    job: str
    nonce: str
    lighthouse: str
    """Lighthouses of its members, see `meeting_point`."""
    host: str
    """Host of the member that has proposed the nonce; `pid` is its process."""
    pid: int
    since: float
    """Seconds since 1970."""

    @staticmethod
    def begin(job: str, lighthouse: str) -> Run:
        """Return a new run that this process proposes."""
        return Run(job, uuid.uuid4().hex, lighthouse, socket.gethostname(), os.getpid(), round(time.time(), 3))

    @staticmethod
    def parsed(content: bytes) -> Run | None:
        """Return the run in the content of `run.json`; None if it is damaged."""
        try:
            fields = json.loads(content)
            run = Run(**fields)
            texts = run.job, run.nonce, run.lighthouse, run.host
            is_valid = all(isinstance(each, str) for each in texts) and isinstance(run.pid, int)
            return run if is_valid and isinstance(run.since, float) else None
        except (ValueError, TypeError, RecursionError):
            return None

    def to_text(self) -> str:
        """Return the content of `run.json`."""
        return json.dumps(asdict(self))

    def describe(self) -> str:
        """Return a description of the run for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return (
            f"another run of job {self.job!r}, which process {self.pid} on {self.host} began at {since} with the "
            f"Lighthouse {self.lighthouse}"
        )


def meeting_point(addresses: Iterable[str]) -> str:
    """Return the Lighthouses of a run, in the same order on all members; loopback addresses include this host's name.

    >>> meeting_point(["http://b:29510", "http://a:29510"])
    'a:29510,b:29510'
    """
    found = []
    for each in addresses:
        place = urlsplit(each).netloc.lower() or each
        found.append(f"{place} of {socket.gethostname()}" if place.startswith(_LOOPBACK) else place)
    return ",".join(sorted(found))


class RunClaim:
    """One process's part in its run's claim of a folder.

    Args:
        folder: must exist when it is claimed.
        what: name of the folder in messages.
        mode: of a new `run.json`.
    """

    def __init__(self, folder: Path, what: str, mode: int = 0o600) -> None:
        self._path, self._what, self._mode = folder / RUN, what, mode
        self._file: int | None = None
        self._nonce = ""
        _claims.add(self)

    def found(self) -> Run | None:
        """Return the run whose live members hold the folder; None without one, or if the folder cannot be opened."""
        try:
            file = self._open(os.O_RDWR)
        except OSError:
            return None
        try:
            return None if try_lock(file, fcntl.LOCK_EX) else _read(file)
        finally:
            os.close(file)

    def claim_for(self, run: Run, patience: float) -> None:
        """Claim the folder for a run, together with its members that have already claimed it.

        Args:
            run: of this process.
            patience: seconds to wait for processes of another run that are about to end.

        Raises:
            FolderInUse: processes of another run are alive.
            UnsafeFolder: `run.json` is a link. OSError: it cannot be written.
        """
        if self._nonce == run.nonce and self._file is not None:
            return
        self.release()
        deadline = time.monotonic() + patience
        while True:
            holder = self._try(run)
            if self._file is not None:
                self._nonce = run.nonce
                return
            if time.monotonic() > deadline:
                raise FolderInUse(self._refusal(holder))
            time.sleep(_PAUSE_SECONDS)  # the system does not notify when a lock is free

    def _try(self, run: Run) -> Run | None:
        """Take the lock if it is free; return the run that holds it otherwise."""
        file = self._open(os.O_RDWR | os.O_CREAT)
        try:
            if try_lock(file, fcntl.LOCK_EX) and _read(file) != run:
                _write(file, run)
            holder = _read(file) if try_lock(file, fcntl.LOCK_SH) else None
            if holder is not None and holder.nonce == run.nonce and self._is_current(file):
                self._file = file
        finally:
            if self._file is None:
                os.close(file)
        return holder

    def _open(self, flags: int) -> int:
        try:
            return os.open(self._path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, self._mode)
        except OSError as error:
            if self._path.is_symlink():
                raise UnsafeFolder(f"{self._path} is a link to another file: remove it") from None
            raise error

    def _is_current(self, file: int) -> bool:
        """Return whether the path still refers to the open file."""
        try:
            return os.fstat(file).st_ino == self._path.stat().st_ino
        except OSError:
            return False

    def _refusal(self, holder: Run | None) -> str:
        who = "a process of another run" if holder is None else holder.describe()
        alive = _holders(self._path)
        held = f" (still held on this machine by {', '.join(alive)})" if alive else ""
        return (
            f"{self._what} {self._path.parent} is in use by {who}{held}: end that run, or wait until it has ended. To "
            "add workers to it, start them with its Lighthouse. For a job of its own, give this one another name and "
            "another folder for checkpoints"
        )

    def refusal(self) -> str:
        """Return why the folder may no longer be written to, if it has no locks; empty if it may.

        Raises:
            OSError: `run.json` cannot be read.
        """
        if self._file is None:
            return ""
        found = Run.parsed(self._path.read_bytes()[:RUN_BYTES]) if self._path.is_file() else None
        if found is None or found.nonce == self._nonce:
            return ""
        return f"{self._what} {self._path.parent} was taken over by {found.describe()}"

    def release(self) -> None:
        """Give up the claim: other runs may claim the folder."""
        file, self._file, self._nonce = self._file, None, ""
        if file is not None:
            os.close(file)


_claims: weakref.WeakSet[RunClaim] = weakref.WeakSet()


def _release_all() -> None:
    for each in _claims:
        each.release()


# Otherwise the workers of a DataLoader that outlive a member would hold its lock.
os.register_at_fork(after_in_child=_release_all)


def remove_run(folder: Path) -> None:
    """Remove `run.json` from an otherwise empty folder, unless a live process holds it."""
    with suppress(OSError):
        file = os.open(folder / RUN, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for _ in range(5):  # another member that closes may hold it for a moment
                if try_lock(file, fcntl.LOCK_EX):
                    if os.listdir(folder) == [RUN]:
                        os.unlink(folder / RUN)
                    return
                time.sleep(_PAUSE_SECONDS / 4)
        finally:
            os.close(file)


def try_lock(file: int, kind: int) -> bool:
    """Take a lock on an open file, `fcntl.LOCK_SH` or `LOCK_EX`, unless another process holds a conflicting one.

    Returns:
        Whether it was taken; True also on a file system without locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _read(file: int) -> Run | None:
    return Run.parsed(os.pread(file, RUN_BYTES, 0))


def _write(file: int, run: Run) -> None:
    content = run.to_text().encode()
    os.ftruncate(file, 0)
    os.pwrite(file, content, 0)
    os.fsync(file)


def _holders(path: Path) -> list[str]:
    """Return the live processes of this machine that hold a lock on a file, as listed by the kernel."""
    with suppress(OSError):
        found = path.stat()
        name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = {int(words[4]) for words in lines if len(words) > 5 and words[1] == "FLOCK" and words[5] == name}
        return [f"process {pid}" for pid in sorted(pids) if pid > 0 and pid != os.getpid()]
    return []
