"""Tokens that experts had processed in the copies that were made of them, by level of copies.

From them follows what a recovery loses that takes an expert from an older copy. They are part of the state of presets
that always may lose tokens, so that a crash of all processes leaves them where it leaves the rest.

Shape suffixes: L layers, E experts of the layer that has the most.
"""

from __future__ import annotations

import math
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
class _Change:
    """Copies of some experts that were begun together, or that were never completed."""

    level: int
    version: int
    places: Places
    tokens: _Counts | None
    """[n] tokens in the copies; None for copies that were never completed."""


class CopyMarks:
    """The latest copies of each expert: their versions, and the tokens that it had processed in them.

    Changes become part of `table` with the next `fold`, so that the table of a version is the same on all members:
    some may have begun the version's copies, and others not.
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
        self._changes: list[_Change] = []

    @property
    def pending(self) -> int:
        """Number of changes that are not folded into the table yet."""
        return len(self._changes)

    def add(self, level: int, places: Places, version: int, tokens_LE: _Counts) -> None:
        """Record copies of experts at a version, and the tokens that they have processed in it."""
        if places.size:
            self._changes.append(_Change(level, version, places, tokens_LE[tuple(places)]))

    def drop(self, level: int, places: Places, version: int) -> None:
        """Record that copies were never completed; copies that are not known are ignored."""
        is_known = (self.marks(level)[:, places[0], places[1], 0] == version).any(0)
        if is_known.any():
            self._changes.append(_Change(level, version, places[:, is_known], None))

    def fold(self) -> None:
        """Make all changes part of the table."""
        for level in {change.level for change in self._changes}:
            self.table.numpy()[level] = self.marks(level)
        self._changes = []

    def marks(self, level: int) -> _Counts:
        """Return the [mark, L, E, 2] table of a level with the pending changes."""
        marks_MLE = self.table.numpy()[level].copy()
        for change in self._changes:
            if change.level != level:
                continue
            rows, experts = change.places
            found = marks_MLE[:, rows, experts]
            if change.tokens is None:
                marks_MLE[:, rows, experts] = _packed(found, found[..., 0] != change.version)
            else:
                is_new = found[0, :, 0] < change.version
                newest = np.stack([np.full_like(change.tokens, change.version), change.tokens], -1)[None]
                marks_MLE[:, rows, experts] = np.where(is_new[:, None], np.concatenate([newest, found[:-1]]), found)
        return marks_MLE

    def tokens_at(self, places: Places, versions: _Counts) -> tuple[_Counts, NDArray[np.bool_]]:
        """Return the tokens that experts had processed at versions, one for each, and where that is known.

        Where no copy of the version is known, the number is the most in any older copy.
        """
        found = np.concatenate([self.marks(level)[:, places[0], places[1]] for level in (SAVED, LOCAL, CHECKPOINT)])
        at, tokens = found[..., 0], found[..., 1]
        is_version = (at == versions) & (versions > 0)
        is_known = is_version.any(0)
        return np.where(np.where(is_known, is_version, at <= versions), tokens, 0).max(0, initial=0), is_known

    def undo(self, step: int) -> None:
        """Remove copies of later steps: all members resume after this number of steps."""
        self._changes = [change for change in self._changes if step_of(change.version) <= step]
        self._keep(self.table.numpy()[..., 0] % version_of(1, 0) <= step)

    def undo_experts(self, places: Places, versions: _Counts) -> None:
        """Fold, and remove copies of experts newer than the versions to which they returned: these copies are lost."""
        self.fold()
        version_LE = np.full(self.table.shape[2:4], (1 << 63) - 1)
        version_LE[tuple(places)] = versions
        is_kept = self.table.numpy()[..., 0] <= version_LE
        is_kept[CHECKPOINT] = True
        self._keep(is_kept)

    def _keep(self, is_kept: NDArray[np.bool_]) -> None:
        table = self.table.numpy()
        for level in np.flatnonzero(~is_kept.all((1, 2, 3))):
            table[level] = _packed(table[level], is_kept[level])

    def to_fields(self) -> dict[str, Any]:
        """Return the pending changes as JSON values, and the table if it is not part of the state."""
        table = self.table.numpy().ravel()
        used = np.flatnonzero(table) if not self.are_kept else np.zeros(0, int)
        changes = [
            [each.level, each.version, each.places.tolist(), None if each.tokens is None else each.tokens.tolist()]
            for each in self._changes
        ]
        return {"changes": changes, "table": [used.tolist(), table[used].tolist()]}

    def load_fields(self, fields: dict[str, Any]) -> None:
        """Replace the marks by those of another member, from its `to_fields`."""
        self._changes = [
            _Change(
                level,
                version,
                np.array(places, np.int64).reshape(2, -1),
                None if tokens is None else np.array(tokens, np.int64),
            )
            for level, version, places, tokens in fields["changes"]
        ]
        if not self.are_kept:
            used, values = fields["table"]
            self.table.zero_()
            self.table.numpy().ravel()[used] = values


def _packed(marks: _Counts, is_kept: NDArray[np.bool_]) -> _Counts:
    """Return the kept marks [mark, ..., 2] of each expert, the newest first, then none."""
    order = np.argsort(~is_kept, axis=0, kind="stable")
    packed = np.take_along_axis(marks, order[..., None], 0)
    return packed * np.take_along_axis(is_kept, order, 0)[..., None]
