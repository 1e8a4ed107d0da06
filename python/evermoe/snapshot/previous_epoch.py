"""Local snapshots from before a change of members, until all members have new ones."""

from __future__ import annotations

from collections.abc import Callable


class PreviousEpochSnapshots:
    """Keep the previous epoch's snapshots until every member has new ones; all members give them up with the same vote.

    Until then a crash of all processes needs them: only together do members have all units, at one version.

    Args:
        prune: removes them here.
    """

    def __init__(self, prune: Callable[[], None]) -> None:
        self._prune = prune
        self._are_needed = self._are_whole = False
        self.are_replaced = False
        """Whether the snapshots that take their place are under way."""

    def forget(self) -> None:
        """The members change: a new decision about them follows."""
        self._are_needed = self.are_replaced = self._are_whole = False

    def release(self, *, are_needed: bool) -> None:
        """The copies of a plan are complete, except for its local snapshots if the previous ones are needed."""
        self._are_needed = are_needed
        if not are_needed:
            self._prune()

    def replace(self) -> None:
        """Snapshots that take their place are begun now, on all members."""
        self.are_replaced = self._are_needed

    def note_whole(self, is_whole: bool) -> bool:
        """Whether their replacements are complete on this member, which reports it in its vote."""
        self._are_whole = is_whole
        return is_whole

    def give_up(self) -> None:
        """A vote has passed: if members have reported in it that theirs are complete, the previous ones are removed."""
        if self._are_whole:
            self.forget()
            self._prune()
