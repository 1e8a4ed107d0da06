"""Conversion of arguments for the native functions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def count(name: str, value: int) -> int:
    """Return the value as an int from 0 to 2^64 - 1, as the native functions require."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: expected an integer from 0 to 2^64 - 1, got {value!r}")
    return number


def array(name: str, value: ArrayLike, dtype: Any, ndim: int) -> NDArray[Any]:
    """Return the value as an array of `dtype`, without a copy if it is one; floats do not become integers."""
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected an array of {ndim} dimensions; {error}") from None
    if found.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(found.shape)}")
    if found.dtype == dtype:
        return found
    if found.size and not np.can_cast(found.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: expected {np.dtype(dtype)}, got {found.dtype}")
    if found.dtype == np.uint64 and dtype == np.int64 and found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected numbers below 2^63, got {found.max()}")
    return found.astype(dtype)


def counts(name: str, value: Sequence[int]) -> list[int]:
    """Return the value as a list of ints from 0 to 2^64 - 1."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: expected a list of integers, got {value!r}")
    return [count(name, number) for number in value]


def count_lists(name: str, value: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the value as lists of ints from 0 to 2^64 - 1."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: expected a list of lists of integers, got {value!r}")
    return [counts(name, numbers) for numbers in value]


def names(name: str, value: Sequence[str]) -> list[str]:
    """Return the value as a list of names; a single string is not a list."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: expected a list of names, got {value!r}")
    found = list(value)
    for each in found:
        if not isinstance(each, str):
            raise ValueError(f"{name}: expected names, which are strings, got {each!r}")
    return found


def choice(name: str, value: str, options: Sequence[str]) -> str:
    """One of the options."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(options)}, got {value!r}")
    return value


def number(name: str, value: float) -> float:
    """Return the value as a float."""
    if isinstance(value, str):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r}") from None
