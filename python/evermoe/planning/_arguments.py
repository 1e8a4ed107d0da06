"""Conversion of arguments for the native functions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def count(name: str, value: int) -> int:
    """The value as an int from 0 to 2^64 - 1, which is what the native functions take."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: expected an integer from 0 to 2^64 - 1, got {value!r}")
    return number


def array(name: str, value: ArrayLike, dtype: Any, ndim: int) -> NDArray[Any]:
    """The value as an array of `dtype`, without a copy if it is one; floats do not become integers."""
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


def node_lists(name: str, value: Sequence[Sequence[int]]) -> list[list[int]]:
    """Lists of node numbers for the native functions."""
    return [[count(name, node) for node in nodes] for nodes in value]
