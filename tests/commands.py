"""The command line as a user types it: processes of their own, forked from one that has imported everything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evermoe.cli import main
from harness import SERVER


def evermoe(
    *arguments: str, folder: Path, limit: float = 100, missing: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`evermoe ARGUMENTS` in a folder: exit code, standard output and error; as if a package was not installed."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        process = SERVER.Process(target=_run, args=(arguments, folder, out, err, missing))
        process.start()
        process.join(limit)
        is_over = process.exitcode is not None
        process.kill()
        process.join()
        assert is_over, f"evermoe {' '.join(arguments)} is not over after {limit:.0f} s"
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, out.read_text(), err.read_text())


def _run(arguments: tuple[str, ...], folder: Path, out: Path, err: Path, missing: str | None) -> None:
    os.chdir(folder)
    if missing is not None:
        assert missing not in sys.modules, f"{missing} was imported before it was needed"
        sys.modules[missing] = None  # type: ignore[assignment]
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.exit(main(arguments))
