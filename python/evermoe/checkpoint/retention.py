"""Retention of checkpoints; pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from evermoe.state.version import generation_of, step_of


class Retention(NamedTuple):
    """The checkpoints to keep: the newest ones, and permanently those of some steps.

    Of the steps 10, 20, ..., 100 `Retention(2, 40)` keeps 40, 80, 90 and 100.
    """

    newest: int = 2
    """Number of newest checkpoints to keep; at least 1."""
    every: int = 0
    """Interval in steps of the checkpoints that are kept permanently; 0: none."""

    def superseded(self, versions: Collection[int]) -> set[int]:
        """Return the versions that need not stay. Of a step that was repeated, the newest version stays."""
        newest = sorted(versions)[-self.newest :]
        by_step = {step_of(version): version for version in sorted(versions)}
        permanent = {version for step, version in by_step.items() if self.every and step % self.every == 0}
        return set(versions) - {*newest} - permanent


NEWEST = Retention()
"""Keeps the newest two."""
SAVES = Retention()
"""Keeps the newest two saves. Together they name two versions of each unit, of which one may be damaged."""


def is_undone(saved: int, version: int, generation: int) -> bool:
    """Return whether a recovery undid a saved version.

    Args:
        saved: version of a save.
        version: the version from which the job resumed.
        generation: generation of the members that resumed. What they have saved since then counts.
    """
    return saved > version and generation_of(saved) < generation
