"""Tokens that experts had processed in the copies that were made of them, by level of copies.

From them follows what a recovery loses that takes an expert from an older copy. They are part of the state of presets
that always may lose tokens, so that a crash of all processes leaves them where it leaves the rest.

Shape suffixes: L layers, E experts of the layer that has the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe.state.version import step_of, version_of

SAVED, LOCAL, CHECKPOINT = range(3)
"""Levels: on other nodes or saved unit by unit, in the memory of the expert's own node, in a checkpoint of all."""
MOST_MARKS = 8
"""Latest copies of an expert that are remembered, by level: a store that is slow has three on their way."""

Place = tuple[int, int]
"""Layer's row and expert."""
_Counts = NDArray[np.int64]


@dataclass
class _Noted:
    """Copies of some experts that were begun together."""

    level: int
    version: int
    places: _Counts
    """[2, n] rows of layers, and experts."""
    tokens: _Counts
    """[n]"""

    def without(self, place: Place) -> _Noted:
        keep = (self.places != np.array(place)[:, None]).any(0)
        return _Noted(self.level, self.version, self.places[:, keep], self.tokens[keep])


class CopyMarks:
    """The latest copies of each expert: their versions, and the tokens that it had processed in them.

    What is noted becomes part of `table` with the next `fold`, so that the table of a version is the same on all
    members: some may have begun the version's copies, and others not.

    Args:
        layers: number of MoE layers L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.table = torch.zeros(3, MOST_MARKS, layers, experts, 2, dtype=torch.int64)
        """[level, mark, L, E, 2] version and tokens, the newest first; version 0 is none."""
        self._noted: list[_Noted] = []
        self._gone: list[tuple[int, int, Place]] = []
        """Level, version and place of copies that never came to be."""

    @property
    def pending(self) -> int:
        """How much is noted and not folded yet."""
        return len(self._noted)

    def note(self, level: int, places: Sequence[Place], version: int, tokens_LE: _Counts) -> None:
        """Notes copies of experts at a version, in which they have processed so many tokens."""
        if places:
            found = np.array(places, np.int64).T
            self._noted.append(_Noted(level, version, found, tokens_LE[found[0], found[1]]))

    def forget(self, level: int, place: Place, version: int) -> int | None:
        """Notes that a copy never came to be.

        Returns:
            The tokens that had their only copy of this level in it; None where a newer one was begun, or it is no news.
        """
        marks = self._of(level, place)
        if version not in [at for at, _ in marks]:
            return None
        self._noted = [
            each.without(place) if (each.level, each.version) == (level, version) else each for each in self._noted
        ]
        self._gone.append((level, version, place))
        if marks[0][0] != version:
            return None
        return marks[0][1] - (marks[1][1] if len(marks) > 1 else 0)

    def fold(self) -> None:
        """Makes what is noted part of the table."""
        table = self.table.numpy()
        for level, version, (row, expert) in self._gone:
            marks = table[level, :, row, expert]
            table[level, :, row, expert] = _packed(marks, marks[:, 0] != version)
        for each in self._noted:
            marks, tokens = table[each.level], each.tokens
            is_new = marks[0, each.places[0], each.places[1], 0] < each.version
            rows, experts = each.places[:, is_new]
            marks[1:, rows, experts] = marks[:-1, rows, experts]
            marks[0, rows, experts, 0] = each.version
            marks[0, rows, experts, 1] = tokens[is_new]
        self._noted, self._gone = [], []

    def _of(self, level: int, place: Place) -> list[tuple[int, int]]:
        """Versions and tokens of an expert's copies, the newest first, with what is not folded yet."""
        found = dict(self.table.numpy()[level, :, place[0], place[1]].tolist())
        for each in self._noted:
            if each.level == level:
                (at,) = np.nonzero((each.places == np.array(place)[:, None]).all(0))
                found |= {each.version: int(each.tokens[at[0]])} if len(at) else {}
        gone = {version for at, version, where in self._gone if (at, where) == (level, place)}
        return sorted(((at, tokens) for at, tokens in found.items() if at and at not in gone), reverse=True)

    def tokens_at(self, place: Place, version: int) -> int | None:
        """Tokens that an expert had processed at a version; None if no copy of that version is known."""
        marks = (mark for level in (SAVED, LOCAL, CHECKPOINT) for mark in self._of(level, place))
        return next((tokens for at, tokens in marks if at == version), None)

    def tokens_until(self, place: Place, version: int) -> int:
        """The most tokens that it had processed in a copy which is known and not newer; 0 if there is none."""
        marks = (mark for level in (SAVED, LOCAL, CHECKPOINT) for mark in self._of(level, place))
        return max((tokens for at, tokens in marks if at <= version), default=0)

    def newest(self, level: int, place: Place) -> int:
        """Tokens that an expert has processed in its newest copy of a level; 0 if there is none."""
        return next((tokens for _, tokens in self._of(level, place)), 0)

    def undo(self, step: int) -> None:
        """All go on after so many steps: copies of later ones count no more."""
        self._noted = [each for each in self._noted if step_of(each.version) <= step]
        table = self.table.numpy()
        is_undone = table[..., 0] % version_of(1, 0) > step
        for level, row, expert in np.argwhere(is_undone.any(1)).tolist():
            marks = table[level, :, row, expert]
            table[level, :, row, expert] = _packed(marks, ~is_undone[level, :, row, expert])

    def to_rows(self, *, with_table: bool) -> list[list[object]]:
        """What is noted, as JSON takes it; `with_table`: after what is in the table."""
        noted = [*(self._in_table() if with_table else ()), *self._noted]
        return [[each.level, each.version, each.places.tolist(), each.tokens.tolist()] for each in noted]

    def _in_table(self) -> Iterator[_Noted]:
        for level, marks in enumerate(self.table.numpy()):
            for versions_LE, tokens_LE in marks.transpose(0, 3, 1, 2):
                for version in np.unique(versions_LE[versions_LE > 0]).tolist():
                    rows, experts = np.nonzero(versions_LE == version)
                    yield _Noted(level, version, np.stack([rows, experts]), tokens_LE[rows, experts])

    def take_rows(self, rows: Sequence[Sequence[object]], *, with_table: bool) -> None:
        """Takes over what `to_rows` of another member gave."""
        self._noted, self._gone = [], []
        for level, version, places, tokens in rows:
            counts = np.array(places, np.int64).reshape(2, -1), np.array(tokens, np.int64)
            self._noted.append(_Noted(level, version, *counts))  # type: ignore[arg-type]
        if with_table:
            self.table.zero_()
            self._noted.sort(key=lambda each: each.version)
            self.fold()


def _packed(marks: _Counts, stays: NDArray[np.bool_]) -> _Counts:
    """The marks of one expert that stay, the newest first, then none."""
    left = marks[stays]
    return np.concatenate([left, np.zeros((len(marks) - len(left), 2), np.int64)])
