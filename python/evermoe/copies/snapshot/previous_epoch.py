"""Local snapshots from before a change of members, until all members have new ones."""

from __future__ import annotations

from evermoe.copies.snapshot.store import SnapshotStore


class PreviousEpochSnapshots:
    """Keeps the previous epoch's snapshots until every member has new ones; all members remove them with the same vote.

    Until then a crash of all processes needs them: only together do the members have all units, at one version.

    Args:
        store: this node's arenas.
    """

    def __init__(self, store: SnapshotStore) -> None:
        self._store, self._generation = store, 0
        self._are_needed = self._are_complete = False
        self.are_replaced = False
        """Whether their replacements are under way."""

    def restart(self, generation: int) -> None:
        """Restart, since the members change: they are of this generation now, and decide again."""
        self._generation = generation
        self._reset()

    def _reset(self) -> None:
        self._are_needed = self.are_replaced = self._are_complete = False

    def release(self, *, are_needed: bool) -> None:
        """The copies of a plan are complete, except for its local snapshots if the previous ones are needed."""
        self._are_needed = are_needed
        if not are_needed:
            self._store.prune(self._generation)

    def replace(self) -> None:
        """Record that all members have begun the replacements."""
        self.are_replaced = self._are_needed

    def report_complete(self, is_complete: bool) -> bool:
        """Return whether this member's replacements are complete, which it reports in its vote."""
        self._are_complete = is_complete
        return is_complete

    def give_up(self) -> None:
        """Remove the previous snapshots if members have reported complete replacements in the passed vote."""
        if self._are_complete:
            self._reset()
            self._store.prune(self._generation)
