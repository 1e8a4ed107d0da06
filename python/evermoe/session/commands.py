"""Commands of the commit protocol of `src/protocol/`: a method of the training loop for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from evermoe.comm.vote import Ballot

Event = dict[str, Any]
"""The fields of an event, as in `src/protocol/event.rs`."""
Command = dict[str, Any]
"""The fields of a command, as in `src/protocol/event.rs`."""


class Driver(ABC):
    """Carries out the protocol's commands for a training loop. Methods that return an event may raise `PeerLost`.

    The defaults here are for a job without replica nodes that moves no units and ends with its script.
    """

    def interrupt(self) -> None:
        """End what is under way in the group, which is about to be replaced."""

    def agreeing(self) -> None:
        """Prepare to ask the Lighthouse."""

    def connecting(self) -> None:
        """Prepare to connect a new group."""

    def waiting(self) -> None:
        """Called repeatedly while members are awaited. May raise `JobFinished`."""

    def weigh(self) -> Event:
        """Agree with all members whether experts should move: `weighed`."""
        return {"event": "weighed", "should_move": False}

    def step(self, number: int) -> None:
        """Let the training loop compute a step, which ends with `CommitProtocol.vote`."""

    def follow(self, number: int) -> Ballot:
        """Receive the others' step on a replica node, and return this member's ballot."""
        raise RuntimeError("this job has no replica nodes")

    @abstractmethod
    def lag(self, step: int) -> int:
        """Return the steps by which complete copies lag behind at the vote that makes `step` the steps taken."""

    def attached(self) -> list[float]:
        """Return numbers that the vote sums together with the ballots; as many on all members."""
        return []

    def tallied(self, step: int, sums: Ballot, attached: Sequence[float]) -> None:
        """Called with the tally before the step is applied. Raise to refuse the step or to end the job.

        Args:
            step: that members have voted on.
            sums: of the ballots.
            attached: the sums of the members' `attached` numbers.
        """

    @abstractmethod
    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Take the step from one version to the next; the vote has decided it, and it cannot fail."""

    def commit(self, step: int) -> None:
        """Report a step that no failure covered by the preset can undo."""

    @abstractmethod
    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Bring this member to the version that all agree on: `restored`, `missing` or `unrecoverable`."""

    def count_losses(self, version: int) -> Event:
        """Count what was lost and agree on it: `counted`."""
        return {"event": "counted"}

    @abstractmethod
    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Plan who keeps copies of what, and make the missing ones, perhaps during the next step: `protected`.

        Args:
            version: of the state now.
            generation: of the members.
            waits: whether the copies must be complete before training continues.
        """

    def resume(self, version: int) -> None:
        """End a recovery."""

    def pause(self) -> None:
        """Wait until holders of missing units may have come back."""

    @abstractmethod
    def units_lost(self) -> NoReturn:
        """Raise the error of a job whose units survive nowhere."""

    def settle(self) -> Event:
        """Wait for the copies of the last step on all members: `settled`."""
        return {"event": "settled", "is_whole": True}

    def farewell(self, version: int) -> Event:
        """End the job with all members: `parted`."""
        return {"event": "parted"}

    def close(self, standing: dict[str, Any] | None) -> None:
        """Called when the job is over.

        Args:
            standing: message for spares that wait at the Lighthouse; None without any.
        """
