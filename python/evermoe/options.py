"""Base class of all options: checks types, ranges and names of their values.

`evermoe.config` and `evermoe.presets` define the options of a session. A field's type and its `option(...)` specify the
allowed values and whether they must be the same for all members; `Options` checks them.
"""

from __future__ import annotations

import math
import numbers
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_SECONDS = 1e8
"""Longest timeout, about three years."""
MIN_SECONDS = 1e-3
"""Shortest timeout other than 0."""
MAX_NUMBER = 2**62
"""Largest integer option, which fits into 64 bits in every message."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Names of jobs and nodes: they become path components, and must not lead to another folder."""

_WRONG = object()
_NOUNS: Mapping[Any, str] = types.MappingProxyType(
    {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a text",
        Path: "a path",
        Callable: "a function",
        Mapping: "a mapping",
    }
)


def option(
    default: Any = MISSING,
    *,
    shared: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    is_name: bool = False,
    env: str | None = None,
    flag: str | None = None,
) -> Any:
    """Define a field of `Options`.

    Args:
        default: value if none is given; without a default the option is required.
        shared: whether it must be the same for all members.
        least: smallest number.
        above: number that it must exceed.
        most: largest number.
        is_name: whether `check_name` checks it.
        env: environment variable that replaces the default.
        flag: its flag on a command line, without dashes; None for the field's name.
    """
    limits = {"least": least, "above": above, "most": most}
    metadata = {"shared": shared, "is_name": is_name, "limits": limits, "env": env, "flag": flag}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def check_name(what: str, name: str) -> None:
    """Check the name of a job or a node, which becomes a path component.

    Raises:
        ValueError: the name is empty, longer than 100 characters, begins with a dot, or has other characters than
            letters, digits, `.`, `_` and `-`.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"expected {what} to be a name of 1 to 100 letters, digits, '.', '_' or '-' that does not begin with '.', "
            f"got {name!r}"
        )


def count(number: int, noun: str) -> str:
    """Return a number with its noun for messages: `1 member`, `2 members`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def checked(
    name: str,
    value: Any,
    kind: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Check the type and range of an argument, and return it; numbers of numpy become Python's.

    Args:
        name: of the argument, as the user wrote it.
        value: of the argument.
        kind: bool, int, float, str, Path, a Callable, a Literal, or a union of them and None.
        least, above, most: bounds of a number.

    Raises:
        ValueError: the value has another type, is out of range, infinite or not a number.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    found: Any = next((each for each in (_converted(value, kind) for kind in kinds) if each is not _WRONG), _WRONG)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if found is _WRONG or (is_number and not _is_within(found, least, above, most)):
        nouns = " or ".join(_noun(each) for each in kinds)
        raise ValueError(f"expected {name} to be {nouns}{_range(least, above, most)}, got {value!r}")
    return found


def _converted(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else _WRONG
    if kind in (int, float) and not isinstance(value, bool):
        return _number(value, kind)
    return value if isinstance(value, get_origin(kind) or kind) and kind not in (int, float) else _WRONG


def _number(value: Any, kind: Any) -> Any:
    if kind is int:
        return int(value) if isinstance(value, numbers.Integral) and abs(int(value)) <= MAX_NUMBER else _WRONG
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return _WRONG
    return number if math.isfinite(number) else _WRONG


def _is_within(value: float, least: float | None, above: float | None, most: float | None) -> bool:
    low = -math.inf if least is None else least
    high = math.inf if most is None else most
    return low <= value <= high and (above is None or value > above)


def _noun(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if kind is types.NoneType:
        return "None"
    return _NOUNS.get(get_origin(kind) or kind) or f"an evermoe.{kind.__name__}"


def _range(least: float | None, above: float | None, most: float | None) -> str:
    bounds = {">=": least, ">": above, "<=": most}
    return "".join(f", {sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of all options. Subclasses call `super().__post_init__()`, so that all bases check their options."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is invalid; the message names it as the user wrote it.
        """
        hints = get_type_hints(type(self))
        for each in fields(self):
            limits = each.metadata.get("limits", {})
            value = checked(each.name, getattr(self, each.name), hints[each.name], **limits)
            object.__setattr__(self, each.name, value)
            if each.metadata.get("is_name") and value is not None:
                check_name(each.name, value)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [each.name for each in fields(cls)]

    def shared(self) -> dict[str, str]:
        """Return the options that must be the same for all members, as text by name; for a mapping, its keys."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("shared")}
        return {
            name: ", ".join(sorted(value)) if isinstance(value, Mapping) else str(value)
            for name, value in values.items()
        }


def require(flags: Mapping[str, object]) -> None:
    """Check that all required flags of a command line are given.

    Args:
        flags: values by the description of each flag; None if it is missing.

    Raises:
        ValueError: flags are missing; the message names all of them.
    """
    missing = [about for about, value in flags.items() if value is None]
    if missing:
        raise ValueError(f"missing: {'; '.join(missing)}")
