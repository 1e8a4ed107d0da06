"""Trace files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evermoe.planning.trace import merge_traces


def write_atomically(path: str | Path, text: str) -> None:
    """Write the file atomically: it has the complete text, or its previous content."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp creates files that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def merge_files(paths: Sequence[str | Path], out: str | Path) -> list[int]:
    """Merge traces of several ranks, each from `Profiler.write_trace`, and return the ranks.

    Raises:
        ValueError: a file cannot be read, is no trace, or has the same rank as another.
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
        write_atomically(out, merged)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written; {error}") from None
    return sorted({int(event["pid"]) for event in json.loads(merged)["traceEvents"]})
