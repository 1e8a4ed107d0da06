"""Wrapping of methods while a profiler is attached, and their restoration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Stack of changes to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._replaced: set[tuple[int, str]] = set()

    def add(self, undo: Callable[[], None]) -> None:
        """Register `undo`, which is called when all changes are undone."""
        self._undo.append(undo)

    def replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `owner.name` by `wrap` of it. No-op if it is missing or wrapped already."""
        key = (id(owner), name)
        if key in self._replaced or not hasattr(owner, name):
            return
        own = vars(owner).get(name)
        wrapped = wrap(getattr(owner, name))
        setattr(owner, name, wrapped)
        self._replaced.add(key)

        def undo() -> None:
            if vars(owner).get(name) is not wrapped:
                return  # another wrapper was put around ours since; ours no longer records
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes, the newest first."""
        while self._undo:
            self._undo.pop()()
        self._replaced.clear()
