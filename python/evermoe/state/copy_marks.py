"""Tokens that experts had processed in the copies that were made of them, by level of copies.

From them follows what a recovery loses that takes an expert from an older copy. They are part of the state of presets
that always may lose tokens, so that a crash of all processes leaves them where it leaves the rest.

Shape suffixes: L layers, E experts of the layer that has the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe.state.version import step_of, version_of

SAVED, LOCAL, CHECKPOINT = range(3)
"""Levels: on other nodes or saved unit by unit, in the memory of the expert's own node, in a checkpoint of all."""
MAX_MARKS = 8
"""Latest copies of an expert that are remembered, by level: a store that is slow has three on their way."""

_Counts = NDArray[np.int64]
Places = _Counts
"""[2, n] rows of layers, and experts."""


@dataclass
class _Noted:
    """Copies of some experts that were begun together."""

    level: int
    version: int
    places: Places
    tokens: _Counts
    """[n]"""


class CopyMarks:
    """The latest copies of each expert: their versions, and the tokens that it had processed in them.

    What is noted becomes part of `table` with the next `fold`, so that the table of a version is the same on all
    members: some may have begun the version's copies, and others not.

    Args:
        layers: number of MoE layers L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        shape = 3, MAX_MARKS, layers, experts, 2
        self.state = torch.zeros(2 + math.prod(shape), dtype=torch.int64)
        """Kept marks: `each`, then `table`."""
        self.each = self.state[:2]
        """[2] experts of each layer that are copied at a time, saved and locally; 0 before losses have changed it."""
        self.table = self.state[2:].view(shape)
        """[level, mark, L, E, 2] version and tokens, the newest first; version 0 is none."""
        self.are_kept = False
        """Whether a crash of all processes leaves them."""
        self._noted: list[_Noted] = []
        self._gone: list[_Noted] = []
        """Copies that were never completed."""

    @property
    def pending(self) -> int:
        """Number of marks that are not folded into the table yet."""
        return len(self._noted) + len(self._gone)

    def note(self, level: int, places: Places, version: int, tokens_LE: _Counts) -> None:
        """Note copies of experts at a version, and the tokens that they have processed in it."""
        if places.size:
            self._noted.append(_Noted(level, version, places, tokens_LE[places[0], places[1]]))

    def forget(self, level: int, places: Places, version: int) -> _Counts:
        """Note that copies were never completed.

        Returns:
            [n] tokens that had their only copy of this level in it; 0 where a newer one was begun, or it is no news.
        """
        found = self._folded(level)[:, places[0], places[1]]
        is_news = (found[..., 0] == version).any(0)
        if is_news.any():
            tokens = found[0, :, 1] - found[1, :, 1]
            self._gone.append(_Noted(level, version, places[:, is_news], tokens[is_news]))
            return np.where(found[0, :, 0] == version, tokens, 0)
        return np.zeros(places.shape[1], np.int64)

    def fold(self) -> None:
        """Makes what is noted part of the table."""
        for level in {each.level for each in (*self._noted, *self._gone)}:
            self.table.numpy()[level] = self._folded(level)
        self._noted, self._gone = [], []

    def _folded(self, level: int) -> _Counts:
        """[mark, L, E, 2] the table of a level with what is noted."""
        marks = self.table.numpy()[level].copy()
        for each in (each for each in self._noted if each.level == level):
            is_new = marks[0, each.places[0], each.places[1], 0] < each.version
            rows, experts = each.places[:, is_new]
            marks[1:, rows, experts] = marks[:-1, rows, experts]
            marks[0, rows, experts, 0] = each.version
            marks[0, rows, experts, 1] = each.tokens[is_new]
        for each in (each for each in self._gone if each.level == level):
            rows, experts = each.places
            found = marks[:, rows, experts]
            marks[:, rows, experts] = _packed(found, found[..., 0] != each.version)
        return marks

    def tokens_at(self, places: Places, versions: _Counts) -> tuple[_Counts, NDArray[np.bool_]]:
        """Tokens that experts had processed at versions, one for each, and where that is known.

        Where no copy of the version is known, the most in one that is not newer.
        """
        found = np.concatenate([self._folded(level)[:, places[0], places[1]] for level in (SAVED, LOCAL, CHECKPOINT)])
        at, tokens = found[..., 0], found[..., 1]
        is_there = at == versions
        until = np.where(at <= versions, tokens, 0).max(0, initial=0)
        is_known = is_there.any(0) & (versions > 0)
        return np.where(is_known, np.where(is_there, tokens, 0).max(0, initial=0), until), is_known

    def newest(self, level: int, places: Places, versions: _Counts | None = None) -> _Counts:
        """[n] tokens that experts have processed in their newest copies of a level; 0 where there is none.

        `versions` [n]: only copies that are not newer count.
        """
        found = self._folded(level)[:, places[0], places[1]]
        if versions is None:
            return found[0, :, 1]
        is_older = found[..., 0] <= versions
        return np.take_along_axis(found[..., 1], is_older.argmax(0)[None], 0)[0] * is_older.any(0)

    def undo(self, step: int) -> None:
        """All continue after this number of steps: copies of later ones no longer count."""
        self._noted = [each for each in self._noted if step_of(each.version) <= step]
        self._gone = [each for each in self._gone if step_of(each.version) <= step]
        table = self.table.numpy()
        is_undone = table[..., 0] % version_of(1, 0) > step
        for level in np.flatnonzero(is_undone.any((1, 2, 3))):
            table[level] = _packed(table[level], ~is_undone[level])

    def to_fields(self, *, with_table: bool) -> dict[str, list[list[object]]]:
        """Return the notes as JSON takes them; `with_table`: after what is in the table."""
        noted = [*(self._in_table() if with_table else ()), *self._noted]
        rows = {"noted": noted, "gone": self._gone}
        return {
            name: [[each.level, each.version, each.places.tolist(), each.tokens.tolist()] for each in some]
            for name, some in rows.items()
        }

    def _in_table(self) -> Iterator[_Noted]:
        for level, marks in enumerate(self.table.numpy()):
            for versions_LE, tokens_LE in marks.transpose(0, 3, 1, 2):
                for version in np.unique(versions_LE[versions_LE > 0]).tolist():
                    rows, experts = np.nonzero(versions_LE == version)
                    yield _Noted(level, version, np.stack([rows, experts]), tokens_LE[rows, experts])

    def take_fields(self, fields: Mapping[str, Sequence[Sequence[Any]]], *, with_table: bool) -> None:
        """Takes over what `to_fields` of another member gave."""
        noted, gone = (
            [
                _Noted(level, version, np.array(places, np.int64).reshape(2, -1), np.array(tokens, np.int64))
                for level, version, places, tokens in fields[name]
            ]
            for name in ("noted", "gone")
        )
        self._noted, self._gone = noted, []
        if with_table:
            self.table.zero_()
            self._noted.sort(key=lambda each: each.version)
            self.fold()
        self._gone = gone


def _packed(marks: _Counts, stays: NDArray[np.bool_]) -> _Counts:
    """The marks [mark, ..., 2] that stay, of each expert the newest first, then none."""
    order = np.argsort(~stays, axis=0, kind="stable")
    packed = np.take_along_axis(marks, order[..., None], 0)
    return packed * np.take_along_axis(stays, order, 0)[..., None]
