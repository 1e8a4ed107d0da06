"""The part of a driver that a session and a pipeline's session share: reports of recoveries and of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import NoReturn

import torch

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.quarantine import Quarantine
from evermoe.comm.vote import Ballot
from evermoe.config.membership import Membership
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.errors import JobFinished, LostExperts
from evermoe.events import Commit, ConnectionLost, Verified
from evermoe.events.base_event import Listener
from evermoe.observe.recovery_log import log_recovery
from evermoe.process.memory_folder import BEGUN, FINISHED, is_marked, mark
from evermoe.process.warn import warn
from evermoe.recovery.recovery import Recovery
from evermoe.recovery.report import JobHistory
from evermoe.session import gradients
from evermoe.session.commands import Driver
from evermoe.session.lost_members import LostMembers
from evermoe.session.node_health import NodeHealth
from evermoe.session.same_run import Claimed, SameRun
from evermoe.session.step_results import StepResults
from evermoe.state.version import generation_of, step_of


class TrainingDriver(Driver):
    """Carry out the commands of the protocol that need nothing but the members.

    Args:
        membership: all members.
        joining: options of the membership.
        members: members that the job was to have.
        claims: places that other runs of the job may not use.
        device: device that computes this member's steps.
        emit: listener of the session.
    """

    window_planner: WindowPlanner
    """Plans when copies are sent."""

    def __init__(
        self,
        membership: MembershipManager,
        joining: Membership,
        members: int,
        claims: Sequence[Claimed],
        device: torch.device,
        emit: Listener,
    ) -> None:
        self._membership, self._emit, self._group = membership, emit, membership.trainer_group
        self.history = JobHistory(emit)
        self.lost = LostMembers(membership, joining.on_lost, members, emit)
        """Lost members, and the callers that ask for replacements."""
        self.health = NodeHealth(membership, joining.on_sick, device, emit)
        self.run = SameRun(membership, joining.hang_timeout, claims)
        self.results = StepResults()
        """Of the state's latest step."""
        self.taken = 0
        """Number of votes that this member has seen pass."""
        self.skipped = 0
        """Steps whose update was left out, as a loss or a gradient was not finite."""
        self.asks_to_stop = False
        """Whether this member's script asks all members to end the job."""
        self.obey_before_job: Callable[[], None] = lambda: None
        """Ends this process if a signal came while it waits for a part in the job. The handler's own exception may get
        lost: torchft decodes the members' data in Python, and drops an exception of it."""
        self._version = 0
        """Version of this member's state."""
        self._random = ExitStack()
        """Restores the random generators after the block of a step."""
        self._unrecoverable: LostExperts | None = None

    @property
    def _step(self) -> int:
        """Steps that the state has taken."""
        return step_of(self._version)

    @property
    def epoch(self) -> float:
        """Epochs consumed; NaN if unknown."""
        return math.nan

    # ---- membership

    def agreeing(self) -> None:
        """Begin the report of a recovery, which the answer may turn out to need.

        Raises:
            UnfitNode: this process has not joined yet, and its hardware is faulty.
        """
        self.health.begin()
        if self.history.clock.phase != "agree":  # otherwise it asks again in the same agreement
            is_member = self._membership.established
            self.begin_report(self._group.broken or ("new members" if is_member else "this process has started"))

    def begin_report(self, reason: str) -> None:
        """Begin the report of a recovery; emit `ConnectionLost` if the group is dropped."""
        self.history.begin_recovery(reason)
        if self._group.broken:
            self._emit(ConnectionLost(self._step, reason))
        self.history.clock.enter("agree")

    def waiting(self) -> None:
        """Stop a process that arrived after the end of its job, or that a signal ends."""
        self.obey_before_job()
        if is_marked(FINISHED):
            raise JobFinished(f"job {self._membership.identity.job} has committed all its steps")

    def connecting(self) -> None:
        """Time the connection."""
        self.history.clock.enter("rebuild")

    def end_recovery(self, version: int, members: int, *, is_arriving: bool) -> None:
        """Report a recovery, which is over.

        Args:
            version: from which all members resume.
            members: members that train.
            is_arriving: whether copies of the state are still in flight.
        """
        failure = self.lost.recovered()
        report = self.history.end_recovery(step_of(version), members, failure, is_arriving=is_arriving)
        if self.history.before is not None and self._group.rank == 0:
            log_recovery(report)

    def units_lost(self) -> NoReturn:
        """Raise the recovery's error."""
        assert self._unrecoverable is not None
        raise self._unrecoverable

    def share_quarantine(self) -> None:
        """Exchange why members leave, if some do; collective on all members.

        The others admit no newcomer on hardware that a member leaves as faulty.

        Raises:
            PeerLost: a member is lost.
        """
        if not self.lost.leaving:
            return
        at = self._membership
        mine = (
            asdict(Quarantine(at.id, at.node, at.messages.hardware, self.health.fault)) if self.health.fault else None
        )
        for said in gather_json(at.everyone, mine):
            if said is not None:
                at.messages.quarantines.add(Quarantine(**said))

    # ---- a step

    def step(self, number: int) -> None:
        """Let the script compute a step."""
        if not self.taken:
            mark(BEGUN)

    def end_step(self) -> None:
        """End the block of the step: restore the script's own random numbers."""
        self._random.close()

    def is_taken(self, sums: Ballot, voters: int) -> bool:
        """Record a vote. Return whether its step will be taken.

        Args:
            sums: of the vote.
            voters: members that must agree.

        Raises:
            ValueError: some members gave counts, and others did not.
        """
        self.lost.tallied(sums)
        if sums.votes < voters:
            return False
        gradients.refuse_mixed(sums)
        return True

    def note_commit(self, before: int, after: int, members: int) -> None:
        """Keep the report of a step until it is committed."""
        step, generation = step_of(before), generation_of(after)
        loss, grad_norm, samples, tokens = self.results
        self.history.note_step(Commit(step, loss, members, generation, grad_norm, samples, tokens, self.epoch))

    def commit(self, step: int) -> None:
        """Report a step that no failure covered by the preset can undo."""
        self.history.commit(step)

    def compare_copies(self, recovery: Recovery, what: str) -> list[str]:
        """Compare all units and copies by digest, and return the units that differ; collective.

        Args:
            recovery: of the state's version.
            what: name of what is compared, for a warning.
        """
        checked, differing = recovery.verify()
        if differing:
            warn(f"{what} differ at step {self._step}: {', '.join(differing[:8])}")
        self._emit(Verified(checked, len(differing), differing))
        return differing
