"""Which checkpoints stay; pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from evermoe.state.version import step_of


class Retention(NamedTuple):
    """Which checkpoints stay: the newest ones, and those of some steps for ever.

    Of the steps 10, 20, ..., 100 `Retention(2, 40)` keeps 40, 80, 90 and 100.
    """

    newest: int = 2
    """How many of the newest; at least 1."""
    every: int = 0
    """Steps between those that stay for ever; 0: none do."""

    def superseded(self, versions: Collection[int]) -> set[int]:
        """Those of some versions that need not stay. Of a step that was taken again the newest version stays."""
        newest = sorted(versions)[-self.newest :]
        by_step = {step_of(version): version for version in sorted(versions)}
        for_ever = {version for step, version in by_step.items() if self.every and step % self.every == 0}
        return set(versions) - {*newest} - for_ever


NEWEST = Retention()
"""The newest two."""
