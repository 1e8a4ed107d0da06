"""What a training loop does for the commit protocol of `src/protocol/`: a method for each of its commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

from evermoe.comm.vote import Ballot
from evermoe.snapshot.snapshot_schedule import SnapshotSchedule

Event = dict[str, Any]
"""What happened, as `src/protocol/event.rs` has it."""


class Driver(ABC):
    """What a training loop does when the protocol says so. Methods that return an event may raise `PeerLost`.

    The methods here are those of a job that has no replica nodes, moves no units and is ended by its script.
    """

    snapshot_schedule: SnapshotSchedule
    """Which version of the copies is whole with which vote."""

    def interrupt(self) -> None:
        """Ends what is under way in the group, which is about to be replaced."""

    def agreeing(self) -> None:
        """Is called before the Lighthouse is asked."""

    def connecting(self) -> None:
        """Is called before a new group is connected."""

    def waiting(self) -> None:
        """Is called while members are awaited. May raise `JobFinished`."""

    def weigh(self) -> Event:
        """Agrees with all members whether experts should move: `weighed`."""
        return {"event": "weighed", "should_move": False}

    def step(self, number: int) -> None:
        """Lets the training loop compute a step, which ends with `CommitProtocol.vote`."""

    def follow(self, number: int) -> Ballot:
        """Receives the others' step on a replica node, and returns this member's ballot."""
        raise RuntimeError("this job has no replica nodes")

    def tallied(self, step: int, sums: Ballot) -> None:
        """Is told the sums of the vote on a step before they count. May raise what ends the job."""

    @abstractmethod
    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Takes the step from one version to the next; it is decided and cannot fail."""

    def commit(self, step: int) -> None:
        """Reports a step that no failure covered by the preset can undo."""

    @abstractmethod
    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Brings this member to the version that all agree on: `restored`, `missing` or `unrecoverable`."""

    def count_losses(self, version: int) -> Event:
        """Counts what was lost and agrees on it: `counted`."""
        return {"event": "counted"}

    @abstractmethod
    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Plans who keeps copies of what, and makes those that are missing, perhaps beside the next step: `protected`.

        Args:
            version: of the state now.
            generation: of the members.
            waits: whether the copies must be whole before training goes on.
        """

    def resume(self, version: int) -> None:
        """Ends a recovery."""

    def pause(self) -> None:
        """Waits until holders of missing units may have come back."""

    @abstractmethod
    def units_lost(self) -> NoReturn:
        """Raises the error of a job whose units survive nowhere."""

    def settle(self) -> Event:
        """Waits for the copies of the last step on all members: `settled`."""
        return {"event": "settled", "is_whole": True}

    def farewell(self, version: int) -> Event:
        """Ends the job with all members: `parted`."""
        return {"event": "parted"}

    def close(self, standing: dict[str, Any] | None) -> None:
        """Is called when the job is over.

        Args:
            standing: what to tell spares that wait at the Lighthouse; None where none do.
        """
