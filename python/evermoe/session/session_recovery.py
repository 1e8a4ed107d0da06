"""Commands of the commit protocol in a session: membership and recoveries."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from evermoe.checkpoint.checkpointer import Checkpointer, find_location
from evermoe.comm.collectives import ExpertReducer
from evermoe.comm.membership import MembershipManager
from evermoe.copies.protection import Protection
from evermoe.errors import JobFinished, LostExperts, UnitsMissing
from evermoe.events import Commit, ConnectionLost, Copy, Joined, Listener, Recovered
from evermoe.observe.recovery_log import log_recovery
from evermoe.planning.placement import spread_over
from evermoe.process.memory_folder import FINISHED, is_marked
from evermoe.profile.memory import return_freed_memory, return_freed_memory_beside
from evermoe.recovery.early_survey import EarlySurvey
from evermoe.recovery.recovery import Recovery
from evermoe.recovery.report import PhaseClock, RecoveryReport
from evermoe.recovery.survey import Standing
from evermoe.recovery.target import ExpertTarget
from evermoe.session.commands import Driver, Event
from evermoe.session.evaluations import Evaluations
from evermoe.session.loop_restore import LoopRestore
from evermoe.session.lost_members import LostMembers
from evermoe.session.measures import StepMeasures
from evermoe.session.missing_units import MissingUnits
from evermoe.session.owners import DenseExchange
from evermoe.session.purposes import Meeting, waiting_ranks
from evermoe.session.same_run import MemoryClaim, SameRun
from evermoe.session.session_config import SessionConfig
from evermoe.session.standby import Standby
from evermoe.session.step_calls import StepCalls
from evermoe.session.substitute_weights import SubstituteWeights
from evermoe.session.training_inputs import TrainingInputs
from evermoe.state.placement import should_rebalance
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


class SessionContext(NamedTuple):
    """Components of a session."""

    script: TrainingInputs
    """Inputs of the script."""
    state: TrainingState
    """Its units."""
    membership: MembershipManager
    """Membership: asks the Lighthouse and connects the groups."""
    protection: Protection
    """Protection of the state."""
    config: SessionConfig
    emit: Listener
    """Called with the session's events."""


class RecoveryDriver(Driver):
    """Carries out the commands of the protocol that lead from one group to the next.

    See `evermoe.session.commands.Driver`.
    """

    def __init__(self, parts: SessionContext) -> None:
        self._script, self._state, self._membership, self._protection, self._config, self._emit = parts
        self._group = self._membership.trainer_group
        self.snapshot_schedule = self._protection.snapshots.snapshot_schedule
        self._trains = self._config.membership.trains
        self._loop = LoopRestore(
            self._script.loop,
            self._group,
            self._membership.identity.job,
            takes_own=self._config.checkpoints.resume_settings == "script",
        )
        self._calls = StepCalls(self._state.layers, self._group, self._membership.node)
        self.substitute = SubstituteWeights(self._script.model, self._settle_weights)
        self.evaluations = Evaluations(
            self._script.model,
            self._group,
            self._membership.node,
            Meeting(self._group, lambda: waiting_ranks(self._membership)),
            self.substitute,
        )
        self._checkpointer = Checkpointer(self._config.checkpoints, self._state, self._membership, self._emit)
        store = self._protection.store
        places = MemoryClaim(store.directory), self._checkpointer
        self._run = SameRun(self._membership, self._config.membership.hang_timeout, places)
        self._measures = StepMeasures(
            self._state, self._protection, self._checkpointer, self._emit, counts=self._trains
        )
        self._reducer = ExpertReducer([], [], 0)
        self._dense = DenseExchange(
            self._state, self._membership, overlaps_gather=self._config.shard_optimizer == "overlap"
        )
        if self._dense.late is not None:
            self._dense.late.attach(self._script.model)
        self._early = EarlySurvey(self._state, self._protection.replicas.catch_up)
        is_replayable = self._protection.replicas.is_replayable
        self._standby = Standby(self._membership, self._state, store, self._config, is_replayable, self._emit)
        self.reports: list[Recovered] = []
        self.loss = math.nan
        """Mean loss of the global batch of the state's latest step."""
        self.grad_norm = math.nan
        """Norm of that step's gradient, before anything has changed or clipped it."""
        self.asks_to_stop = False
        """Whether this member's script asks all members to end the job."""
        self.committed = -1
        """Steps that no failure which the preset covers can undo; -1 before the first recovery."""
        self._commit_events: dict[int, Commit] = {}
        """Report of each step, until it is committed."""
        joining = self._config.membership
        self.lost = LostMembers(self._membership, joining.on_lost, joining.members or 1, self._emit)
        """Lost members, and the callers that ask for replacements."""
        self._leaving = 0
        """Members that leave after the step."""
        self._role_switches = 0
        """Of these, members that come back in their other role."""
        self._report: RecoveryReport | None = None
        """The recovery that is under way, from the question to the Lighthouse on."""
        self._clock = PhaseClock({}, self._emit)
        self._step = 0
        self._before: int | None = None
        """Version before the recovery that is under way; None if that was of no running job."""
        self._was_established = False
        self._missing = MissingUnits(self._membership, joining)
        """The wait for units that are in no member's memory."""
        self._is_paused = False
        """Whether members agree again because of missing units."""
        self._unrecoverable: LostExperts | None = None

    def saved_generation(self) -> int:
        """Return the newest generation that wrote to the checkpoint folder; 0 if there is none."""
        return self._checkpointer.newest_generation()

    def leave(self) -> None:
        """Release the checkpoint folder, and leave gradients to the script."""
        self._standby.end()
        self._early.drop()
        self._dense.close()
        self._run.leave()
        self.lost.close()

    def await_weights(self) -> None:
        """Wait for weights that owners still send; where a member is lost, the group is dropped."""
        self._dense.await_weights()

    def _settle_weights(self) -> None:
        """Wait until no thread reads or writes the weights by the model."""
        self.await_weights()
        if self._protection.first.is_arriving:  # of the state as it is now, read in the background
            self._protection.snapshots.pacer.hurry()
            self._state.late.finish()
            self._protection.first.have_arrived()
        self._protection.before_update()
        self._checkpointer.before_update()

    @property
    def has_replica_nodes(self) -> bool:
        """Whether some members do not train."""
        return len(self._membership.nodes) > self._membership.num_trainers

    # ---- membership

    def agreeing(self) -> None:
        """Begin the report of a recovery, which the answer may turn out to need."""
        if self._clock.phase != "agree":  # otherwise it asks again in the same agreement
            is_member = self._membership.established
            self._begin_report(self._group.broken or ("new members" if is_member else "this process has started"))

    def _begin_report(self, reason: str) -> None:
        if self._missing.are_awaited and self._is_paused:  # the same loss, and the same recovery
            self._is_paused = False
            self._clock.enter("agree")
            return
        self._report = RecoveryReport(time.time(), reason=reason)
        self._clock = PhaseClock(self._report.seconds, self._emit)
        if self._group.broken:
            self._emit(ConnectionLost(self._step, reason))
            self._early.begin()
        self._clock.enter("agree")

    def waiting(self) -> None:
        """Stop a process that arrived after the end of its job; prepare a spare."""
        if is_marked(FINISHED):
            raise JobFinished(f"job {self._config.membership.job} has committed all its steps")
        self._standby.go_on()

    def interrupt(self) -> None:
        """End what is under way in the group."""
        self._dense.end()
        self._state.late.end()
        self._protection.settle()

    def connecting(self) -> None:
        """Time the connection, and survey this member's state meanwhile."""
        self._clock.enter("rebuild")
        self._standby.end()
        self._early.agreed(begins=self._trains)

    def weigh(self) -> Event:
        """Agree whether the load has shifted so far that experts should move."""
        nodes, spread = _places(self._membership, self._config.copies.replication)
        boosts = self._protection.ledger.boost_factors()
        mine = self._trains and should_rebalance(self._state, nodes, self._config.placement, boosts, spread)
        should_move = float(self._membership.everyone.all_reduce(torch.tensor([float(mine)]))) > 0
        if should_move:
            self._begin_report("the load has shifted")
        return {"event": "weighed", "should_move": should_move}

    # ---- a recovery

    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Survey the surviving state, and fetch what this member needs.

        Raises:
            UnequalForwards: members' scripts differ in what they do in a step, or between steps.
            FolderInUse: another run of the job uses its memory folder or checkpoint folder.
        """
        self._run.meet()
        self._calls.check(self._membership.everyone)
        self.evaluations.agree(self._membership.everyone, trains=self._trains)
        self._checkpointer.before_update()
        report = self._report_now()
        report.reason = self.lost.note(step_of(version), report.reason, self._leaving, self._role_switches)
        self._leaving = self._role_switches = 0
        self._before = version if established and self._trains else None
        self._was_established = established
        known = self._early.take()
        self._missing.look()
        recovery = self._recovery(version, established=established, saw_progress=saw_progress, known=known)
        self._forget_step()
        try:
            report.outcome = recovery.run(self._clock.enter)
        except UnitsMissing:
            self._missing.found()
            return {"event": "missing"}
        except LostExperts as lost:
            self._unrecoverable = self._missing.explained(lost)
            return {"event": "unrecoverable"}
        if self._trains:
            progress: dict[str, Any] = self._state.loop.load()
            self.loss, self.grad_norm = (progress.pop(name, math.nan) for name in ("loss", "grad_norm"))
            reached = report.outcome.version
            continues = self._before == reached
            self._loop.restore(progress, step_of(reached), is_new=not established, continues=continues)
            layers = list(self._state.layers.values())
            matrices, widths = [layer.matrix_RE for layer in layers], [layer.weights.shape[1] for layer in layers]
            self._reducer = ExpertReducer(matrices, widths, self._group.rank)
        return {"event": "restored", "version": report.outcome.version, "is_stale": bool(report.outcome.stale)}

    def _forget_step(self) -> None:
        """Free the memory of the interrupted step, which is taken by now or will be repeated.

        Votes were recalled before this. The freed memory, including logs of repeated steps, makes room for units that
        arrive.
        """
        if self._trains:
            self._script.zero_gradients()
        return_freed_memory_beside()

    def _report_now(self) -> RecoveryReport:
        if self._report is None:
            raise RuntimeError("a recovery begins with an agreement")
        return self._report

    def units_lost(self) -> NoReturn:
        """Raise the recovery's error."""
        assert self._unrecoverable is not None
        raise self._unrecoverable

    def pause(self) -> None:
        """Wait a little before members agree again: nothing else shows that a holder has come back."""
        self.waiting()
        self._is_paused = True
        self._missing.wait()

    def count_losses(self, version: int) -> Event:
        """Count the tokens that stale experts have lost."""
        found = self._report_now().outcome  # of the copies' version: the state may have got another one since
        found.lost_tokens = self._protection.count_losses(found.stale, found.version, self._before)
        found.plt = self._protection.ledger.plt
        found.mtl = found.plt * len(self._state.layers)  # the sum of what PLT averages (MoEtion, Eq. 6)
        return {"event": "counted"}

    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Send the owners' weights to all, plan who keeps copies of what, and make the missing copies.

        If nobody `waits`, they are made while the next step computes, and are complete at its vote.
        """
        self._step = step_of(version)
        return_freed_memory()  # received units have been adopted
        at, rank = self._membership, self._membership.everyone.rank
        self._emit(Joined(at.identity.job, at.id, at.nodes[rank], rank, at.role, generation, list(at.nodes)))
        if self._trains:
            self._dense.send_all()
        self._checkpointer.restart(generation)
        copies = self._report_now().outcome.copies
        self._protection.replan(generation, self._membership.id, copies, waits=waits)
        self._emit(Copy(self._step))
        is_whole = self._protection.protect_state(version)
        return {"event": "protected", "is_whole": is_whole}

    def resume(self, version: int) -> None:
        """End a recovery: report it, and finish an evaluation that a loss has interrupted."""
        report = self._report_now()
        self._missing.over()
        step = step_of(version)
        if self._protection.first.is_arriving:  # the next vote says that these steps are committed
            self._commit_events = {taken: event for taken, event in self._commit_events.items() if taken < step}
        else:
            self._commit_events.clear()
            self.committed = step
        self._clock.stop()
        report.step, report.members = step, self._membership.num_trainers
        if step and not self._was_established and self._group.rank == 0:
            logger.warning("job %s continues from step %d", self._membership.identity.job, step)
        report.steps_lost = max(0, report.outcome.reached - step)
        failure = self.lost.recovered()
        report.failure = "storage" if report.outcome.lost_units else failure
        self.reports.append(report.event())
        self._report = None
        self._emit(self.reports[-1])
        if self._was_established and self._group.rank == 0:
            log_recovery(self.reports[-1])
        self._measures.restart()
        if self._trains:
            self.evaluations.resume(self._membership.generation, step)

    def _recovery(
        self, version: int, *, established: bool, saw_progress: bool, known: Mapping[str, int] | None = None
    ) -> Recovery:
        membership = self._membership
        standing = Standing(
            version,
            established,
            saw_progress,
            patient=self._missing.is_patient,
            awaits_living=self._missing.live,
            boosts=self._protection.ledger.boost_factors(),
            lagging=self._protection.lagging,
            committed=max(0, self.committed),
        )
        nodes, spread = _places(self._membership, self._config.copies.replication)
        where = find_location(self._config.checkpoints)
        target = ExpertTarget(self._state, membership.everyone, nodes, self._config.placement, where, spread)
        return Recovery(self._state, self._protection.stored(), membership.everyone, target, standing, known or {})


def _places(at: MembershipManager, copies: int) -> tuple[list[str], list[str]]:
    """Return the node of each rank that trains, and the domains over which replicas are spread."""
    nodes, domains = at.nodes[: at.num_trainers], at.domains[: at.num_trainers]
    return nodes, spread_over(nodes, domains, copies)
