"""Start of each full snapshot of the state, and the vote that must wait for it."""

from __future__ import annotations


class SnapshotSchedule:
    """A version is copied over `steps` steps, and must be complete before the vote on the last of them.

    The next version begins when that vote has passed, so the previous one stays until then:

        steps taken  0    1    2    3    4    5    6    7
        copied       v0   v1 ─────────── v4 ─────────── v7     over 3 steps from version 1 on
        complete          v0             v1             v4     with the votes that make 1, 4 and 7 the steps taken

    A loss just before the vote that makes 7 the steps taken rolls back to version 1, by 2 · 3 − 1 steps.
    """

    def __init__(self) -> None:
        self.is_used = True
        """Whether votes wait for versions; otherwise the state survives without the versions under way."""
        self.begun = 0
        """Steps taken in the newest version that is copied."""
        self._complete, self._due = 0, 1

    def restart(self, step: int) -> None:
        """Restart with version `step`, which is complete everywhere by the next vote if votes wait."""
        self._complete = self.begun = step
        self._due = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether the vote on `step` needs the version under way, after which the next one begins."""
        return step >= self._due

    def begin_version(self, step: int, steps: int) -> None:
        """Begin the version of `step`, over `steps` steps; the one under way is complete on all members."""
        self._complete, self.begun, self._due = self.begun, step, step + steps

    def lag(self, step: int) -> int:
        """Return the steps by which complete versions lag behind at the vote that makes `step` the steps taken."""
        if not self.is_used:
            return 0
        return step - 1 - (self.begun if self.is_due(step) else self._complete)
