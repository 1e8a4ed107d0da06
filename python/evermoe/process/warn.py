"""Warnings that refer to the line of the user's script that caused them, not to a line of evermoe."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = ("torch", "transformers", "accelerate", "threading", "contextlib", "concurrent")
"""Libraries whose lines would not help the user."""
NO_FILE = "evermoe"
"""Used instead of a file if the call stack has no user code, as in evermoe's threads."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line of user code, outside evermoe and the libraries that call it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        warnings.warn_explicit(message, category, NO_FILE, 0)
    else:
        place = frame.f_globals
        registry = place.setdefault("__warningregistry__", {})
        name = place.get("__name__", "__main__")
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)


def _is_users(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    is_ours = frame.f_code.co_filename.startswith(_PACKAGE)
    return not is_ours and name.partition(".")[0] not in LIBRARIES
