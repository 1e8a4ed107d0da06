"""The same interface to units persisted in a folder and in an object store."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any, Protocol

from evermoe.checkpoint.folder import PartialFolder, PersistedUnit
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.partial_bucket import PartialBucket
from evermoe.checkpoint.saved import Saved


class PartialStore(Protocol):
    """Units that the members of a job persist, a few at a time; see `PartialFolder` and `PartialBucket`.

    A member's part of a version is a draft: the member writes its units, then commits it. Only then does it appear,
    durable.
    """

    @property
    def where(self) -> Any:
        """Location of the units."""

    @property
    def first_seconds(self) -> float | None:
        """Maximum seconds that a job waits until all units are durable for the first time; None: no limit."""

    def find_units(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """Return the durable units of all members; by unit, newest version first.

        Args:
            is_patient: whether to wait for a store that is unavailable.

        Raises:
            OSError: the store cannot be read.
        """

    def prepare_for(self, member: str) -> None:
        """Prepare the store for a member: remove what an earlier start of it left unfinished.

        Raises:
            OSError: the store cannot be read or written.
        """

    def newest(self, member: str) -> int | None:
        """Return the newest version of which a member's part is durable; raises as `find_units` does."""

    def write(self, saved: Saved) -> Any:
        """Write a member's part of a version.

        Returns:
            The draft.

        Raises:
            OSError: the part cannot be written.
        """

    def commit(self, draft: Any, generation: int) -> None:
        """Make a draft durable.

        Args:
            draft: its units are written.
            generation: the newest generation of members that the writer knows that it belongs to.

        Raises:
            LeftBehind: members of a newer generation persist to this store; the draft is removed.
            OSError: the draft may not be durable.
        """

    def discard(self, draft: Any) -> None:
        """Remove a draft that was not committed; raises as `prepare_for` does."""

    def rewind(self, version: int, generation: int) -> None:
        """Roll back newer versions than this one, saved by members of earlier generations; 0: by any member.

        Raises:
            LeftBehind: members of a newer generation persist to this store.
            OSError: some versions may remain.
        """

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Remove what no recovery needs, after a commit of a member; raises as `prepare_for` does."""

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Remove what dead or left behind processes, not among the members of a generation, left unfinished."""


def open_partial(where: Location, layout: str, job: str | None = None) -> PartialStore:
    """Return the units that are persisted at a location.

    Args:
        where: a folder, or a location below a URL.
        layout: `UnitCatalog.layout`, which separates the files of different models.
        job: the job that writes to it.
    """
    return PartialBucket(where, layout, job) if isinstance(where, ObjectPath) else PartialFolder(where, layout)
