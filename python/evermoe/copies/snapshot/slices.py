"""Slices of a sparse version: units captured completely in each step of a window. Pure.

A window of n steps from version v on (MoEvement): its step i captures version v + i.

    slice     version v         version v + 1     version v + 2
    0         complete
    1         weights alone     complete
    2         weights alone     weights alone     complete

*Complete* is weights and optimizer state. A member with these slices and the neighbours' messages replays the window:
it loads slice 0 at version v, and updates it from then on. It loads the other slices' weights at each version until
their state arrives. After n steps all units are at version v + n.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class UnitBytes(NamedTuple):
    """Sizes of a unit."""

    weights: int
    """Bytes that a forward and backward pass need."""
    state: int
    """Additional bytes that only an update needs."""


def bytes_per_step(units: Sequence[UnitBytes], places: Sequence[int], steps: int) -> list[int]:
    """Return the bytes captured in each step of a window: a slice, and the weights of later slices.

        >>> units = [UnitBytes(4, 8)] * 3  # Adam: two moments for each weight
        >>> bytes_per_step(units, [0, 1, 2], 3)  # 12 + 4 + 4, 12 + 4, 12
        [20, 16, 12]

    Args:
        units: of a rank.
        places: number of each unit's slice.
        steps: of the window.
    """
    found = [0] * steps
    for unit, place in zip(units, places, strict=True):
        found[place] += unit.weights + unit.state
        for step in range(place):
            found[step] += unit.weights
    return found


def fill_slices(units: Sequence[UnitBytes], most_bytes: int) -> list[int] | None:
    """Divide units, in their order, into the fewest slices that respect a limit on the bytes of a step.

    The first slice takes as many units as fit, and so on: fewer would leave more for later steps.

        >>> fill_slices([UnitBytes(4, 8)] * 4, 28)  # step 0: 12 + 3 * 4 = 24; step 1: 12 + 12 + 4 = 28; step 2: 12
        [0, 1, 1, 2]
        >>> fill_slices([UnitBytes(4, 8)] * 4, 23) is None  # a unit and the weights of the others are 24
        True

    Returns:
        The number of each unit's slice; None if no number of slices is enough.
    """
    left = sum(unit.weights for unit in units)  # weights of the slice being filled and of later ones
    found: list[int] = []
    place = state = own = 0  # number of the slice, state and weights of its units
    for number, unit in enumerate(units):
        if left + state + unit.state > most_bytes:
            left, is_empty = left - own, number == 0 or found[-1] < place
            place, state, own = place + 1, 0, 0
            if is_empty or left + unit.state > most_bytes:
                return None
        found.append(place)
        state, own = state + unit.state, own + unit.weights
    return found


def even_slices(units: Sequence[UnitBytes], steps: int) -> list[int]:
    """Divide units, in their order, into slices that minimise the largest number of bytes of any step of a window.

        >>> units = [UnitBytes(4, 8)] * 6
        >>> places = even_slices(units, 3)
        >>> places, bytes_per_step(units, places, 3)  # 72 bytes at once would be the complete version
        ([0, 1, 1, 2, 2, 2], [32, 36, 36])

    Args:
        units: of a rank; a unit is never divided.
        steps: of the window, 1 or more: the maximum number of slices.

    Returns:
        The number of each unit's slice.
    """
    low, high = 0, sum(unit.weights + unit.state for unit in units)  # `low` is too little, unless it is zero bytes
    while low < high:
        middle = (low + high) // 2
        found = fill_slices(units, middle)
        if found is not None and max(found, default=0) < steps:
            high = middle
        else:
            low = middle + 1
    return fill_slices(units, high) or []


MAX_SLICES = 8
"""More would save little: each step captures all weights, and a loss costs one step more per slice."""


def slices_needed(units: Sequence[UnitBytes], most_bytes: int) -> int:
    """Return the fewest slices whose steps respect a limit on bytes, such as that of a step's bubbles.

        >>> units = [UnitBytes(4, 8)] * 6  # 72 bytes at once; in two slices 36 + 12, then 36
        >>> [slices_needed(units, limit) for limit in (72, 71, 36, 20)]
        [1, 2, 3, 8]

    Args:
        units: of a rank.
        most_bytes: maximum of a step.

    Returns:
        1 where the version is not sparse; `MAX_SLICES` where even those are not enough.
    """
    for steps in range(1, MAX_SLICES):
        if max(bytes_per_step(units, even_slices(units, steps), steps), default=0) <= most_bytes:
            return steps
    return MAX_SLICES


# ---- parts of a window


def weights_of(unit: str, step: int) -> str:
    """Return the name of a unit's weights as captured in a step of a window before that of its slice."""
    return f"{unit}@{step}"


def parts_of(unit: str, place: int) -> Iterator[tuple[str, int]]:
    """Yield the parts of a unit of slice `place` in a window: names, and the step in which each is captured.

    >>> list(parts_of("a", 2))
    [('a@0', 0), ('a@1', 1), ('a', 2)]
    """
    for step in range(place):
        yield weights_of(unit, step), step
    yield unit, place


def slices_of(names: Iterable[str]) -> int:
    """Return the slices of the windows whose parts have these names; 0 if none contains only weights.

    >>> slices_of(["a", "b@0", "b@1", "b"])
    3
    """
    steps = [int(step) for unit, mark, step in (name.rpartition("@") for name in names) if mark and step.isdecimal()]
    return max(steps, default=-2) + 2


def newest_dense(held: Collection[tuple[str, int]], units: Collection[str]) -> int | None:
    """Return the newest version of which all units are held completely; None if there is none.

    >>> newest_dense({("a", 7), ("b", 7), ("a", 8)}, ["a", "b"])
    7
    """
    versions = {version for _, version in held}
    return max((each for each in versions if all((unit, each) in held for unit in units)), default=None)


def newest_window(held: Collection[tuple[str, int]], places: Mapping[str, int]) -> int | None:
    """Return the version with which the newest complete window begins; None if no window is complete.

    Holders have room for two versions of each slice, and overwrite the older one. Writing slice i of a window discards
    slice i of the window before the previous one, so the previous one stays complete.

        >>> newest_window({("a", 7), ("b@0", 7), ("b", 8), ("a", 9), ("b@0", 9)}, {"a": 0, "b": 1})
        7

    Args:
        held: names (see `parts_of`) and versions of the held parts.
        places: number of each unit's slice.
    """
    parts = [part for unit, place in places.items() for part in parts_of(unit, place)]
    begun = {version - places[name] for name, version in held if name in places}
    return max((v for v in begun if v >= 0 and all((name, v + step) in held for name, step in parts)), default=None)
