"""The driver of a pipeline's session: votes, updates, copies and the end of a job, as the commit protocol asks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from evermoe.comm.vote import Ballot
from evermoe.copies.replay.step_code import foreign_code
from evermoe.copies.snapshot.rank_plan import COPIES
from evermoe.errors import PeerLost, UnsupportedState
from evermoe.events import Begin, Confirm, Copy, Measured, Reduce, Skipped, Update, Vote
from evermoe.pipeline.pipeline_recovery import PipelineContext, PipelineRecovery
from evermoe.pipeline.pipeline_step import PipelineStep, StepRuns
from evermoe.process.memory_folder import FINISHED, mark
from evermoe.process.seeds import seeded
from evermoe.session import gradients
from evermoe.session.commands import Event
from evermoe.session.script_guard import ScriptGuard
from evermoe.session.step_results import StepResults
from evermoe.state import loop_state
from evermoe.state.version import step_of


class PipelineDriver(PipelineRecovery):
    """Carry out the commands of the protocol for one rank. See `evermoe.session.commands.Driver` for each."""

    def __init__(self, parts: PipelineContext) -> None:
        super().__init__(parts)
        self.optimizer, self._loss_scale = parts.loop.optimizer, parts.loss_scale
        self.guard = ScriptGuard(parts.module, self.optimizer)
        self._vote_span = ExitStack()
        self._waits = True
        """Whether the vote waits for copies."""
        self._since = time.monotonic()

    # ---- a step

    def begin_step(self, step: PipelineStep) -> None:
        """Record that the script begins to compute a step."""
        self.attempt = step
        self.guard.begin_step()
        self.optimizer.zero_grad(set_to_none=True)
        past = self.localised.begin_step(self._version)
        self.bubbles.pacer.begin_forward()
        seeds = self._options.seed, self._options.data_parallel
        step.prepare(
            past, is_repeated=self.localised.is_repeated(step.number), scale=self._loss_scale.value, seeds=seeds
        )
        self._emit(Begin(step.number))
        self._random.enter_context(seeded(*seeds, step.number, self._options.stage))

    def finish_step(self, step: PipelineStep) -> Ballot:
        """Reduce the gradients over the stage's ranks, and wait for the copies that the vote needs.

        Raises:
            PeerLost: a rank is lost. RuntimeError: of torch, for the same reason.
            UnsupportedState: the script has run no schedule.
        """
        self._emit(Reduce(step.number))
        self.guard.allow_step()
        step.end()
        self.placement.sum_replicas(step.past)
        after = step.number + 1
        self._waits = self.windows.are_used or self.snapshot_schedule.is_due(after)
        if self._waits:
            self.bubbles.pacer.hurry()
        self._vote_span.enter_context(self.bubbles.profiler.span(COPIES, "collective", "network"))
        is_complete = not self._waits or self.copies.before_vote(after)
        if is_complete and self._waits:
            self._emit(Confirm(after))
        self._emit(Vote(step.number))
        return self._ballot(step, is_complete)

    def end_vote(self) -> None:
        """Record that the result of the vote is known, or a rank is lost."""
        self._vote_span.close()

    def _ballot(self, step: PipelineStep, is_complete: bool) -> Ballot:
        """This rank's vote on the step whose gradients are complete.

        Args:
            step: the attempt.
            is_complete: whether the copies that the vote waits for are.
        """
        past = step.past
        if past is not None and past.is_taken and past.ballot is not None:
            found = past.ballot
        else:
            found = self._count(step.runs)
            if past is not None:
                past.ballot = found
        return found._replace(
            votes=float(is_complete),
            reported=self.lost.reported,
            stopping=float(self.asks_to_stop),
            steps_own=float(foreign_code(self.optimizer) is not None),
        )

    def _count(self, runs: StepRuns) -> Ballot:
        found = [p.grad for some in self._state.parameters() for p in some if p.grad is not None]
        place, peers = self._options.data_parallel, self._options.data_parallel_size
        squares = gradients.SquareSum(self._state, place, peers, copies=1 if self._options.expert_parallel else peers)
        extremes, rank, scale = gradients.extremes(found), self._group.rank, self._loss_scale.value
        mine = gradients.ballot_of(runs.loss, runs.count, extremes, squares.norms, squares.value, rank, scale)
        self.connections.check()
        has_means = runs.loss is not None and runs.count is None
        return mine._replace(counted=float(runs.losses)) if has_means else mine

    def tallied(self, step: int, sums: Ballot, attached: Sequence[float]) -> None:
        """End the job on all ranks if the step's losses are inconsistent, or a gradient is not finite.

        With a loss scale above 1 the update is left out instead, since a smaller scale may help.

        Raises:
            NonFiniteLoss: names the step and the rank.
            ValueError: some ranks gave counts, and others did not.
            UnsupportedState: the session does not know the losses of some ranks.
        """
        if not self.is_taken(sums, self._options.size):
            return
        if sums.trainers != self._options.data_parallel_size:
            raise UnsupportedState(
                f"step {step}: {sums.trainers:.0f} ranks have computed a loss that the session knows, expected "
                f"{self._options.data_parallel_size}, the ranks of the last stage: build_schedule must give their "
                "schedules loss_fn=session.loss_function(...)"
            )
        if self._options.on_nonfinite == "error" and sums.loss_scale <= 1:
            gradients.refuse_nonfinite(_of_mean(sums), step, self._membership.nodes)

    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Apply the step that all have voted for, and begin to copy the new version."""
        self.end_vote()
        is_due = self.snapshot_schedule.is_due(step_of(after))
        self.copies.before_update()
        if is_due:  # all have voted: its copies are complete
            self.copies.drop_previous()
            if self.copies.version is not None:
                self.localised.log.release_before(self.copies.version)
                self.history.committed = max(self.history.committed, step_of(self.copies.version))
        sums, self._version = _of_mean(sums), after
        self.results = StepResults(sums.mean_loss, sums.norm)
        if sums.stopping:
            self.stopped = step_of(after)
        if not is_recalled:
            self._emit(Update(step_of(before)) if sums.is_finite else Skipped(step_of(before), sums.nonfinite_rank))
        is_repeated = self.localised.retake(after)
        if is_repeated:
            self._restore_loop()
        else:
            self._update(sums)
        self.experts.taken(step_of(after), is_repeated=is_repeated)
        self.windows.advance(step_of(after))
        self.localised.log.mark_taken(after)
        self.note_commit(before, after, self._options.size)
        if is_recalled:
            return
        self.taken += 1
        self.bubbles.begin_step()
        self._copy(after, is_due)
        self._measure(step_of(before))

    def _copy(self, after: int, is_due: bool) -> None:
        self._emit(Copy(step_of(after)))
        if self._group.broken is not None:
            return
        if is_due:
            self.copies.forget_version()
            if self.localised.needs_copies(after):
                self._begin_version(after)
        elif self.windows.are_used:
            self.copies.copy_slice(after)

    def _measure(self, step: int) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        lag = {"snapshot": self.lag(step + 1)} if self._options.copies.replication else {}
        sent = {"snapshot": self.courier.sent_bytes}
        self._emit(Measured(step, seconds, 0, None, None, lag, sent))

    def _update(self, sums: Ballot) -> None:
        if sums.is_finite:
            factor = gradients.factor_of(sums, self._options.max_grad_norm)
            gradients.step_optimizer(self.optimizer, self._state, factor, has_own_code=sums.steps_own > 0)
            if self._options.placement is not None:
                self._state.expert_load.add_step()
        else:
            self.skipped += 1
            self._state.expert_load.forget_step()
        self._loss_scale.update(has_overflowed=not sums.is_finite)
        loop_state.advance(self._loop.scheduler, self.results.loss)
        self._state.loop.store(loop_state.collect(self._loop))

    def pace(self, step: int) -> None:
        """Plan the next windows after the vote on a step."""
        try:
            self.window_planner.after(step)
            self.windows.choice.consider(self.window_planner, self._group, self.placement.layout)
        except PeerLost as lost:  # the step itself is applied; the next vote notices that the group is broken
            self._group.drop(str(lost))

    def moves_experts(self) -> bool:
        """Return whether the next step is not computed yet: experts move first, or a rank is lost. Collective."""
        try:
            if not self.placement.moves(self._step, self.experts.ledger.boost_factors):
                return False
            reason = "the load has shifted"
        except PeerLost as lost:
            reason = str(lost)
        self._group.drop(reason)  # all ranks meet as after a loss
        return True

    def resume(self, version: int) -> None:
        """Report the recovery, which is over; the next step begins."""
        super().resume(version)
        self._since = time.monotonic()

    # ---- the end

    def settle(self) -> Event:
        """Complete the copies of the last step, which no vote follows or after which ranks leave."""
        self.share_quarantine()
        is_complete = self.finish_copies(self._version)
        everyone = self._group.all_reduce(torch.tensor([int(is_complete)]))
        return {"event": "settled", "is_whole": bool(everyone == self._options.size)}

    def farewell(self, version: int) -> Event:
        """Compare all copies, then wait for all ranks: none leaves while another still needs its copies."""
        self.finish_copies(version)
        self.compare_copies(self.recovery(version, established=True), "peers or copies")
        self._group.all_reduce(torch.zeros(1))
        return {"event": "parted"}

    def close(self, standing: dict[str, object] | None) -> None:
        """Notify processes that arrive too late that the job is over."""
        mark(FINISHED)


def _of_mean(sums: Ballot) -> Ballot:
    """Return the sums of a step whose losses are divided by counts: of tokens, or of microbatches with mean losses."""
    return sums._replace(counting=sums.trainers)
