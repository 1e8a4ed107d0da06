"""What a pipeline's session does when the commit protocol says so: updates, copies in the bubbles, recoveries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NoReturn

import torch
from torch import Tensor, nn

from evermoe.comm.courier import Courier
from evermoe.comm.group import Group
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.comm.vote import Ballot
from evermoe.errors import LostExperts, PeerLost, UnsupportedState
from evermoe.events import Listener
from evermoe.recovery.recovery import Recovery
from evermoe.recovery.report import Outcome
from evermoe.recovery.survey import SNAPSHOT, Standing
from evermoe.snapshot.rank_plan import COPIES
from evermoe.snapshot.snapshot_schedule import SnapshotSchedule
from evermoe.snapshot.store import SnapshotStore
from evermoe.state.version import step_of
from evermoe.train import gradients
from evermoe.train.bubbles import Bubbles
from evermoe.train.chosen_experts import ChosenExperts
from evermoe.train.commands import Driver, Event
from evermoe.train.connections import TorchConnections
from evermoe.train.kept_loop import KeptLoop
from evermoe.train.localised import LocalisedRecovery
from evermoe.train.loss_scale import LossScale
from evermoe.train.lost_members import LostMembers
from evermoe.train.pipeline_config import PipelineConfig
from evermoe.train.pipeline_step import PipelineStep, refuse_unequal_runs
from evermoe.train.same_run import MemoryClaim, SameRun
from evermoe.train.slice_choice import SliceChoice
from evermoe.train.sparse_windows import SparseWindows
from evermoe.train.stage_copies import StageCopies
from evermoe.train.stage_replay import StageReplay
from evermoe.train.stage_target import StageTarget
from evermoe.train.stage_windows import StageWindowPlanner
from evermoe.train.stages import StageRank, StageState


class PipelineDriver(Driver):
    """Carries out the commands of the protocol for one rank. See `train.commands.Driver` for each.

    Args:
        options: of the pipeline.
        optimizer: of the stage.
        state: the stage's units.
        loop: the training loop's own state, one of them.
        loss_scale: of the job.
        store: this node's arenas.
        membership: all ranks.
        emit: of the session.
    """

    def __init__(
        self,
        options: PipelineConfig,
        optimizer: torch.optim.Optimizer,
        state: StageState,
        loop: KeptLoop,
        loss_scale: LossScale,
        store: SnapshotStore,
        membership: MembershipManager,
        emit: Listener,
    ) -> None:
        self._options, self._optimizer, self._state = options, optimizer, state
        self._loop, self._loss_scale, self._store, self._membership = loop, loss_scale, store, membership
        self._group = membership.trainer_group
        self.pacer, self.snapshot_schedule = Pacer(), SnapshotSchedule()
        self.courier = Courier(membership.transport, self.pacer, "evermoe-snapshots", device=state.device)
        windows, copies = options.window_options(), options.copy_options()
        schedule = copies.choices.schedule if copies.copies else None
        self.window_planner = StageWindowPlanner(
            self.pacer, self.courier, store, membership, windows, schedule, options.version_steps, options.stages
        )
        self.bubbles = Bubbles(self.window_planner, self.pacer, options.rank, options.profile_steps, state.device)
        every = [each for some in state.parameters() for each in some]
        self.localised = LocalisedRecovery(
            state, every, options.stage, is_on=options.localised, is_spread=options.expert_parallel
        )
        self.windows = SparseWindows(state, store, self.localised, SliceChoice(options.slices, store))
        self.experts = ChosenExperts(options, state, membership, self.window_planner)
        self.replay = StageReplay(options, state, self.localised, self.window_planner)
        chosen = self.windows, self.experts, self.replay
        self.copies = StageCopies(options, store, membership, *chosen, self.courier, emit)
        self.lost = LostMembers(membership, options.on_lost, options.size, emit)
        self.run = SameRun(membership, options.hang_timeout, [MemoryClaim(store.directory)])
        self._step, self._reason = 0, ""
        """Steps taken, and why the group was given up last."""
        self._before: int | None = None
        """Version before the recovery that is under way; None if that was of no running job."""
        self.outcome = Outcome()
        self.seats: list[StageRank] = []
        """By rank, what each has told about itself; empty before the first recovery."""
        self.connections = TorchConnections(membership, options.rank, options.size, options.hang_timeout, state.device)
        self.taken = 0
        """Votes that have passed here."""
        self.loss = math.nan
        """Mean loss of the latest step."""
        self.attempt: PipelineStep | None = None
        """What the script computes, or has computed last."""
        self._vote_span = ExitStack()
        self._waits = True
        """Whether the vote waits for copies."""
        self._lost: LostExperts | None = None

    # ---- a step

    def begin_vote(self, step: int) -> bool:
        """The gradients are there of the step that makes `step` the steps taken: waits for copies that are due.

        Profiles see that as a collective.

        Returns:
            Whether these copies are whole.
        """
        self._waits = self.windows.are_used or self.snapshot_schedule.is_due(step)
        if self._waits:
            self.pacer.hurry()
        self._vote_span.enter_context(self.bubbles.profiler.span(COPIES, "collective", "network"))
        return not self._waits or self.copies.wait()

    def end_vote(self) -> None:
        """The result of the vote is known, or a rank is lost."""
        self._vote_span.close()

    def ballot(self, is_whole: bool) -> Ballot:
        """What this rank says about the step whose gradients are complete.

        Args:
            is_whole: whether the copies of the version before are.
        """
        past = None if self.attempt is None else self.attempt.past
        if past is not None and past.is_taken and past.ballot is not None:
            return past.ballot._replace(votes=float(is_whole), reported=self.lost.reported)
        found = self._ballot(is_whole)
        if past is not None:
            past.ballot = found
        return found

    def _ballot(self, is_whole: bool) -> Ballot:
        step, (on_all, alone) = self.attempt, map(_gradients, self._state.parameters())
        found = [*on_all, *alone]
        is_clipped = self._options.max_grad_norm is not None and bool(found)
        norms_there = gradients.norms(found if is_clipped else [])
        loss_there, counted_there, has_loss, is_counted = torch.zeros(1), torch.zeros(1), False, False
        if step is not None and step.loss is not None:
            loss_there, has_loss, is_counted = step.loss, True, step.count is not None
            counted_there = torch.as_tensor(step.losses if step.count is None else step.count, dtype=torch.float64)
        (loss,), (are_finite,), norms, (counted,) = gradients.read(
            loss_there, gradients.are_finite(found), norms_there, counted_there
        )
        self.connections.check()
        return Ballot(
            votes=float(is_whole),
            loss=loss,
            squares=_squares(norms[: len(on_all)]) / self._options.data_parallel_size + _squares(norms[len(on_all) :]),
            **gradients.faults(loss, bool(are_finite), self._group.rank),
            trainers=float(has_loss),
            scale=self._loss_scale.value if has_loss else 0.0,
            counting=float(is_counted),
            counted=counted,
            reported=self.lost.reported,
        )

    def tallied(self, step: int, sums: Ballot) -> None:
        """Ends the job on all ranks if the step's losses do not fit together, or a gradient is not finite.

        A smaller loss scale may help where it is above 1: then the update is left out.

        Raises:
            NonFiniteLoss: names the step and the rank.
            ValueError: some ranks gave counts, and others did not.
            UnsupportedState: the losses of some ranks are not known here.
        """
        self.lost.tallied(sums.reported)
        if sums.votes != self._options.size:
            return
        gradients.refuse_mixed(sums)
        has_run = self.attempt is not None and self.attempt.runs > 0
        is_needed = has_run or sums.trainers > 0 or self._loss_scale.is_used
        if is_needed and sums.trainers != self._options.data_parallel_size:
            raise UnsupportedState(
                f"step {step}: {sums.trainers:.0f} ranks have computed a loss that the session knows, expected "
                f"{self._options.data_parallel_size}, the ranks of the last stage: build their schedules with "
                "loss_fn=session.loss_function(...), and run them by step.run(schedule, ...) on all ranks"
            )
        if self._options.on_nonfinite == "error" and sums.loss_scale <= 1:
            gradients.refuse_nonfinite(_of_mean(sums), step, self._membership.nodes)

    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Takes the step that all have voted for, and begins to copy the new version."""
        self.end_vote()
        is_due = self.snapshot_schedule.is_due(step_of(after))
        self.copies.wait_captured()
        if is_due:  # all have voted: its copies are complete
            self.copies.arrived()
            if self.copies.version is not None:
                self.localised.log.release(self.copies.version)
        sums, self._step = _of_mean(sums), step_of(after)
        self.loss = sums.mean_loss if sums.trainers else math.nan
        is_repeated = self.localised.retake(after)
        if is_repeated:
            self._loop.restore()
        else:
            self._update(sums)
        self.experts.taken(self._step, is_repeated=is_repeated)
        self.windows.advance(self._step)
        self.localised.log.taken(after)
        if is_recalled:
            return
        self.taken += 1
        self.bubbles.begin_step()
        if is_due and self._group.broken is None:
            self.copies.forget()
            if self.localised.needs_copies(after):
                self._begin_version(after)
        elif self.windows.are_used and self._group.broken is None:
            self.copies.proceed(after)

    def _begin_version(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`; where a rank is gone, the next vote finds it."""
        try:
            self.copies.begin(version)
        except PeerLost as lost:
            self._group.drop(str(lost))
            return
        self.snapshot_schedule.begin(step_of(version), self.window_planner.version_steps)

    def _update(self, sums: Ballot) -> None:
        if sums.is_finite:
            factor = gradients.factor_of(sums, self._options.max_grad_norm)
            if factor != 1:
                gradients.scale([each for some in self._state.parameters() for each in _gradients(some)], factor)
            self._optimizer.step()
        else:
            self._state.expert_load.forget_step()
        self._loop.advance(self.loss, has_overflowed=not sums.is_finite)

    def pace(self, step: int) -> None:
        """After the vote on a step: plans the next windows."""
        self.window_planner.host_speed = self.copies.host_speed or self.window_planner.host_speed
        try:
            self.window_planner.after(step)
            self.windows.choice.consider(self.window_planner, self._group, self.seats)
        except PeerLost as lost:  # the step itself is taken; the next vote finds the group broken
            self._group.drop(str(lost))

    # ---- failures

    def agreeing(self) -> None:
        """Notes why the group was given up."""
        self._reason = self._group.broken or self._reason

    def waiting(self) -> None:
        """Has `on_lost` called for ranks that are lost: this one waits for those in their places."""
        self.lost.look(self._step, self._reason)

    def interrupt(self, version: int | None = None) -> None:
        """Waits until nothing is under way, which is at once in a dropped group.

        `version`: of the state, if it is to be copied first where what is under way is older: collective then. Sparse
        versions are not, as no step has room for all of one.
        """
        self.pacer.hurry("recovery")
        self.copies.wait_captured()
        self.copies.wait()
        self.copies.forget()
        self.connections.interrupt()
        is_older = version is not None and self.snapshot_schedule.begun < step_of(version)
        if version is not None and is_older and self._group.broken is None and not self.windows.are_used:
            self._begin_version(version)
            self.interrupt()

    def _meet(self) -> None:
        """Who sits where."""
        own, options = self._state.own, self._options
        node, told = self._membership.node, (self._state.alone(), self.windows.weights(), self.windows.choice.told())
        mine = StageRank(options.stage, options.data_parallel, node, own.layout, own.sizes(), *told, self.replay.told())
        self.seats = _seats(self._group, mine, options.data_parallel_size, options.size)
        self.windows.learn(self.seats)
        self._store.check()
        if options.expert_parallel:
            self.connections.connect_peers(self._state.layers.values(), options.stage, options.data_parallel_size)

    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Brings this rank to the newest version of which every unit of every stage is left; raises `FolderInUse`."""
        self.run.meet()
        self._meet()
        self._before = version if established else None
        self.lost.note(step_of(version), self._reason, 0, 0)
        refuse_unequal_runs(self.attempt, self._group)
        self.localised.tell(self._group, version)
        self.windows.look(self._group, version)
        while True:
            try:
                self.outcome = self.recovery(version, established=established).run()
                break
            except LostExperts as lost:
                if not self.windows.turn():
                    self._lost = lost
                    return {"event": "unrecoverable"}
        is_stale = bool(self.outcome.stale)
        if is_stale:
            self.localised.begin_anew()
        self._loop.restore()
        self._step, self._reason = step_of(self.outcome.version), ""
        return {"event": "restored", "version": self.outcome.version, "is_stale": is_stale}

    def count_losses(self, version: int) -> Event:
        """Counts the tokens that stale experts have lost."""
        self.experts.count_losses(self.seats, self.outcome, self._before)
        return {"event": "counted"}

    def units_lost(self) -> NoReturn:
        """Raises what the recovery found."""
        assert self._lost is not None
        raise self._lost

    def recovery(self, version: int, *, established: bool) -> Recovery:
        """One attempt to bring all ranks to one version."""
        stored = ((found, SNAPSHOT) for found in self.windows.stored())
        standing = Standing(version, established, lagging=self.experts.lagging)
        return Recovery(self._state, stored, self._group, StageTarget(self.seats, self.windows), standing)

    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Begins to make the copies that are missing; they are whole on return, or by the next vote."""
        is_whole = self.copies.protect(self.seats, version, generation, self.outcome.copies, waits=waits)
        self.window_planner.cut(self.windows.numbers, self.windows.steps)
        self.snapshot_schedule.restart(step_of(version))
        self.bubbles.restart(step_of(version))
        return {"event": "protected", "is_whole": is_whole}

    def end(self) -> None:
        """Ends the profile and all threads; lets calls of `on_lost` end."""
        self.bubbles.end()
        self.lost.close()
        self.courier.close()


def _seats(group: Group, mine: StageRank, peers: int, size: int) -> list[StageRank]:
    """By rank, what each tells about itself; collective."""
    seats = [StageRank.from_bytes(each) for each in group.all_gather_bytes(mine.to_bytes())]
    taken = [seat.stage * peers + seat.data_parallel for seat in seats]
    if taken != list(range(size)):
        raise PeerLost(
            f"the ranks are {taken}, not 0 to {size - 1}: some are missing or twice. Tensor-parallel ranks, which "
            "would share a place in the pipeline, are not supported"
        )
    return seats


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _squares(norms: Iterable[float]) -> float:
    return sum(norm * norm for norm in norms)


def _of_mean(sums: Ballot) -> Ballot:
    """The sums of a step whose losses are divided by what was counted: tokens, or microbatches of mean losses."""
    return sums._replace(counting=sums.trainers)
