"""Wraps methods while a profiler is attached, and puts back what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """A stack of things to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._replaced: set[tuple[int, str]] = set()

    def add(self, undo: Callable[[], None]) -> None:
        """`undo` is called when all is put back."""
        self._undo.append(undo)

    def replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """`owner.name` becomes `wrap` of what it is. Nothing if it is not there, or is wrapped already."""
        key = (id(owner), name)
        if key in self._replaced or not hasattr(owner, name):
            return
        own = vars(owner).get(name)
        wrapped = wrap(getattr(owner, name))
        setattr(owner, name, wrapped)
        self._replaced.add(key)

        def undo() -> None:
            if vars(owner).get(name) is not wrapped:
                return  # another wrapper lies around ours since; ours records nothing any more
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def undo(self) -> None:
        """Puts everything back, the newest first."""
        while self._undo:
            self._undo.pop()()
        self._replaced.clear()
