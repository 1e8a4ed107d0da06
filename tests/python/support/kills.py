"""Kills a process before each operation on files in turn: by ptrace, so native code's count, too."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import shutil
import signal
import struct
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from support.harness import SERVER

LIMIT = 100.0
"""Seconds for all runs together."""
_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = 1 | 8 | 0x100000
"""TRACESYSGOOD, TRACECLONE, EXITKILL of ptrace."""
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_CREATES = os.O_CREAT | os.O_TRUNC
# Linux on x86-64: number → which arguments are paths, folders of paths, or open files; and the flags of an open.
_BY_PATH = {82: (0, 1), 83: (0,), 84: (0,), 85: (0,), 86: (0, 1), 87: (0,), 88: (1,), 76: (0,), 90: (0,)}
_BY_FOLDER = {258: ((0, 1),), 263: ((0, 1),), 264: ((0, 1), (2, 3)), 265: ((0, 1), (2, 3)), 316: ((0, 1), (2, 3))}
_RENAMES, _FLUSHES = {82, 264, 316}, {74, 75}
_BY_FILE = {1, 18, 20, 40, 77, 91, 285, 296, 326}
_OPEN, _OPENAT, _GETSID = 2, 257, 124

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def boundary() -> None:
    """Stands between two writes to mapped memory, which are no system calls: counts as an operation."""
    os.getsid(0)


def kill_at_each_operation(place: Path, write: Callable[[Path], None], before: Path | None = None) -> list[Path]:
    """The folders that `write(folder)` leaves when it is killed before its first, second, ... operation on the folder.

    Each run begins with an empty folder or a copy of `before`. The last folder is that of a run to the end.
    """
    if platform.machine() != "x86_64":
        pytest.skip("knows the system calls of x86-64 alone")
    place.mkdir(mode=0o700)
    process = SERVER.Process(target=_run_all, args=(place, write, before))
    process.start()
    _wait_for(process, place / "errors")
    return sorted(path for path in place.iterdir() if path.is_dir())


def operations(place: Path, write: Callable[[Path], None]) -> list[list[Any]]:
    """Return file operations of `write(place / "run")`: `rename`, `write`, `name` (make or remove), `flush`; paths."""
    if platform.machine() != "x86_64":
        pytest.skip("knows the system calls of x86-64 alone")
    (place / "run").mkdir()
    process = SERVER.Process(target=_record, args=(place / "run", write))
    process.start()
    _wait_for(process, place / "errors")
    lines = (place / "operations").read_text().splitlines()
    return [[kind, *map(Path, paths)] for kind, *paths in map(json.loads, lines)]


def _wait_for(process: ForkServerProcess, errors: Path) -> None:
    process.join(LIMIT)
    is_over = process.exitcode is not None
    process.kill()
    process.join()
    assert is_over, f"not over after {LIMIT:.0f} s"
    assert process.exitcode == 0, errors.read_text() if errors.exists() else "the tracing process failed: see stderr"


def _record(folder: Path, write: Callable[[Path], None]) -> None:
    with (folder.parent / "operations").open("w") as file:

        def note(number: int, paths: list[str]) -> bool:
            by_file = "flush" if number in _FLUSHES else "write" if number in _BY_FILE else "name"
            file.write(json.dumps(["rename" if number in _RENAMES else by_file, *paths]) + "\n")
            return False

        _run(folder, write, note)


def _run_all(place: Path, write: Callable[[Path], None], before: Path | None) -> None:
    for at in itertools.count(1):
        folder = place / f"{at:04d}"
        if before is None:
            folder.mkdir(mode=0o700)
        else:
            shutil.copytree(before, folder)
        if not _run(folder, write, _counts_to(at)):
            return


def _counts_to(at: int) -> Callable[[int, list[str]], bool]:
    left = itertools.count(at - 1, -1)
    return lambda number, paths: number not in _FLUSHES and next(left) == 0


def _run(folder: Path, write: Callable[[Path], None], is_last: Callable[[int, list[str]], bool]) -> bool:
    """Whether it was killed before an operation (number, paths) that `is_last`; it is asked of each in the folder."""
    child = os.fork()
    if child == 0:
        try:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            write(folder)
            os._exit(0)
        except BaseException:
            (folder.parent / "errors").write_text(traceback.format_exc())
            os._exit(1)
    os.waitpid(child, _WALL)
    _ptrace(_SETOPTIONS, child, data=_OPTIONS)
    _resume(child)
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if thread != child:
                continue
            assert os.waitstatus_to_exitcode(status) == 0, (folder.parent / "errors").read_text()
            return False
        stopped_by = os.WSTOPSIG(status)
        try:
            operation = _operation(thread, str(folder)) if stopped_by == _SYSCALL_STOP else None
        except (ProcessLookupError, FileNotFoundError):  # another thread has just ended the process
            continue
        if operation is not None and is_last(*operation):
            os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, _WALL)[0] != child:
                pass
            return True
        _resume(thread, 0 if stopped_by in (signal.SIGTRAP, _SYSCALL_STOP, signal.SIGSTOP) else stopped_by)


def _resume(thread: int, signal_number: int = 0) -> None:
    """To its next system call."""
    with contextlib.suppress(ProcessLookupError):  # it has just been ended with its process
        _ptrace(_SYSCALL, thread, data=signal_number)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace {request}: {os.strerror(error)}")


def _operation(thread: int, folder: str) -> tuple[int, list[str]] | None:
    """Return the system call by which the thread is about to change or flush the folder, if any, and its paths."""
    info = ctypes.create_string_buffer(88)
    _ptrace(_GET_SYSCALL_INFO, thread, len(info), ctypes.addressof(info))
    what, number, *arguments = struct.unpack("<B23xQ6Q", info.raw[:80])
    if what != 1:  # on its way out
        return None
    if number == _GETSID:
        return number, []
    if number in _BY_FILE | _FLUSHES:
        paths = [_open_file(thread, arguments[0])]
    elif number in _BY_PATH:
        paths = [_path(thread, arguments[i]) for i in _BY_PATH[number]]
    elif number in _BY_FOLDER:
        paths = [_path(thread, arguments[i], arguments[of]) for of, i in _BY_FOLDER[number]]
    elif number == _OPEN and arguments[1] & _CREATES:
        paths = [_path(thread, arguments[0])]
    elif number == _OPENAT and arguments[2] & _CREATES:
        paths = [_path(thread, arguments[1], arguments[0])]
    else:
        return None
    is_inside = any(path == folder or path.startswith(folder + "/") for path in paths)
    return (number, paths) if is_inside else None


def _open_file(thread: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{thread}/fd/{descriptor & 0xFFFFFFFF}")
    except OSError:
        return ""


def _path(thread: int, address: int, folder: int = 0) -> str:
    """The string at an address of the thread's memory, in the open folder if it is relative."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        text = memory.read(4096 - address % 4096)
        text = text if b"\0" in text else text + memory.read(4096)
    path = text.split(b"\0")[0].decode(errors="replace")
    return path if path.startswith("/") else f"{_open_file(thread, folder)}/{path}"
