"""The command line as a user types it, in the test's process or in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evermoe.cli.main import main
from support.harness import SERVER


@dataclass(frozen=True)
class Done:
    """Result of a command that has ended in the test's process."""

    returncode: int
    stdout: str
    stderr: str


def evermoe(*arguments: str, folder: Path) -> Done:
    """Run `evermoe ARGUMENTS` in a folder, in this process; for commands that start no process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(arguments)
        except SystemExit as end:
            code = end.code
    assert code is None or isinstance(code, int), "a message would be printed, and the exit code be 1"
    return Done(code or 0, out.getvalue(), err.getvalue())


def evermoe_process(
    *arguments: str, folder: Path, limit: float = 100, missing: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `evermoe ARGUMENTS` in a folder, in a process of its own; as if a package was not installed."""
    return _wait_for(f"evermoe {' '.join(arguments)}", folder, limit, missing, functools.partial(_main, arguments))


def call(
    main: Callable[[Sequence[str]], int], *arguments: str, folder: Path, limit: float = 100
) -> subprocess.CompletedProcess[str]:
    """Call the `main` of a command in a folder, as `evermoe` does."""
    return _wait_for(
        f"{main.__module__} {' '.join(arguments)}", folder, limit, None, functools.partial(main, arguments)
    )


def script(path: Path, *arguments: str, folder: Path, limit: float = 100) -> subprocess.CompletedProcess[str]:
    """Run `python PATH ARGUMENTS` in a folder, as `evermoe` does."""
    return _wait_for(f"{path} {' '.join(arguments)}", folder, limit, None, functools.partial(_script, path, arguments))


def _wait_for(
    words: str, folder: Path, limit: float, missing: str | None, main: Callable[[], int | None]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        process = SERVER.Process(target=_run, args=(main, folder, out, err, missing))
        process.start()
        process.join(limit)
        is_over = process.exitcode is not None
        process.kill()
        process.join()
        assert is_over, f"{words} is not over after {limit:.0f} s"
        return subprocess.CompletedProcess(words, process.exitcode or 0, out.read_text(), err.read_text())


def _main(arguments: tuple[str, ...]) -> int | None:
    return main(arguments)


def _script(path: Path, arguments: tuple[str, ...]) -> None:
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _run(main: Callable[[], int | None], folder: Path, out: Path, err: Path, missing: str | None) -> None:
    os.chdir(folder)
    if missing is not None:
        assert missing not in sys.modules, f"{missing} was imported before it was needed"
        sys.modules[missing] = None  # type: ignore[assignment]
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.exit(main())
