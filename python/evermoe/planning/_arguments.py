"""Conversion of arguments for the native functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def count(name: str, value: int) -> int:
    """The value as an int from 0 to 2^64 - 1, which is what the native functions take."""
    number = value.__index__()
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: expected an integer from 0 to 2^64 - 1, got {value}")
    return number


def array(name: str, value: ArrayLike, dtype: Any, ndim: int) -> NDArray[Any]:
    """The value as an array of `dtype`, without a copy if it is one; floats do not become integers."""
    found = np.asarray(value)
    if found.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(found.shape)}")
    if found.dtype == dtype:
        return found
    if found.size and not np.can_cast(found.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: expected {np.dtype(dtype)}, got {found.dtype}")
    return found.astype(dtype)


def node_lists(name: str, value: Sequence[Sequence[int]]) -> list[list[int]]:
    """Lists of node numbers for the native functions."""
    return [[count(name, node) for node in nodes] for nodes in value]
