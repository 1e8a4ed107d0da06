"""The location of a checkpoint that a script requests."""

from __future__ import annotations

from pathlib import Path

from evermoe.checkpoint.manifest import CHECKPOINT, SAVE
from evermoe.checkpoint.object_store import Location, locate
from evermoe.options import check_name


def place_to_save(path_or_name: str | Path, home: str | Path | None, timeout: float) -> Location:
    """Return the folder or URL to which `Session.save(path_or_name)` writes.

    Args:
        path_or_name: a path, a URL, or the name of a folder below `home`: a string without a slash.
        home: location of the session's own checkpoints; None: it has none.
        timeout: seconds during which a request to a URL is retried.

    Raises:
        ValueError: it is a name and `home` is None or uses that name itself; or it is a URL with an unknown scheme.
    """
    text = str(path_or_name)
    if isinstance(path_or_name, Path) or "/" in text:
        return locate(path_or_name, patience=timeout)
    if home is None:
        raise ValueError(
            f"session.save: {text!r} names a folder below the session's checkpoints, and the session has none; "
            f"give a path, such as './{text}'"
        )
    check_name("the name of a checkpoint", text)
    if text.startswith((f"{CHECKPOINT}-", f"{SAVE}-")):
        raise ValueError(f"session.save: the session itself uses the name {text!r}; give another one")
    return locate(f"{home}/{text}", patience=timeout)
