"""The part of a pipeline's driver that carries out recoveries: the members that take part, and the target version."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from torch import nn

from evermoe._native import VersionSchedule
from evermoe.comm.courier import Courier
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.copies.snapshot.rounds import Rounds
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.errors import LostExperts, PeerLost
from evermoe.events import Copy, Joined
from evermoe.events.base_event import Listener
from evermoe.pipeline.bubbles import Bubbles
from evermoe.pipeline.chosen_experts import ChosenExperts
from evermoe.pipeline.connections import TorchConnections
from evermoe.pipeline.localised import LocalisedRecovery
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.pipeline_step import PipelineStep, refuse_unequal_runs
from evermoe.pipeline.slice_choice import SliceChoice
from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stage_copies import StageCopies
from evermoe.pipeline.stage_placement import StagePlacement
from evermoe.pipeline.stage_replay import StageReplay
from evermoe.pipeline.stage_target import StageTarget
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.recovery.recovery import Recovery
from evermoe.recovery.survey import Standing
from evermoe.session.commands import Event
from evermoe.session.loss_scale import LossScale
from evermoe.session.same_run import MemoryClaim
from evermoe.session.training_driver import TrainingDriver
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts
from evermoe.state.version import step_of


class PipelineContext(NamedTuple):
    """Components of a pipeline's session."""

    config: PipelineConfig
    module: nn.Module
    """The stage."""
    loop: LoopParts
    """The parts of the training loop that have state."""
    loss_scale: LossScale
    """One of them."""
    state: StageState
    """The stage's units."""
    store: SnapshotStore
    """This node's arenas."""
    membership: MembershipManager
    """All ranks."""
    emit: Listener
    """Called with the session's events."""


class PipelineRecovery(TrainingDriver):
    """Carry out the commands of the protocol that lead from one group to the next.

    See `evermoe.session.commands.Driver`.
    """

    def __init__(self, parts: PipelineContext) -> None:
        options, _, loop, _, state, store, membership, emit = parts
        super().__init__(
            membership, options.membership, options.size, [MemoryClaim(store.directory)], state.device, emit
        )
        self._options, self._state, self._loop = options, state, loop
        state.loop.store(loop_state.collect(loop))
        pacer, self.snapshot_schedule = Pacer(), VersionSchedule()
        if state.device.type == "cuda":  # captures take the same bubbles as messages
            pacer.on_idle = store.pace
        self.courier = Courier(membership.transport, pacer, "evermoe-snapshots", device=state.device)
        windows, copies = options.versions, options.copies
        schedule = copies.choices.schedule if copies.replication else None
        self.bubbles = Bubbles(pacer, options.rank, options.stages, windows.profile_steps, state.device)
        self.window_planner = WindowPlanner(
            self.bubbles, self.courier, store, membership, windows, schedule, windows.steps_per_version
        )
        self.localised = LocalisedRecovery(
            state, options.stage, is_on=options.localised, is_spread=bool(options.expert_parallel)
        )
        self.windows = SparseWindows(state, store, self.localised, SliceChoice(windows.slices, store))
        self.experts = ChosenExperts(options, state, membership, self.window_planner)
        chosen = self.windows, self.experts, StageReplay(options, state, self.localised)
        rounds = Rounds(store, membership, self.courier, self.window_planner.speeds, windows.snapshot_memory, emit)
        self.copies = StageCopies(options, store, membership, *chosen, self.window_planner, rounds, emit)
        self.connections = TorchConnections(options, membership, state.device)
        self.placement = StagePlacement(options, state, membership)
        self.attempt: PipelineStep | None = None
        """The latest attempt at a step."""
        self.stopped: int | None = None
        """Steps after which the job ends because a rank has requested it; None without a request."""

    # ---- membership

    def waiting(self) -> None:
        """Call `on_lost` for lost ranks, since this rank waits for their replacements.

        Raises:
            JobFinished: the job is over.
        """
        super().waiting()
        self.lost.look(self._step, self.history.reason)

    def interrupt(self) -> None:
        """Wait for transfers in progress; in a dropped group they end at once."""
        self.end_copies()

    def end_copies(self) -> bool:
        """Wait for transfers in progress. Return whether the copies are complete on this rank."""
        self.bubbles.pacer.hurry("recovery")
        is_complete = self.copies.settle()
        self.connections.interrupt()
        return is_complete

    def finish_copies(self, version: int) -> bool:
        """Wait for copies of this version of the state, and make them first if they are older. Collective.

        Sparse versions are not made, since no step has room for a complete one.

        Returns:
            Whether the copies are complete on this rank.
        """
        is_complete = self.end_copies()
        is_older = self.snapshot_schedule.begun < step_of(version)
        if not is_older or self._group.broken is not None or self.windows.are_used:
            return is_complete
        self._begin_version(version)
        return self.end_copies()

    def lag(self, step: int) -> int:
        """Return the steps by which complete copies lag behind at the vote that makes `step` the steps taken."""
        return self.snapshot_schedule.lag(step)

    def _begin_version(self, version: int) -> None:
        """Begin to copy the state, which has this version. If a rank is lost, the next vote notices it."""
        try:
            self.copies.begin_version(version)
        except PeerLost as lost:
            self._group.drop(str(lost))
            return
        self.snapshot_schedule.begin_version(step_of(version), self.window_planner.versions.steps)

    # ---- a recovery

    def _meet(self) -> None:
        """Gather what each rank holds; collective."""
        own, options, choice = self._state.own, self._options, self.windows.choice
        mine = StageRank(
            options.stage,
            options.data_parallel,
            self._membership.node,
            own.layout,
            own.sizes(),
            experts=self.placement.experts(),
            decided=self.placement.decided,
            weights=self.windows.weights(),
            slices=choice.report(),
            repeated=self.copies.replay.report(),
            stops_at=self.stopped,
        )
        layout = _layout(self._group, mine, options.data_parallel_size, options.size)
        ends = [rank.stops_at for rank in layout if rank.stops_at is not None]
        self.stopped = min(ends, default=None)
        self.placement.learn(layout)
        self.windows.learn(self.placement.layout)
        self.copies.store.check_folder()
        if options.expert_parallel:
            self.connections.connect_peers(self._state.layers.values())

    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        """Bring this rank to the newest version of which every unit of every stage is left.

        Raises:
            FolderInUse: another run of the job uses its memory folder.
            UnequalForwards: ranks ran different numbers of schedules in the interrupted step.
        """
        self.run.meet()
        self._meet()
        history = self.history
        history.before = version if established else None
        history.reason = self.lost.note(step_of(version), history.reason)
        refuse_unequal_runs(self.attempt, self._group)
        self.localised.exchange_logs(self._group, version)
        self.windows.choose_way(self._group, version)
        while True:
            try:
                history.outcome = self.recovery(version, established=established).run(history.clock.enter)
                break
            except LostExperts as lost:
                if not self.windows.turn_back():
                    self._unrecoverable = lost
                    return {"event": "unrecoverable"}
        is_stale = bool(history.outcome.stale)
        if is_stale:
            self.localised.begin_again()
        self._restore_loop()
        self._version = history.outcome.version
        return {"event": "restored", "version": history.outcome.version, "is_stale": is_stale}

    def _restore_loop(self) -> None:
        """Restore the optimizer's settings, the scheduler and the loss scale from the state, which has changed."""
        loop_state.restore(self._state.loop.load(), self._loop)

    def count_losses(self, version: int) -> Event:
        """Count the tokens that stale experts have lost."""
        self.experts.count_losses(self.placement.layout, self.history.outcome, self.history.before)
        return {"event": "counted"}

    def recovery(self, version: int, *, established: bool) -> Recovery:
        """Try once to bring all ranks to one version."""
        standing = Standing(
            version, established, lagging=self.experts.lagging, committed=max(0, self.history.committed)
        )
        return Recovery(
            self._state, self.copies.stored(), self._group, StageTarget(self.placement, self.windows), standing
        )

    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        """Begin to make the copies that are missing; they are complete on return, or by the next vote."""
        self._version = version
        at, rank = self._membership, self._group.rank
        self._emit(Joined(at.identity.job, at.id, at.nodes[rank], rank, "train", generation, list(at.nodes)))
        self._emit(Copy(step_of(version)))
        layout, held = self.placement.layout, self.history.outcome.copies
        is_complete = self.copies.protect(layout, version, generation, held, waits=waits)
        self.window_planner.versions.divide_captures(self.windows.numbers, self.windows.steps)
        self.snapshot_schedule.restart(step_of(version))
        self.bubbles.restart(self.window_planner, step_of(version))
        return {"event": "protected", "is_whole": is_complete}

    def resume(self, version: int) -> None:
        """Report the recovery, which is over."""
        self.end_recovery(version, self._options.size, is_arriving=self.copies.first.is_arriving)

    def end(self) -> None:
        """End the profile and all threads; let calls of `on_lost` end."""
        self.bubbles.end()
        self.lost.close()
        self.courier.close()


def _layout(group: Group, mine: StageRank, peers: int, size: int) -> list[StageRank]:
    """Gather the reports of all ranks about themselves, by rank; collective."""
    layout = [StageRank.from_json(each) for each in gather_json(group, asdict(mine))]
    taken = [rank.stage * peers + rank.data_parallel for rank in layout]
    if taken != list(range(size)):
        raise PeerLost(
            f"expected one process for each of the ranks 0 to {size - 1}, got the ranks {taken}. Tensor-parallel "
            "ranks, which would share a place in the pipeline, are not supported"
        )
    return layout
