"""Commands of the commit protocol in a session: membership and recoveries."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evermoe.checkpoint.checkpointer import find_location
from evermoe.comm.membership import MembershipManager
from evermoe.copies.protection import Protection
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.errors import LostExperts, UnitsMissing
from evermoe.events import Copy, Joined
from evermoe.events.base_event import Listener
from evermoe.planning.placement import spread_over
from evermoe.profile.memory import return_freed_memory, return_freed_memory_beside
from evermoe.recovery.early_survey import EarlySurvey
from evermoe.recovery.recovery import Recovery
from evermoe.recovery.survey import Standing
from evermoe.recovery.target import ExpertTarget
from evermoe.session.buckets import Buckets
from evermoe.session.commands import Event
from evermoe.session.evaluations import Evaluations
from evermoe.session.islands import Place
from evermoe.session.loader_watch import LoaderWatch
from evermoe.session.loop_restore import LoopRestore
from evermoe.session.measures import StepMeasures
from evermoe.session.missing_units import MissingUnits
from evermoe.session.purposes import Meeting, waiting_ranks
from evermoe.session.same_run import MemoryClaim
from evermoe.session.saving import Saving
from evermoe.session.session_config import SessionConfig
from evermoe.session.standby import Standby
from evermoe.session.step_calls import StepCalls
from evermoe.session.step_results import StepResults
from evermoe.session.substitute_weights import SubstituteWeights
from evermoe.session.training_driver import TrainingDriver
from evermoe.session.training_inputs import TrainingInputs
from evermoe.session.vote_checks import VoteChecks
from evermoe.state.placement import rebalanced
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
    loader: LoaderWatch
    """Measures the waits for batches."""
    place: Place
    """Part of this process in the batch of its island."""


class RecoveryDriver(TrainingDriver):
    """Carries out the commands of the protocol that lead from one group to the next.

    See `evermoe.session.commands.Driver`.
    """

    def __init__(self, parts: SessionContext) -> None:
        self._script, self._state, membership, self._protection, self._config, emit, *_ = parts
        joining, store = self._config.membership, self._protection.store
        self.saving = Saving(self._config, self._state, membership, self._protection, emit)
        claims = MemoryClaim(store.directory), self.saving.checkpointer
        super().__init__(membership, joining, joining.members or 1, claims, membership.device, emit)
        where = find_location(self._config.checkpoints)
        self.health.watch_checkpoints(
            where if isinstance(where, Path) else None, sum(nbytes for _, nbytes in self._state.catalog.sizes())
        )
        self._loop = LoopRestore(
            self._script.loop,
            parts.loader.reading,
            self._group,
            self._membership.identity.job,
            takes_own=self._config.checkpoints.resume_settings == "script",
        )
        self._calls = StepCalls(self._state.layers, self._group, self._membership.node)
        self.evaluations = Evaluations(
            self._script.model,
            self._group,
            self._membership.node,
            Meeting(
                self._group,
                lambda: waiting_ranks(membership),
                membership.groups.start,
                is_counted=parts.place.is_counted,
            ),
            SubstituteWeights(self._script.model, self._settle_weights),
        )
        self._measures = StepMeasures(
            self._state,
            membership,
            self._protection,
            self.saving,
            self._emit,
            joining.on_slow,
            self._script.sampler,
            counts=self._trains,
        )
        overlaps, device = self._config.shard_optimizer == "overlap", membership.device
        self._checks = VoteChecks(
            self._script.model,
            self._state,
            self._membership,
            self._protection.replicas,
            self._config.membership.on_corruption,
            self.saving.checkpointer.verification,
            compares_gradients=self._config.on_gradients is None,
            emit=self._emit,
        )
        self._buckets = Buckets(self._script.model, self._state, membership, device, overlaps_gather=overlaps)
        self._early = EarlySurvey(self._state, self._protection.replicas.catch_up)
        replayable = self._protection.replicas.replayable
        self._standby = Standby(self._membership, self._state, store, self._config, replayable, self._emit)
        self._was_established = False
        self._missing = MissingUnits(self._membership, joining)
        """The wait for units that are in no member's memory."""

    def saved_generation(self) -> int:
        """Return the newest generation that wrote to the checkpoint folder; 0 if there is none."""
        return self.saving.checkpointer.newest_generation()

    def leave(self) -> None:
        """Release the checkpoint folder, and leave gradients to the script."""
        self.health.close()
        self._measures.slow_members.end()
        self._standby.end()
        self._early.drop()
        self._checks.end()
        if self._state.shards is not None:
            self._state.shards.end()
        self._buckets.close()
        self.saving.close()
        self.run.leave()
        self.lost.close()

    def await_weights(self) -> None:
        """Wait for weights that owners still send; where a member is lost, the group is dropped."""
        self._buckets.await_weights()

    def _settle_weights(self) -> None:
        """Wait until no thread reads or writes the weights by the model."""
        self.await_weights()
        if self._protection.first.is_arriving:  # of the state as it is now, read in the background
            self._protection.snapshots.pacer.hurry()
            self._state.late.finish()
            self._protection.first.have_arrived()
        self._protection.before_update()
        self.saving.before_update()

    @property
    def _trains(self) -> bool:
        """Whether this member trains; it is a replica node otherwise."""
        return self._config.membership.trains

    @property
    def window_planner(self) -> WindowPlanner:  # type: ignore[override]
        """Plans when copies are sent."""
        return self._protection.snapshots.window_planner

    @property
    def has_replica_nodes(self) -> bool:
        """Whether some members do not train."""
        return len(self._membership.nodes) > self._membership.num_trainers

    @property
    def must_leave(self) -> bool:
        """Whether this member is to leave, as it is slower than the others or its hardware is faulty."""
        is_first = self._membership.everyone.rank == 0
        has_turn = self._step % 2 == is_first  # else all whose hardware is faulty at once would leave in one step
        return self._measures.slow_members.must_leave or (has_turn and self.health.must_leave)

    def lag(self, step: int) -> int:
        """Return the steps by which complete snapshots lag behind at the vote that makes `step` the steps taken."""
        return self._protection.snapshots.snapshot_schedule.lag(step)

    def attached(self) -> list[float]:
        """Return what this member compares with others in the vote: digests, and the times of its own work."""
        return [*self._checks.numbers, *self._measures.numbers()]

    # ---- membership

    def begin_report(self, reason: str) -> None:
        """Begin the report of a recovery, and the survey of this member's state after a loss."""
        if self._missing.continues():
            self.history.clock.enter("agree")
            return
        super().begin_report(reason)
        if self._group.broken:
            self._early.begin()

    def waiting(self) -> None:
        """Stop a process that arrived after the end of its job; prepare a spare."""
        super().waiting()
        self._standby.go_on()

    def interrupt(self) -> None:
        """End what is under way in the group."""
        self._buckets.end()
        self._state.late.end()
        self._protection.settle()

    def connecting(self) -> None:
        """Time the connection, and survey this member's state meanwhile."""
        super().connecting()
        self._standby.end()
        self._early.agreed(begins=self._trains)

    def weigh(self) -> Event:
        """Agree whether the load has shifted so far that experts should move."""
        nodes, spread = _places(self._membership, self._config.copies.replication)
        boosts = self._protection.ledger.boost_factors()
        planned = rebalanced(self._state, nodes, self._config.placement, boosts, spread) if self._trains else None
        mine = torch.tensor([float(planned is not None)])
        should_move = float(self._membership.everyone.all_reduce(mine)) > 0
        if should_move:
            self.begin_report("the load has shifted")
        return {"event": "weighed", "should_move": should_move}

    # ---- a recovery

    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Survey the surviving state, and fetch what this member needs.

        Raises:
            UnequalForwards: members' scripts differ in what they do in a step, or between steps.
            FolderInUse: another run of the job uses its memory folder or checkpoint folder.
            ValueError: the job would begin at step 0, as none of its checkpoints is verified.
        """
        self.run.meet()
        self._calls.check(self._membership.everyone)
        gave_up = self._membership.failure_detector.activity.gave_up
        self.evaluations.agree(self._membership.everyone, trains=self._trains, gave_up=gave_up)
        self.saving.before_update()
        history = self.history
        history.reason = self.lost.note(step_of(version), history.reason)
        history.before = version if established and self._trains else None
        self._was_established = established
        known = self._early.take()
        self._missing.look()
        recovery = self._recovery(version, established=established, saw_progress=saw_progress, known=known)
        self._forget_step()
        self.saving.checkpointer.verification.begin_recovery()
        try:
            history.outcome = recovery.run(history.clock.enter)
        except UnitsMissing:
            self._missing.found()
            return {"event": "missing"}
        except LostExperts as lost:
            self._unrecoverable = self._missing.explained(lost)
            return {"event": "unrecoverable"}
        self._checks.recovered(history.outcome.equal_units)
        if not established and not step_of(history.outcome.version):
            self.saving.checkpointer.check_beginning()
        if self._trains:
            progress: dict[str, Any] = self._state.loop.load()
            self.results = StepResults.taken_from(progress)
            reached = history.outcome.version
            continues = history.before == reached
            self._loop.restore(progress, step_of(reached), is_new=not established, continues=continues)
            self._buckets.plan()
        return {"event": "restored", "version": history.outcome.version, "is_stale": bool(history.outcome.stale)}

    def _forget_step(self) -> None:
        """Free the memory of the interrupted step, which is taken by now or will be repeated.

        Votes were recalled before this. The freed memory, including logs of repeated steps, makes room for units that
        arrive.
        """
        if self._trains:
            self._script.zero_gradients(self._state)
        return_freed_memory_beside()

    def pause(self) -> None:
        """Wait a little before members agree again: nothing else shows that a holder has come back."""
        self.waiting()
        self._missing.wait()

    def count_losses(self, version: int) -> Event:
        """Count the tokens that stale experts have lost."""
        found = self.history.outcome  # of the copies' version: the state may have got another one since
        found.lost_tokens = self._protection.count_losses(found.stale, found.version, self.history.before)
        found.plt = self._protection.ledger.plt
        found.mtl = found.plt * len(self._state.layers)  # the sum of what PLT averages (MoEtion, Eq. 6)
        return {"event": "counted"}

    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Send the owners' weights to all, plan who keeps copies of what, and make the missing copies.

        If nobody `waits`, they are made while the next step computes, and are complete at its vote.
        """
        self._version = version
        return_freed_memory()  # received units have been adopted
        at, rank = self._membership, self._membership.everyone.rank
        self._emit(Joined(at.identity.job, at.id, at.nodes[rank], rank, at.role, generation, list(at.nodes)))
        if self._trains:
            self._buckets.send_all()
        self.saving.restart(version, generation)
        copies = self.history.outcome.copies
        self._protection.replan(generation, self._membership.id, copies, waits=waits)
        self._emit(Copy(self._step))
        is_whole = self._protection.protect_state(version)
        self.saving.save_first(version)
        return {"event": "protected", "is_whole": is_whole}

    def resume(self, version: int) -> None:
        """End a recovery: report it, and finish an evaluation that a loss has interrupted."""
        self._missing.over()
        step = step_of(version)
        if step and not self._was_established and self._group.rank == 0:
            logger.warning("job %s continues from step %d", self._membership.identity.job, step)
        is_arriving = self._protection.first.is_arriving
        self.end_recovery(version, self._membership.num_trainers, is_arriving=is_arriving)
        self._measures.restart()
        self._checks.plan()
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
            lagging=self._protection.options.lagging,
            committed=max(0, self.history.committed),
        )
        nodes, spread = _places(self._membership, self._config.copies.replication)
        where = find_location(self._config.checkpoints)
        target = ExpertTarget(
            self._state,
            membership.everyone,
            nodes,
            self._config.placement,
            where,
            spread,
            only_verified=self._config.checkpoints.resume_from == "verified",
        )
        return Recovery(self._state, self._protection.stored(), membership.everyone, target, standing, known or {})


def _places(at: MembershipManager, copies: int) -> tuple[list[str], list[str]]:
    """Return the node of each rank that trains, and the domains over which replicas are spread."""
    nodes, domains = at.nodes[: at.num_trainers], at.domains[: at.num_trainers]
    return nodes, spread_over(nodes, domains, copies)
