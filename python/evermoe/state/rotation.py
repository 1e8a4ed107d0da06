"""All that the same ranks hold, a part of it in each step: the optimizer's state and weights, or the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

MAX_SLICES = 128
"""Tensors of which parts are taken at a time, however small they are."""


class Entry(NamedTuple):
    """A tensor of a unit."""

    unit: str
    name: str
    """As in its `TensorSpec`."""
    numel: int
    itemsize: int


class Slice(NamedTuple):
    """Elements `[start:stop]` of a tensor in one dimension."""

    entry: Entry
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the entry's tensor, or of its gradient."""
        return tensor.reshape(-1)[self.start : self.stop]


class Round:
    """One turn of a rotation after the other: the bytes that were compared in it, and the step in which it began.

    >>> turn = Round(8)
    >>> turn.compared(3, 4), turn.compared(5, 4), turn.end()
    (None, None, 3)
    >>> turn.compared(6, 4), turn.end()  # of the other bytes some holder has told nothing
    (None, None)
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._began, self._compared = -1, 0

    def compared(self, step: int, nbytes: int) -> None:
        """Record that all holders have the same bytes of a part of the state after `step` steps."""
        self._began = self._began if self._compared else step
        self._compared += nbytes

    def end(self) -> int | None:
        """Begin the next turn. Return the step in which this one began if all bytes were compared, or None."""
        is_complete, self._compared = self._compared == self._nbytes, 0
        return self._began if is_complete else None


class Rotation:
    """Takes parts of tensors one after the other, and begins again after the last one.

    >>> rotation = Rotation([Entry("a", "weight", 3, 4), Entry("a", "bias", 1, 4)])
    >>> [(part.entry.name, part.start, part.stop) for part in rotation.take(8)]
    [('weight', 0, 2)]
    >>> [(part.entry.name, part.start, part.stop) for part in rotation.take(100)]
    [('weight', 2, 3), ('bias', 0, 1)]
    >>> [(part.entry.name, part.start, part.stop) for part in rotation.take(4)]
    [('weight', 0, 1)]
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = [each for each in entries if each.numel]
        """All of them."""
        self._next = self._start = 0
        self.nbytes = sum(each.numel * each.itemsize for each in entries)

    @property
    def is_at_start(self) -> bool:
        """Whether the next parts are the first ones."""
        return not self._next and not self._start

    def take(self, nbytes: int) -> list[Slice]:
        """Return the next parts: at most `nbytes` together, but at least an element. They do not go past the end."""
        parts: list[Slice] = []
        while self._next < len(self.entries) and len(parts) < MAX_SLICES:
            entry = self.entries[self._next]
            count = min(
                entry.numel - self._start, nbytes // entry.itemsize if parts else max(1, nbytes // entry.itemsize)
            )
            if not count:
                break
            parts.append(Slice(entry, self._start, self._start + count))
            nbytes -= count * entry.itemsize
            self._start += count
            if self._start == entry.numel:
                self._next, self._start = self._next + 1, 0
        if self._next == len(self.entries):
            self._next = 0
        return parts
