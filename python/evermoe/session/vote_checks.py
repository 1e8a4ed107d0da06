"""All that members check before they take a step: digests of what they share, and calls that others repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from evermoe.checkpoint.verification import Verification
from evermoe.comm.membership import MembershipManager
from evermoe.config.membership import OnCorruption
from evermoe.copies.replay.replicas import Replicas
from evermoe.errors import PeerLost
from evermoe.events.base_event import Listener
from evermoe.session import call_checks, copy_checks, digest_checks
from evermoe.session.call_checks import CallChecks
from evermoe.session.copy_checks import CopyChecks
from evermoe.session.digest_checks import DigestChecks
from evermoe.session.finding import Refusals
from evermoe.state.training_state import TrainingState


class VoteChecks:
    """Checks of a step before its update.

    Args:
        model: the script's.
        state: its units.
        membership: the members.
        replicas: that this member keeps for others.
        policy: reaction to a difference; `ignore`: nothing is checked.
        verification: finds out which checkpoints are verified.
        compares_gradients: whether members have equal gradients at the vote; code of the script may change them.
        emit: listener of the session.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainingState,
        membership: MembershipManager,
        replicas: Replicas,
        policy: OnCorruption,
        verification: Verification,
        *,
        compares_gradients: bool,
        emit: Listener,
    ) -> None:
        self._is_on = policy != "ignore"
        self._digests = DigestChecks(state, membership, compares_gradients=compares_gradients)
        self._calls = CallChecks(model, state, membership)
        self._copies = CopyChecks(state, membership, replicas)
        replicas.keeps_disputes = self._is_on
        self._refusals = Refusals(membership, policy, emit, verification.advice)
        self._verification = verification

    @property
    def numbers(self) -> list[float]:
        """Numbers that this member adds to the vote; as many on all members."""
        return [*self._calls.numbers, *self._copies.numbers, *self._digests.numbers]

    def plan(self) -> None:
        """Begin with the current members and placement of experts."""
        if self._is_on:
            self._calls.plan()
            self._digests.plan()
            self._verification.compare(is_comparing=self._digests.is_comparing)

    def recovered(self, trainers: Mapping[str, int]) -> None:
        """Record the units that a recovery has found equal, and the number of members that train each."""
        if self._digests.is_comparing and self._digests.are_all_in(trainers):
            self._verification.compared()

    def finished(self, differing: Sequence[str], step: int) -> None:
        """Record the units that differ among members in the comparison at the end of a job, after `step` steps."""
        if self._digests.is_comparing and not differing:
            self._verification.advance(step, step, is_last=True)

    def end(self) -> None:
        """Leave the script's modules as they were."""
        self._calls.end()

    def begin_step(self, step: int) -> None:
        """Record a call of the step, if another member is to repeat one."""
        self._calls.begin_step(step)

    def compute(self, step: int) -> None:
        """Compute this member's `numbers` for the vote on a step, whose reduced gradients it has.

        Raises:
            PeerLost: a member is lost.
        """
        self._calls.compute()
        self._digests.compute(step)

    def judge(self, step: int, sums: Sequence[float]) -> None:
        """Refuse a step in whose vote members differ, or replace a copy that does; collective if they do.

        Args:
            step: that all members have voted for.
            sums: of the members' `numbers`.

        Raises:
            PeerLost: some members differ: all recover, and repeat the step.
            CorruptState: this member must leave, or the job stops.
        """
        end = call_checks.NUMBERS + copy_checks.NUMBERS
        of_calls, of_copies, of_digests = sums[: call_checks.NUMBERS], sums[call_checks.NUMBERS : end], sums[end:]
        assert len(of_digests) == digest_checks.NUMBERS
        for finding in (self._digests.find(step, of_digests), self._calls.find(of_calls, of_digests[-1])):
            if finding is not None:
                try:
                    self._refusals.refuse(step, finding)
                finally:
                    self._calls.is_off |= self._refusals.doubts_calls
        if (finding := self._copies.find(of_copies)) is not None:
            self._verification.doubt(step)
            try:
                self._refusals.refuse(step, finding)
            except PeerLost:  # those that are named leave
                self._copies.end(finding.ranks)
                raise
            self._copies.end()
        self._verification.advance(self._digests.verified_through, step)
