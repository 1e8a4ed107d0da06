"""Commands of the commit protocol in a session: steps, updates, checkpoints and the end of a job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evermoe.comm.vote import Ballot
from evermoe.copies.replay.replayable import refuse_code_in
from evermoe.copies.replay.step_code import foreign_code
from evermoe.errors import PeerLost, PersistFailed
from evermoe.events import Begin, Copy, Gather, Reduce, Skipped, Update, Vote
from evermoe.moe.layer import report_load
from evermoe.optim.combined import each_of
from evermoe.process.memory_folder import FINISHED, mark
from evermoe.process.seeds import seeded
from evermoe.session import gradients, step_notices
from evermoe.session.commands import Event
from evermoe.session.data_advance import DataAdvance
from evermoe.session.reduced_gradients import ReducedGradients
from evermoe.session.role_request import RoleRequest
from evermoe.session.saving import warn_unwritten
from evermoe.session.script_guard import ScriptGuard
from evermoe.session.session_recovery import RecoveryDriver, SessionContext
from evermoe.session.step import Step
from evermoe.state import loop_state, same_everywhere
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)

STALE = "members have changed since the step was drawn"


class SessionDriver(RecoveryDriver):
    """Carries out the commands of the protocol. See `evermoe.session.commands.Driver` for each.

    Args:
        parts: of the session.
        folder: of the job on this machine, in which its role may be asked to change.
        leave: asks to leave the job after the step.
    """

    def __init__(self, parts: SessionContext, folder: Path, leave: Callable[[], None]) -> None:
        super().__init__(parts)
        self.role_request = RoleRequest(folder, self._config.membership.role, self.lost.turn, leave)
        self.loader, self.place = parts.loader, parts.place
        self.guard = ScriptGuard(self._script.model, self._script.optimizer)
        self._data = DataAdvance(self._script.sampler, self._group, self._emit)
        self._reduced = ReducedGradients(self._script, self._state, self._group, self._config, parts.place)
        if self._trains:
            self._save_progress()
        else:
            self._state.release()

    # ---- a step

    def step(self, number: int) -> None:
        """Let the script compute a step, unless the job was stopped before this member joined it."""
        self.evaluations.check_goes_on(number)
        super().step(number)
        self.history.clock.stop()
        self._membership.failure_detector.activity.begin_step()

    def begin_step(self, step: Step) -> None:
        """Prepare for the script's computation.

        If members have changed since the step was drawn, drop the group, so that all draw it again: the shares were
        those of the previous members.
        """
        self.evaluations.substitute.forget()
        if self.is_stale(step):
            self._group.drop(STALE)
        step_notices.send(self._membership, step.number)
        self._script.zero_gradients(self._state)
        self._state.expert_load.forget_step()
        self.guard.begin_step()
        self._calls.begin(step.number, self._membership.generation)
        self._checks.begin_step(step.number)
        may_send = self.guard.may_send_early
        self._protection.begin_step(step.number + 1, may_send_early=may_send)
        self._buckets.begin_step(may_send=may_send)
        self._emit(Begin(step.number))
        if self._config.seed is not None:
            self._random.enter_context(seeded(self._config.seed, step.number, self.place.seed_of(self._group.rank)))

    @property
    def epoch(self) -> float:
        """Epochs that the sampler has consumed; NaN if it does not say, and on a replica node."""
        return float(getattr(self._script.sampler, "epoch", math.nan)) if self._trains else math.nan

    def resume(self, version: int) -> None:
        """End a recovery, after which steps are measured again."""
        super().resume(version)
        self.loader.restart()

    def is_stale(self, step: Step) -> bool:
        """Return whether a recovery came after the step was drawn."""
        return step.generation != self._membership.generation

    def end_step(self) -> None:
        """End the block of the step."""
        super().end_step()
        self.begin_part(1.0)

    def begin_part(self, weight: float) -> None:
        """Begin a part of the share: layers leave out the tokens of a part without samples."""
        has_samples = weight > 0
        for layer in self._state.layers.values():
            if layer.has_samples != has_samples:  # a module's attribute is slow to set
                layer.has_samples = has_samples

    def check_loss(self, loss: Tensor) -> float:
        """Return the factor of a loss that is about to be backpropagated; check the loss of the first step.

        Raises:
            UnsupportedState: the script has scaled it by a `torch.amp.GradScaler`.
        """
        self.guard.check_loss(loss)
        self._buckets.begin_backward()
        self._protection.replicas.on_backward(ends=False)
        return self._script.loss_scale.value

    def end_backward(self) -> None:
        """Record that a loss is backpropagated."""
        self.guard.end_backward()

    def finish_step(self, step: Step) -> Ballot:
        """Reduce the gradients, and wait for all copies that must be complete before the vote.

        Raises:
            PeerLost: a member is gone, or members have changed since the step was drawn.
            UnsupportedState: the script has code in `optimizer.step()` that replicas would not run.
        """
        if self.is_stale(step) or self._group.gives_zeros:  # zeros are no results
            if self._state.shards is not None:  # with the sums in the island that its other processes may make
                self._state.shards.take_gradients(self._state.dense)
            raise PeerLost(STALE if self.is_stale(step) else str(self._group.broken))
        own_code = next(filter(None, map(foreign_code, each_of(self._script.optimizer))), None)
        refuse_code_in(self._protection.replicas.arithmetics)
        self.guard.end_step(self._group.size)
        self.role_request.look()
        self._calls.end()
        self._emit(Reduce(step.number))
        on_gradients = self._config.on_gradients
        self._protection.replicas.on_backward(ends=True)
        self._buckets.complete()
        self._protection.begin_exchange(step.number + 1, are_final=on_gradients is None)
        self._buckets.reduce()
        changed = None if on_gradients is None else self._reduced.change(on_gradients, step, self._buckets)
        is_whole, state_requests = self._protection.finish_exchange(step.number + 1)
        self._data.exchange()
        self._emit(Vote(step.number))
        counted = self._reduced.count(step, self._buckets, are_changed=changed is not None)
        if changed is not None:
            counted = counted._replace(reduced_squares=changed.reduced_squares, divided=changed.divided)
        self._checks.compute(step.number)
        return self._with_own(counted, state_requests)._replace(
            votes=float(is_whole and self._buckets.have_succeeded()),
            checkpoint_done=float(self.saving.checkpointer.is_over),
            checkpoint_overdue=float(self.saving.checkpointer.is_overdue),
            save_done=float(self.saving.is_save_over),
            stopping=float(self.asks_to_stop),
            steps_own=float(own_code is not None),
        )

    def follow(self, number: int) -> Ballot:
        """Receive a step of the members that train, on a replica node."""
        self.evaluations.check_goes_on(number)
        super().step(number)
        self.history.clock.stop()
        step_notices.wait(self._membership)
        self.role_request.look()
        self._protection.begin_step(number + 1)
        is_whole, state_requests = self._protection.finish_exchange(number + 1)
        self._emit(Vote(number))
        return self._with_own(Ballot(votes=float(is_whole)), state_requests)

    def _with_own(self, ballot: Ballot, state_requests: int) -> Ballot:
        """Return a ballot with what members report that train, and replica nodes."""
        capture_seconds, step_seconds = self._protection.measured_seconds()
        return ballot._replace(
            state_requests=float(state_requests),
            capture_seconds=capture_seconds,
            step_seconds=step_seconds,
            reported=self.lost.reported,
            role_switches=float(self.lost.is_returning),
        )

    def tallied(self, step: int, sums: Ballot, attached: Sequence[float]) -> None:
        """End the job if the step would be taken with a loss or gradient that is not finite.

        Where a smaller loss scale may help, the update is left out. If members differ, the step is refused.

        Raises:
            NonFiniteLoss: names the step and the member. ValueError: some members gave counts, and others did not.
            PeerLost, CorruptState: members differ; see `VoteChecks.judge`.
        """
        is_taken = self.is_taken(sums, self._membership.everyone.size)
        if is_taken and self._config.on_nonfinite == "error" and sums.loss_scale <= 1:
            gradients.refuse_nonfinite(sums, step, self._membership.nodes)
        compared = self._measures.take_step(step, attached)
        if is_taken:
            self._checks.judge(step, compared)

    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Update the state, and begin to copy it."""
        if is_recalled:
            self._update(after, sums)
            self.note_commit(before, after, self._membership.num_trainers)
            return
        self._emit(Update(step_of(before)) if sums.is_finite else Skipped(step_of(before), sums.nonfinite_rank))
        self._update(after, sums)
        if self._trains and sums.is_finite and self._state.owners.units:
            self._emit(Gather(step_of(after)))
            self._buckets.send_updated()
        self._emit(Copy(step_of(after)))
        self._protection.begin_copies(after)
        self.saving.advance_saves(after, is_over=self._trains and sums.trainers == sums.save_done)
        self.taken += 1
        self.note_commit(before, after, self._membership.num_trainers)
        self._heal_and_pace(step_of(after), sums)
        data_seconds = self.loader.take_seconds()
        self.loader.end_step(step_of(before), data_seconds, self._measures.emit(step_of(before), data_seconds))

    def _update(self, version: int, sums: Ballot) -> None:
        self.results, self._version = self.results.after(sums), version
        if not self._trains:
            self.results = self.results._replace(samples=0, tokens=0)  # of steps before it joined it knows none
        if sums.stopping:
            self.evaluations.stopped = self._step
        self.evaluations.step_taken()
        self._early.drop()
        clip = gradients.factor_of(sums, self._config.max_grad_norm) if sums.is_finite else None
        self._protection.before_update()
        self.saving.before_update()
        self.skipped += clip is None
        if self._trains:
            if clip is None:
                self._state.expert_load.forget_step()
            else:
                self.guard.allow_step()
                has_own_code = sums.steps_own > 0
                repeated = self._protection.replicas.arithmetics
                gradients.step_optimizer(
                    self._script.optimizer, self._state, clip, has_own_code=has_own_code, repeated=repeated
                )
                report_load(self._state.layers.values())
                self._state.expert_load.add_step()
            self._script.loss_scale.update(has_overflowed=clip is None)
            loop_state.advance(self._script.scheduler, self.results.loss)
            self._data.advance(self._step - 1, sums)
            self._save_progress()
        arrived = self._protection.first.version
        if arrived is not None:  # with this vote; members that had no part in its steps report none of them
            self.history.committed = max(self.history.committed, step_of(arrived))
        self._protection.commit_step(version, clip)

    def _heal_and_pace(self, step: int, sums: Ballot) -> None:
        self._protection.set_pace(sums.capture_seconds, sums.step_seconds)
        try:
            with self._protection.snapshots.pacer.uncounted():  # most steps have none of these
                if sums.state_requests:
                    self._protection.heal_copies()
                has_own_code = self._config.on_gradients is not None or sums.steps_own > 0
                if self._trains and same_everywhere.are_compared(step, has_own_code=has_own_code):
                    same_everywhere.compare_replicas(self._state, self._group)
                if self._trains and sums.trainers == sums.checkpoint_done:
                    self.saving.checkpointer.advance()
                if sums.checkpoint_overdue:
                    self.saving.checkpointer.request()
                self.window_planner.after(step)
        except PeerLost as lost:  # the step itself is taken; the next look finds the group broken
            self._group.drop(str(lost))

    def _save_progress(self) -> None:
        # The state of many loaders is that before their next batch, which they read here.
        with self.loader.reading(self._step):
            progress = loop_state.collect(self._script.loop)
        self._state.loop.store(progress | self.results._asdict())

    # ---- checkpoints and the end

    def settle(self) -> Event:
        """Wait for the copies of the last step, which no vote follows or after which members leave.

        A checkpoint is written first if members leave that have the only copies.
        """
        self.evaluations.substitute.put_back()
        everyone = self._membership.everyone
        self.share_quarantine()
        if self._trains and self.lost.leaving >= max(1, min(everyone.size, self._config.copies.replication)):
            self._save_before_leaving(everyone.size)
        self._buckets.await_weights()
        complete = everyone.all_reduce(torch.tensor([int(self._protection.settle(self._version))]))
        return {"event": "settled", "is_whole": bool(complete == everyone.size)}

    def _save_before_leaving(self, members: int) -> None:
        if self.saving.checkpointer.writes:
            try:
                self.saving.checkpointer.finish(self._version)
                self._protection.ledger.record_checkpoint(self._version)
            except (PeerLost, PersistFailed) as failed:
                warn_unwritten(self._version, failed)
        elif self._group.rank == 0:
            _warn_unsaved(self._step, self.lost.leaving, members)

    def farewell(self, version: int) -> Event:
        """Write the last checkpoint, then wait for all: no member leaves while another still needs its copies.

        Raises:
            PersistFailed: it could not be written. The state stays where a failure leaves it.
        """
        self.evaluations.substitute.put_back()
        if self._trains:
            try:
                self.saving.checkpointer.finish(version)
            except PersistFailed as failed:
                raise PersistFailed(
                    f"all steps are taken, but the last checkpoint, of step {step_of(version)}, was not written: "
                    f"{failed}. Make room; a job with a name that is started again resumes from its shared memory"
                ) from failed
        recovery = self._recovery(version, established=True, saw_progress=True)
        self._checks.finished(self.compare_copies(recovery, "replicas or copies"), self._step)
        self._membership.everyone.all_reduce(torch.ones(1))
        return {"event": "parted"}

    def close(self, standing: dict[str, Any] | None) -> None:
        """Notify late processes and waiting spares that the job is over."""
        mark(FINISHED)
        if standing is not None:
            self._membership.requests.announce_end(standing)


def _warn_unsaved(step: int, leaving: int, members: int) -> None:
    logger.warning(
        "%d of %d members leave the job after step %d, and no checkpoint is written, as there is no folder for it: "
        "their memory may have the only copies of some units. Session(checkpoints=...) writes a checkpoint first",
        leaving,
        members,
        step,
    )
