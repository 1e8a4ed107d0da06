"""Interface of the stores to which the preset `pec` saves units, some at a time: a folder or an object store.

A member saves its units of a version as a *part*: first a draft, then a durable part, which recoveries read. Members
write their parts independently, so a version may be durable at some members and not at others.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any, Protocol

from evermoe.checkpoint.folder import PartialFolder, PersistedUnit
from evermoe.checkpoint.object_store import Location, ObjectPath
from evermoe.checkpoint.partial_bucket import PartialBucket
from evermoe.checkpoint.saved import Saved


class PartialStore(Protocol):
    """Durable units of a job, one member's view of the store: see `PartialFolder` and `PartialBucket`.

    To save its part of a version a member calls `write`, which returns a draft, then `commit` or `discard`. Readers see
    committed parts only.
    """

    @property
    def where(self) -> Any:
        """Location of the units."""

    @property
    def first_seconds(self) -> float | None:
        """Seconds that a job waits at most until all units are durable for the first time; None: no limit."""

    def find_units(self, *, is_patient: bool = True) -> list[PersistedUnit]:
        """Return the durable units of all members, sorted by unit, each with its newest version first.

        Args:
            is_patient: whether to wait for a store that is temporarily unavailable.

        Raises:
            OSError: the store cannot be read.
        """

    def prepare_for(self, member: str) -> None:
        """Prepare the store for a member: remove drafts that an earlier process of this member left.

        Raises:
            OSError: the store cannot be read or written.
        """

    def newest(self, member: str) -> int | None:
        """Return the newest version with a durable part of this member, if any; raises as `find_units` does."""

    def write(self, saved: Saved) -> Any:
        """Write a member's part of a version.

        Returns:
            A draft, for `commit` or `discard`.

        Raises:
            OSError: the part cannot be written.
        """

    def commit(self, draft: Any, generation: int) -> None:
        """Make a draft durable and visible to readers.

        Args:
            draft: returned by `write`.
            generation: newest generation of the membership that includes the writer, as far as it knows.

        Raises:
            LeftBehind: members of a newer generation persist to this store; the draft is removed.
            OSError: the draft may not be durable.
        """

    def discard(self, draft: Any) -> None:
        """Remove a draft that was not committed; raises as `prepare_for` does."""

    def rewind(self, version: int, generation: int) -> None:
        """Remove versions newer than `version` that members of earlier generations saved.

        Args:
            version: the version from which the job resumes.
            generation: generation of the members that resume. 0: remove newer versions of all generations.

        Raises:
            LeftBehind: members of a newer generation persist to this store.
            OSError: some versions may remain.
        """

    def prune(self, member: str, may_lag: Container[str]) -> None:
        """Remove durable units that no recovery needs any more; called after each commit.

        Args:
            member: the member that has committed.
            may_lag: names of units that a recovery may take from older versions: experts.

        Raises:
            OSError: the store cannot be read or written.
        """

    def sweep(self, members: Collection[str], generation: int) -> None:
        """Remove drafts of processes that are not members of a generation: they have ended or were left behind."""


def open_partial(where: Location, layout: str, job: str | None = None) -> PartialStore:
    """Open the store at a location.

    Args:
        where: a folder, or a location below a URL.
        layout: `UnitCatalog.layout`, which separates the files of different models.
        job: name of the job that writes to it. Commits to a bucket that now belongs to another job fail.
    """
    return PartialBucket(where, layout, job) if isinstance(where, ObjectPath) else PartialFolder(where, layout)
