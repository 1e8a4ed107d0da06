"""Where single units are persisted: a folder or an object store behind the same few functions."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any, Protocol

from evermoe.persist.folder import PartialFolder, PersistedUnit
from evermoe.persist.object_store import Location, ObjectPath
from evermoe.persist.partial_bucket import PartialBucket
from evermoe.persist.saved import Saved


class PartialStore(Protocol):
    """Units that the members of a job persist, a few at a time; `PartialFolder` and `PartialBucket` have the details.

    A member's part of a version is a draft: its units are written, then it is committed. It is durable from then on,
    and nothing of it is there before.
    """

    @property
    def where(self) -> Any:
        """The place."""

    @property
    def first_seconds(self) -> float | None:
        """Seconds for which a job waits at most until all units are there for the first time; None: until they are."""

    def find(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """The durable units of all members; by unit, newest version first.

        Args:
            is_patient: whether a place that is away is waited for.

        Raises:
            OSError: it cannot be read.
        """

    def join(self, member: str) -> None:
        """A member begins to write here: removes what an earlier start of it has left half done.

        Raises:
            OSError: it cannot be read or written.
        """

    def newest(self, member: str) -> int | None:
        """The newest version of which a member's part is durable; raises as `find` does."""

    def write(self, saved: Saved) -> Any:
        """Writes a member's part of a version.

        Returns:
            The draft.

        Raises:
            OSError: it cannot be written.
        """

    def commit(self, draft: Any, generation: int) -> None:
        """Makes a draft durable.

        Args:
            draft: whose units are written.
            generation: of the members that its writer knows to be with.

        Raises:
            LeftBehind: newer members persist here; the draft is gone.
            OSError: it may not be durable.
        """

    def discard(self, draft: Any) -> None:
        """Removes a draft that was not committed; raises as `join` does."""

    def rewind(self, version: int, generation: int) -> None:
        """Makes undone what is newer than a version and of members before a generation; 0: of all members.

        Raises:
            LeftBehind: newer members persist here.
            OSError: some of it may be left.
        """

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Removes what no recovery needs any more, after a commit of a member; raises as `join` does."""

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Removes what others than the members of a generation have left half done: they are dead, or left behind."""


def open_partial(where: Location, layout: str, job: str | None = None) -> PartialStore:
    """The units that are persisted at a place.

    Args:
        where: a folder, or below a URL.
        layout: `UnitCatalog.layout`, which keeps the files of different models apart.
        job: that writes there.
    """
    return PartialBucket(where, layout, job) if isinstance(where, ObjectPath) else PartialFolder(where, layout)
