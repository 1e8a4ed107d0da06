"""Trace files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evermoe.planning.trace import merge_traces


def write_whole(path: str | Path, text: str) -> None:
    """Writes the file so that it has all of the text, or is what it was."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's is for the owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def merge_files(paths: Sequence[str | Path], out: str | Path) -> list[int]:
    """Merges traces of several ranks, each from `Profiler.write_trace`; returns the ranks.

    Raises:
        ValueError: a file that cannot be read, is no trace, or is of the same rank as another.
    """
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
            merge_traces(texts[-1:])
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: expected a trace of one rank; {error}") from None
    merged = merge_traces(texts)
    try:
        write_whole(out, merged)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written; {error}") from None
    return sorted({int(event["pid"]) for event in json.loads(merged)["traceEvents"]})
