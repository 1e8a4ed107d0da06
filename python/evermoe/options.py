"""What all options have in common: each class checks its own fields, and says which must be the same for all members.

Each room defines its own options beside what they configure; `evermoe.SessionConfig` combines them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

SHARED: Mapping[str, Any] = MappingProxyType({"shared": True})
"""Metadata of an option that must be the same for all members."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options. A subclass calls `super().__post_init__()`, so that a combination checks all its parts."""

    def __post_init__(self) -> None:
        """Checks the options.

        Raises:
            ValueError: an option is wrong; the message names it as the user wrote it.
        """

    def shared(self) -> str:
        """The options that must be the same for all members, as text."""
        names = [field.name for field in fields(self) if field.metadata.get("shared")]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _check_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} >= {least}, got {value}")

    def _check_one_of(self, name: str, choices: Collection[str]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def _check_portions(self, *names: str) -> None:
        for name in names:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"expected 0 < {name} <= 1, got {getattr(self, name)}")
