"""A shuffle buffer whose state is small and exact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from evermoe.data.stateful import END, Stateful
from evermoe.options import checked


class Shuffled(Stateful):
    """The items of an iterable in random order, block by block.

    Blocks of `buffer_size` consecutive items are each shuffled. While a block is yielded, the next one is read: an item
    for each. The state is that of the source at the beginning of the block, and the number of items yielded from it. So
    it is small, and to continue, at most two blocks are read again. The order is drawn again in each epoch.

        evermoe.data.Shuffled(stream, buffer_size=10_000)

    Args:
        items: an iterable.
        buffer_size: items of a block; up to twice this number are in memory.

    Raises:
        UnsupportedState: the state of `items` does not describe its place.
        ValueError: an argument is wrong.
    """

    def __init__(self, items: Iterable[Any], buffer_size: int) -> None:
        super().__init__([items])
        self._size = checked("buffer_size", buffer_size, int, least=1)
        self._block: list[Any] = []
        """Items of the current block, shuffled."""
        self._given = self._block_number = 0
        """Number of its items that were yielded, and its number in the epoch."""
        self._ahead: list[Any] = []
        """Items of the next block."""
        self._starts: list[dict[str, Any]] = []
        """Positions of the source at the beginnings of the two blocks."""

    def _begin(self, place: Any) -> None:
        position, self._block_number, self._given = place or (None, 0, 0)
        self._sources[0].open(self._seed, epoch=self._epoch, position=position)
        self._ahead, self._starts = [], [{}, self._sources[0].position()]
        self._take_block()

    def _take_block(self) -> None:
        """Read the rest of the next block, and make it the current one."""
        while len(self._ahead) < self._size and self._read_ahead():
            pass
        order = np.random.default_rng([self._seed, self._block_number]).permutation(len(self._ahead))
        self._block, self._ahead = [self._ahead[number] for number in order], []
        self._sources[0].mark()
        self._starts = [self._starts[1], self._sources[0].position()]

    def _read_ahead(self) -> bool:
        item = self._sources[0].next()
        if item is not END:
            self._ahead.append(item)
        return item is not END

    def _next(self) -> Any:
        if self._given == len(self._block) and (self._ahead or self._read_ahead()):
            self._block_number, self._given = self._block_number + 1, 0
            self._take_block()
        if self._given == len(self._block):
            return END
        if len(self._ahead) < self._size:
            self._read_ahead()
        item, self._block[self._given] = self._block[self._given], None
        self._given += 1
        return item

    def _place(self) -> Any:
        return [self._starts[0], self._block_number, self._given]
