"""What a session does when the commit protocol says so: steps, updates, checkpoints and the end of a job."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from evermoe.comm.collectives import complete_gradients, reduce_dense
from evermoe.comm.membership import Membership
from evermoe.comm.vote import Ballot
from evermoe.config import SessionConfig
from evermoe.errors import PeerLost, PersistFailed
from evermoe.events import Begin, Checkpoint, Commit, Copy, Listener, Reduce, Update, Verified, Vote
from evermoe.protection import Protection
from evermoe.state import loop_state
from evermoe.state.training_state import TrainingState
from evermoe.state.version import generation_of, step_of
from evermoe.train import gradients
from evermoe.train.protocol import Event
from evermoe.train.session_recovery import FINISHED_FILE, RecoveryDriver, Script
from evermoe.train.step import Step


class SessionDriver(RecoveryDriver):
    """Carries out the commands of the protocol. See `train.protocol.Driver` for each.

    Args:
        script: what is trained.
        state: its units.
        membership: asks the Lighthouse and connects the groups.
        protection: what protects the state.
        config: options of the session.
        emit: is told the session's events.
    """

    def __init__(
        self,
        script: Script,
        state: TrainingState,
        membership: Membership,
        protection: Protection,
        config: SessionConfig,
        emit: Listener,
    ) -> None:
        super().__init__(script, state, membership, protection, config, emit)
        self.loss = float("nan")
        """Mean loss of the latest step's global batch."""
        self.taken = 0
        """Votes that have passed here; counts, and nothing else."""
        if self._trains:
            self._save_progress()
        else:
            state.release()

    # ---- a step

    def step(self, number: int) -> None:
        """Lets the script compute a step."""
        self.has_step, self._step = True, number
        self._clock.stop()

    def begin_step(self, step: Step) -> None:
        """The script begins to compute."""
        if self._config.seed is not None:
            torch.manual_seed(hash((self._config.seed, step.number, self._group.rank)) % 2**63)
        self._script.optimizer.zero_grad(set_to_none=True)
        self._script.model.zero_grad(set_to_none=True)
        self._state.expert_load.forget_step()
        self._protection.begin_step()
        self._emit(Begin(step.number))

    def finish_step(self, step: Step) -> Ballot:
        """All gradients of this member are computed: reduces them, and waits for what must be safe before the vote.

        Raises:
            PeerLost: a member is gone.
        """
        self._emit(Reduce(step.number))
        weights = [layer.weights for layer in self._state.layers.values()]
        complete_gradients([*self._state.dense, *weights], self._group)
        self._protection.begin_exchange(step.number + 1)
        reduce_dense(self._state.dense, self._group)
        self._reducer.reduce(gradients.of_experts(self._state), self._group)
        is_whole, asked = self._protection.finish(step.number + 1)
        self._emit(Vote(step.number))
        assert step.loss is not None
        is_clipped = self._config.max_grad_norm is not None
        squares = gradients.squares(self._state, self._group.rank) if is_clipped else 0.0
        is_whole = is_whole and self._group.is_whole()
        return Ballot(float(is_whole), float(step.loss), squares, float(asked), *self._protection.measures())

    def follow(self, number: int) -> Ballot:
        """Receives a step of the others, on a replica node."""
        self._step = number
        self._clock.stop()
        self._protection.begin_step()
        is_whole, asked = self._protection.finish(number + 1)
        self._emit(Vote(number))
        return Ballot(float(is_whole), 0.0, 0.0, float(asked), *self._protection.measures())

    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        """Updates the state, and begins to copy it."""
        if is_recalled:
            self._update(after, sums)
            self._note_commit(before, after)
            return
        self._emit(Update(step_of(before)))
        self._update(after, sums)
        self._emit(Copy(step_of(after)))
        self._protection.begin_copies(after)
        self.taken += 1
        self._note_commit(before, after)
        self._heal_and_pace(step_of(after), sums)

    def _note_commit(self, before: int, after: int) -> None:
        """Keeps what is reported of a step until it is committed."""
        members, generation = self._membership.num_trainers, generation_of(after)
        self._commit_events[step_of(before)] = Commit(step_of(before), self.loss, members, generation)

    def _update(self, version: int, sums: Ballot) -> None:
        self.loss, self._step = sums.loss, step_of(version)
        clip = gradients.clip_factor(sums.squares, self._config.max_grad_norm)
        self._protection.before_update()
        if self._trains:
            gradients.clip(self._state, clip)
            self._script.optimizer.step()
            if self._script.scheduler is not None:
                self._script.scheduler.step()
            self._script.sampler.advance()
            self._state.expert_load.add_step()
            self._save_progress()
        self._protection.committed(version, clip)

    def _heal_and_pace(self, step: int, sums: Ballot) -> None:
        self._protection.set_pace(sums.capture_seconds, sums.step_seconds)
        try:
            if sums.asked:
                self._protection.heal()
            self._protection.window_planner.after(step)
        except PeerLost as lost:  # the step itself is taken; the next look finds the group broken
            self._group.drop(str(lost))

    def commit(self, step: int) -> None:
        """Reports a step that no failure covered by the preset can undo."""
        self.committed = step + 1
        self._emit(self._commit_events.pop(step))

    def _save_progress(self) -> None:
        script = self._script
        self._state.loop.store(loop_state.collect(script.sampler, script.optimizer, script.scheduler))

    # ---- checkpoints and the end

    def checkpoint_if_due(self, version: int) -> None:
        """Writes a checkpoint of `version` if its step is due."""
        if not self._checkpointer.is_due(step_of(version)):
            return
        try:
            self._checkpoint(version)
        except PeerLost as lost:  # the step itself is taken; the next look finds the group broken
            warnings.warn(f"the checkpoint of step {step_of(version)} was not written: {lost}", stacklevel=5)
        except PersistFailed as failed:
            warnings.warn(
                f"the checkpoint of step {step_of(version)} was not written: {failed}. Training continues, and the "
                "next one is tried when it is due",
                stacklevel=5,
            )

    def _checkpoint(self, version: int) -> None:
        path = self._checkpointer.write(version)
        self._emit(Checkpoint(step_of(version), str(path)))

    def settle(self) -> Event:
        """Waits for the copies of the last step, which no vote follows."""
        everyone = self._membership.everyone
        whole = everyone.all_reduce(torch.tensor([int(self._protection.settle())]))
        return {"event": "settled", "is_whole": bool(whole == everyone.size)}

    def farewell(self, version: int) -> Event:
        """Writes the last checkpoint, then waits for all: no member leaves while another still needs its copies.

        Raises:
            PersistFailed: it could not be written. The state stays where a failure leaves it.
        """
        if self._trains and not self._checkpointer.has(version):
            try:
                self._checkpoint(version)
            except PersistFailed as failed:
                raise PersistFailed(
                    f"all steps are taken, but the last checkpoint, of step {step_of(version)}, was not written: "
                    f"{failed}. Make room; a job with a name that is started again resumes from its shared memory"
                ) from failed
        checked, differing = self._recovery(version, established=True, saw_running=True).verify()
        if differing:
            warnings.warn(
                f"replicas or copies differ at step {step_of(version)}: {', '.join(differing[:8])}", stacklevel=6
            )
        self._emit(Verified(checked, len(differing), differing))
        self._membership.everyone.all_reduce(torch.ones(1))
        return {"event": "parted"}

    def close(self) -> None:
        """Tells processes that come too late that the job is over."""
        if FINISHED_FILE in os.environ:
            Path(os.environ[FINISHED_FILE]).touch()
