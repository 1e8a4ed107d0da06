"""Weighted mixtures of iterables, with an exact state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from evermoe.data.stateful import END, Source, Stateful
from evermoe.options import checked

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
"""When a mixture ends, by the names of `datasets.interleave_datasets`."""
_DRAWN = 1024
"""Random numbers that are drawn together."""


class Mixture(Stateful):
    """Items of several iterables, each drawn at random by weights.

    The draw of an item depends on its number and the epoch's seed alone. So weights that are a function of the number
    may change in a running job, and items that are read again come from the same sources.

        stage = lambda number: [0.8, 0.2] if number < 100_000 else [0.5, 0.5]
        evermoe.data.Mixture([web, code], weights=stage)

    Args:
        sources: the iterables.
        weights: a weight for each source, or a function that returns them for the number of an item in the epoch, from
            0 on. Under `ElasticReaders` that is the number in the reader: with V readers about the V-th part of that in
            the job. None for equal weights.
        stopping_strategy: when the epoch ends. "first_exhausted": when a source is drawn that has no item left.
            "all_exhausted": when that has happened to all sources with a weight; those that end sooner begin again,
            with their next epoch. "all_exhausted_without_replacement": when all sources have ended; each item comes
            once.

    Raises:
        UnsupportedState: the state of a source does not describe its place.
        ValueError: an argument is wrong, or while iterating, a function returns wrong weights.
    """

    def __init__(
        self,
        sources: Sequence[Iterable[Any]],
        *,
        weights: Sequence[float] | Callable[[int], Sequence[float]] | None = None,
        stopping_strategy: StoppingStrategy = "first_exhausted",
    ) -> None:
        super().__init__(sources)
        if not sources:
            raise ValueError("expected at least one source for the mixture, got none")
        self._strategy = checked("stopping_strategy", stopping_strategy, StoppingStrategy)
        given = [1.0] * len(sources) if weights is None else weights
        self._schedule = given if callable(given) else None
        self._weights = None if callable(given) else self._checked(given)
        self._passes: list[int] = []
        """By source, the number of times that it has begun again in the epoch."""
        self._has_ended: list[bool] = []
        """By source, whether it has ended in the epoch."""
        self._drawn: tuple[int, Any] = (-1, None)
        """Random numbers in [0, 1) of items from a multiple of `_DRAWN` on."""

    def _checked(self, weights: Sequence[float]) -> np.ndarray:
        found = np.asarray(weights, dtype=np.float64)
        if found.shape != (len(self._sources),) or not np.isfinite(found).all() or found.min() < 0 or not found.any():
            raise ValueError(
                f"expected a weight of at least 0 for each of the {len(self._sources)} sources of the mixture, and one "
                f"above 0, got {weights!r}"
            )
        return found

    def _begin(self, place: Any) -> None:
        count = len(self._sources)
        positions, passes, has_ended = place or ([None] * count, [0] * count, [False] * count)
        self._passes, self._has_ended, self._drawn = list(passes), list(has_ended), (-1, None)
        for number, position in enumerate(positions):
            self._open(number, position)

    def _open(self, number: int, position: Any = None) -> Source:
        source, repeats = self._sources[number], self._passes[number]
        seed = (self._seed + number * 1_000_003 + repeats * 7_368_787) % 2**62
        source.open(seed, epoch=self._epoch + repeats, position=position)
        return source

    def _next(self) -> Any:
        weights = self._weights if self._schedule is None else self._checked(self._schedule(self._number))
        assert weights is not None
        is_left = np.array([not self._is_used_up(number) for number in range(len(self._sources))])
        while (weights * is_left).any():
            number = self._draw(weights * is_left)
            item = self._sources[number].next()
            if item is not END:
                return item
            self._has_ended[number] = True
            if self._strategy == "first_exhausted" or all(np.array(self._has_ended)[weights > 0]):
                return END
            if self._strategy == "all_exhausted":
                self._passes[number] += 1
                item = self._open(number).next()
                if item is not END:
                    return item
            is_left[number] = False
        return END

    def _is_used_up(self, number: int) -> bool:
        """Return whether a source that has ended does not begin again: by the strategy, or as it is empty."""
        is_over = self._has_ended[number] and self._sources[number].is_over
        return is_over and (self._strategy != "all_exhausted" or not self._sources[number].number)

    def _draw(self, weights: np.ndarray) -> int:
        block, index = divmod(self._number, _DRAWN)
        if self._drawn[0] != block:
            self._drawn = block, np.random.default_rng([self._seed, block]).random(_DRAWN)
        bounds = np.cumsum(weights)
        found = np.searchsorted(bounds, self._drawn[1][index] * bounds[-1], side="right")
        return min(int(found), int(np.flatnonzero(weights)[-1]))  # the product may be rounded up

    def _place(self) -> Any:
        for source in self._sources:
            source.mark()
        return [[source.position() for source in self._sources], list(self._passes), list(self._has_ended)]
