"""The load to plan for: a file or a synthetic one. L layers, E experts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Load = NDArray[np.float64]
Draw = Callable[[int, np.random.Generator], Load]
"""Function that draws the load [E] of a number of experts, the hottest first or in any order."""

FORMS = "uniform, zipf:S, lognormal:SIGMA, hot:PERCENT@COUNT, or a file .npy, .json, .csv or .txt"
MAX_CELLS = 1 << 24
"""Largest number of experts of all layers together."""


def is_file(source: str) -> bool:
    """Return whether a load comes from a file."""
    return source.partition(":")[0] not in _KINDS


def read_load(source: str, layers: int | None, experts: int | None, seed: int) -> Load:
    """Return the load [L, E] that `--load` names. A file defines the number of layers and experts itself.

        >>> np.sort(read_load("zipf:2", layers=1, experts=2, seed=0))  # 1 / 2^2 and 1 / 1^2, in some order
        array([[0.25, 1.  ]])

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    for name, value in (("--layers", layers), ("--experts", experts)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
    kind, _, argument = source.partition(":")
    if kind in _KINDS:
        return _synthetic(_KINDS[kind](source, argument), layers or 1, experts, seed)
    load_LE = _checked(source, _read(source))
    for name, given, found in (("--layers", layers, len(load_LE)), ("--experts", experts, load_LE.shape[1])):
        if given is not None and given != found:
            raise ValueError(f"{name}: {source} has {found}, got {given}; leave the flag out")
    return load_LE


# ---- synthetic


def _synthetic(draw: Draw, layers: int, experts: int | None, seed: int) -> Load:
    """Draw a load in which each layer has its own hot experts."""
    if experts is None:
        raise ValueError("--experts: expected a number; only a --load file defines it")
    if seed < 0:
        raise ValueError(f"--seed: expected 0 or more, got {seed}")
    if layers * experts > MAX_CELLS:
        raise ValueError(f"--experts: expected at most 2^24 experts in all layers, got {layers} × {experts}")
    generator = np.random.default_rng(seed)
    return np.array([generator.permutation(draw(experts, generator)) for _ in range(layers)])


def _uniform(source: str, argument: str) -> Draw:
    if source != "uniform":
        raise ValueError(f"--load {source}: uniform has no argument {argument!r}")
    return lambda experts, _: np.ones(experts)


def _zipf(source: str, argument: str) -> Draw:
    exponent = _number(source, argument, "zipf:S with a number S of 0 or more, e.g. zipf:1.0")
    return lambda experts, _: np.arange(1, experts + 1, dtype=float) ** -exponent


def _lognormal(source: str, argument: str) -> Draw:
    sigma = _number(source, argument, "lognormal:SIGMA with a number SIGMA of 0 or more, e.g. lognormal:1.5")

    def draw(experts: int, generator: np.random.Generator) -> Load:
        normal = generator.standard_normal(experts)
        return np.exp(sigma * (normal - normal.max()))  # at most 1, so that no sigma overflows

    return draw


def _hot(source: str, argument: str) -> Draw:
    expected = "hot:PERCENT@COUNT: COUNT experts get PERCENT, 0 to 100, of the tokens, e.g. hot:87@2"
    percent, _, number = argument.partition("@")
    share = _number(source, percent, expected) / 100
    if share > 1 or not number.isdecimal() or int(number) == 0:
        raise ValueError(f"--load {source}: expected {expected}")
    count = int(number)

    def draw(experts: int, _: np.random.Generator) -> Load:
        if count >= experts:
            raise ValueError(f"--load {source}: expected fewer hot experts than {experts}, the number of experts")
        return np.repeat([share / count, (1 - share) / (experts - count)], [count, experts - count])

    return draw


def _number(source: str, text: str, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"--load {source}: expected {expected}")
    return value


_KINDS: dict[str, Callable[[str, str], Draw]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "lognormal": _lognormal,
    "hot": _hot,
}

# ---- files


def _read(source: str) -> Any:
    path = Path(source)
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": lambda path: np.load(path, allow_pickle=False),
        ".json": lambda path: json.loads(path.read_text()),
        ".csv": _rows,
        ".txt": _rows,
    }
    if path.suffix not in readers:
        raise ValueError(f"--load: expected {FORMS}; got {source!r}")
    try:
        return readers[path.suffix](path)
    except (OSError, EOFError) as error:
        raise ValueError(f"--load {source}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--load {source}: not a readable {path.suffix} file: {error}") from None


def _rows(path: Path) -> list[list[float]]:
    """Return the rows of a text: one layer per line, numbers separated by commas or blanks."""
    rows = [line.replace(",", " ").split() for line in path.read_text().splitlines()]
    return [[float(number) for number in row] for row in rows if row]


def _checked(source: str, found: Any) -> Load:
    """Return the numbers of a file as [L, E]."""
    expected = "expected numbers, a row of experts or a row for each layer"
    try:
        raw = np.asarray(found)
    except ValueError:
        raise ValueError(f"--load {source}: {expected}; the rows are not equally long") from None
    if raw.ndim not in (1, 2) or raw.size == 0 or raw.dtype.kind not in "iuf":
        raise ValueError(f"--load {source}: {expected}; got {raw.dtype} of shape {list(raw.shape)}")
    if raw.size > MAX_CELLS:
        raise ValueError(f"--load {source}: expected at most 2^24 experts in all layers, got {raw.size}")
    load_LE = np.atleast_2d(raw).astype(np.float64)
    if not np.isfinite(load_LE).all() or load_LE.min() < 0:
        raise ValueError(f"--load {source}: expected numbers that are finite and 0 or more")
    if load_LE.shape[1] == 1 and len(load_LE) > 1:
        raise ValueError(f"--load {source}: expected a row for each layer, got one column; write experts side by side")
    return load_LE
