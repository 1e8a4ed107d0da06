"""The run that a member belongs to. Members agree on it before they write or remove anything.

Each proposes a run. A member proposes its own run first; then the run whose living members hold its folders, if these
use the same Lighthouse and so belong to this group; else a new one. All adopt the best proposal, and take their folders
for it. A folder that living processes of another run hold is refused, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.errors import FolderInUse
from evermoe.process.memory_folder import make_private
from evermoe.process.run_claim import Run, RunClaim, meeting_point

CLAIM_SECONDS = 10.0
"""Time to wait for processes of another run to end after a kill; at most half of `hang_timeout`."""
MEMBER, FOUND, NEW = range(3)
"""Kinds of proposals, the best first."""


class Claimed(Protocol):
    """A folder or location that one run at a time may use."""

    def found(self) -> Run | None:
        """Return the run that the place names."""

    def claim_for(self, run: Run, patience: float) -> None:
        """Take the place for a run; raises `FolderInUse`."""

    def release(self) -> None:
        """Release the location for other runs."""


class MemoryClaim(RunClaim):
    """The claim on a node's folder of shared memory, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "the job's memory folder")
        self._folder = folder

    def claim_for(self, run: Run, patience: float) -> None:
        """Take the folder, as `RunClaim.claim_for`. One that cannot be made needs no claim: nobody can write to it."""
        with suppress(OSError):
            make_private(self._folder.parent)
            make_private(self._folder)
            super().claim_for(run, patience)


class SameRun:
    """The run of a member, and its claims.

    Args:
        membership: connects the members.
        hang_timeout: seconds that members wait for each other.
        places: that the member uses for its job.
    """

    def __init__(self, membership: MembershipManager, hang_timeout: float, places: Sequence[Claimed]) -> None:
        self._membership, self._places = membership, places
        self._point = meeting_point(membership.requests.lighthouses.addresses)
        self._patience = min(CLAIM_SECONDS, hang_timeout / 2)
        self._run: Run | None = None

    def meet(self) -> None:
        """Agree on the run with the members of a new group, and take this member's places for it; collective.

        Raises:
            FolderInUse: living processes of another run hold a place of this member; in a group without state also that
                of another member.
            PeerLost: a member is gone.
        """
        everyone = self._membership.everyone
        kind, mine = self._proposal()
        said = [(kind, Run(**fields)) for kind, fields in gather_json(everyone, (kind, asdict(mine)))]
        _, run = min(said, key=lambda each: (each[0], -each[1].since, each[1].nonce))
        if all(each == (MEMBER, run) for each in said):
            return
        problem = ""
        try:
            for place in self._places:
                place.claim_for(run, self._patience)
        except FolderInUse as error:
            problem = str(error)
        problems = gather_json(everyone, problem)
        if not problem and not any(kind == MEMBER for kind, _ in said):  # the job cannot begin without the other
            problem = next(filter(None, problems), "")
        if problem:
            raise FolderInUse(problem)
        self._run = run

    def _proposal(self) -> tuple[int, Run]:
        if self._run is not None:
            return MEMBER, self._run
        job = self._membership.identity.job
        found = [run for run in (place.found() for place in self._places) if run is not None]
        same = [run for run in found if (run.job, run.lighthouse) == (job, self._point)]
        if same:
            return FOUND, max(same, key=lambda run: run.since)
        return NEW, Run.begin(job, self._point)

    def leave(self) -> None:
        """Release the locations for other runs."""
        for place in self._places:
            place.release()
