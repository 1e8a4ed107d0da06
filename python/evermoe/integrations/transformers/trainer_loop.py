"""The loop of a Trainer that follows the steps of a session.

transformers' own loop counts the batches that its process has read. Here members join, restart and repeat steps, so the
session's step is what counts: epochs, logs, evaluations and callbacks follow from it, after the same steps on all
members.

The work after a step (logs, evaluation, callbacks) is separate from the step. A member may miss it: it has joined, or
has lost the others in the vote. Then it gets the results from the others before the next step. If nobody has done that
work, as when a job is started again, all members do it first.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from evermoe.data.sampler import ElasticSampler
from evermoe.integrations.transformers import trackers, trainer_folders
from evermoe.integrations.transformers.adapters import BestAdapters, is_adapted
from evermoe.integrations.transformers.hub_weights import HubWeights
from evermoe.integrations.transformers.step_batches import Epochs, Follower, StepBatches, check_place
from evermoe.integrations.transformers.trainer_progress import TrainerProgress
from evermoe.integrations.transformers.training_arguments import ElasticTrainingArguments
from evermoe.session.between_steps import substitute_of
from evermoe.session.session import Session
from evermoe.session.session_config import SessionArguments
from evermoe.session.step import Step

logger = logging.getLogger(__name__)

FLAGS = ("should_training_stop", "should_epoch_stop", "should_evaluate", "should_save", "should_log")
"""Decisions of callbacks, in transformers' `TrainerControl`."""


class StepUndone(Exception):
    """A recovery has undone the step whose work was under way: it is taken again, and its work is repeated."""


class TrainerLoop(Trainer):
    """A `Trainer` whose steps are those of a session. See `ElasticTrainer` for its use."""

    optimizer: Any
    control: Any
    args: ElasticTrainingArguments
    sampler: ElasticSampler
    session: Session | None = None
    progress: TrainerProgress
    _arguments: SessionArguments
    _parts: int
    """Parts of a member's share of a step."""
    _steps: Any = None
    """The session's steps, a generator."""
    _step: Step | None = None
    """Step that is drawn and not taken."""
    _drawn_in: int | None = None
    """Generation in which the step was drawn."""
    _met_in: int | None = None
    """Generation whose members have agreed on what is done."""
    _begun_epoch: int | None = None
    """Epoch of the latest step that was begun; transformers' own loop begins the first one."""
    _is_looping = False
    """Whether steps are taken now."""
    _best: str | None = None
    """Folder of the best model that is loaded; None while the model has the trained weights."""
    _has_begun = False
    """Whether `on_train_begin` was called."""

    # ---- what transformers asks for before the first step

    def get_train_dataloader(self) -> Any:
        """Return the batches of this member."""
        self._batches = StepBatches(super().get_train_dataloader(), self.sampler)
        self._epochs = Epochs(self.sampler.num_samples, self.sampler.batch_size)
        return self._batches

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Return the numbers of epochs, steps and samples, by the sampler's batches."""
        _, in_epoch, examples, _, _, _, steps = super().set_initial_training_values(args, dataloader)
        size, samples = self.sampler.batch_size, self.sampler.num_samples
        if args.max_steps <= 0:
            steps = math.ceil(args.num_train_epochs * samples / size)
        return math.ceil(steps * size / samples), in_epoch, examples, steps * size, size, in_epoch, steps

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the scheduler. The session begins here, as this is the last of its inputs; its members meet."""
        real: Any = getattr(self.optimizer, "optimizer", self.optimizer) if optimizer is None else optimizer
        if isinstance(real, list | tuple):
            kinds = ", ".join(type(each).__name__ for each in real)
            raise ValueError(
                f"ElasticTrainer: expected one optimizer, got {len(real)}: {kinds}. A Session takes several, in a loop "
                "of your own"
            )
        scheduler = super().create_scheduler(num_training_steps, real)
        norm = self.args.max_grad_norm if self.args.max_grad_norm and self.args.max_grad_norm > 0 else None
        arguments: SessionArguments = {"max_grad_norm": norm, **self._arguments, "scheduler": scheduler}
        arguments["stateful"] = {**(arguments.get("stateful") or {}), "trainer": self.progress}
        model: Any = self.model
        self.session = Session(model, real, self.sampler, **arguments)
        substitute_of(self.session).source_of = lambda folder: (
            BestAdapters(model, folder) if is_adapted(model) else HubWeights(folder, model)
        )
        # One more than are taken: members stay connected after the last step, until `end`.
        self._steps = self.session.steps(num_training_steps + 1)
        followers: Any = Follower(real), Follower(scheduler)
        self.optimizer, self.lr_scheduler = followers
        self._draw()
        self._place(self.progress.done)
        return self.lr_scheduler

    # ---- the loop

    def _run_epoch(
        self, model: nn.Module, trial: Any, ignore_keys_for_eval: list[str] | None, start_time: float, **_: Any
    ) -> None:
        """Train to the end: all epochs, as a recovery may lead back to an earlier one."""
        self._initial_global_step = 0  # of the job, whose losses the progress has
        self._has_begun = True
        self._report = lambda: self._log_save_evaluate(model, trial, ignore_keys_for_eval, start_time)
        self._share_runs()
        self._go_on(model, self.state.max_steps)
        self._tr_loss = torch.tensor(self.progress.loss_sum, dtype=torch.float64)
        self._total_loss_scalar = self.progress.loss_total

    def _go_on(self, model: nn.Module, steps: int) -> None:
        """Train until this number of steps is taken and all work after them is done, or a callback stops."""
        assert self.session is not None
        self._is_looping = True
        while self.progress.done < max(steps, self.session.step):
            if self.progress.done < self.session.step:
                try:
                    self._finish_step()
                except StepUndone:
                    for flag in FLAGS:  # of the step that was undone
                        setattr(self.control, flag, False)
                if self.control.should_training_stop:
                    break
            elif self._step is None or self._drawn_in != self.session.generation:
                self._draw()
            else:
                self._take(model)
        self._is_looping, self.control.should_training_stop = False, True

    def _draw(self) -> None:
        """Wait for the session's next step."""
        if not self._has_drawn():
            logger.warning("the job is over, and this worker has no part in it any more: it ends")
            raise SystemExit(0)

    def _has_drawn(self) -> bool:
        """Draw a step and return whether there is one. New members agree with the others on the work that is done."""
        assert self.session is not None
        self._step = next(self._steps, None)
        if not self._has_begun:
            check_place(self.sampler, self.session.step)
        if self._step is None:
            return False
        self._drawn_in = self.session.generation
        if self._met_in != self._drawn_in:
            self._met_in = self._drawn_in
            self._meet()
            if self._has_begun:
                self._share_runs()
        return True

    def _end_together(self) -> None:
        """End the job when all members have come here. If one is lost meanwhile, those that are left recover first."""
        session = self.session
        while session is not None and not session.has_left:
            with session.alone():
                pass
            if session.group.broken is None:
                session.stop()
                self._has_drawn()
            else:
                self._together(lambda *_: None)

    def _take(self, model: nn.Module) -> None:
        """Take a step of the session; a death on the way leaves it to the next one."""
        step, self._step = self._step, None
        assert step is not None and self.session is not None
        self._place(self.session.step)
        if self._begun_epoch is not None and self._epochs.of(self.session.step) != self._begun_epoch:
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self._begun_epoch = self._epochs.of(self.session.step)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        self.progress.learning_rate = self._get_learning_rate()
        model.train()
        with step:
            self._accumulate(model, step, self._batches.of_step(step, self._parts))
        if step.committed:
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    def _accumulate(self, model: nn.Module, step: Step, parts: list[tuple[float, Any]]) -> None:
        """Accumulate the gradients of all parts of this member's batch, given with their weights."""
        # Tokens with a label, if the loss is their sum divided by that number; of all parts, as transformers does.
        # A part of weight 0 has those of another one, which count once; if all have weight 0, any number will do.
        own = [inputs for weight, inputs in parts if weight > 0] or [parts[0][1]]
        items = self._get_num_items_in_batch(own, self.args.device)
        divisor = None if items is None else torch.as_tensor(items).clamp(min=1)  # also without any label
        for _, (_, inputs) in zip(step.micro_batches(self._parts), parts, strict=True):
            count = None if divisor is None else self._get_num_items_in_batch([inputs], self.args.device)
            ready = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, ready, num_items_in_batch=divisor)
            step.backward(loss if divisor is None else loss * divisor, count=count)

    def _finish_step(self) -> None:
        """Do the work after the step that was taken last: logs, evaluation, checkpoints, callbacks.

        Raises:
            StepUndone: a recovery has led back to an earlier step.
        """
        assert self.session is not None
        step = self.session.step
        self.progress.begin_work()
        self._place(step)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._agree()
        self._report()
        if self._epochs.is_end(step) or self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._report()
        self._agree()
        if self.control.should_epoch_stop:
            raise RuntimeError(
                "ElasticTrainer: a callback has set control.should_epoch_stop, but the sampler "
                "orders the samples: an epoch cannot end early. Set control.should_training_stop, or choose max_steps"
            )
        self.progress.end_work(step)

    def _log_save_evaluate(self, model: nn.Module, trial: Any, ignored: list[str] | None, start_time: float) -> None:
        """Log, evaluate and save as callbacks have asked."""
        progress, epoch = self.progress, self.state.epoch
        self._tr_loss = torch.tensor(progress.loss_sum, dtype=torch.float64)
        self._total_loss_scalar, self._globalstep_last_logged = progress.loss_total, progress.logged
        norm, rate = progress.grad_norm, progress.learning_rate
        self._maybe_log_save_evaluate(self._tr_loss, norm, model, trial, epoch, ignored, start_time, learning_rate=rate)
        progress.loss_sum = self._tr_loss.item()
        progress.loss_total, progress.logged = self._total_loss_scalar, self._globalstep_last_logged

    def _place(self, step: int) -> None:
        self.state.global_step, self.state.epoch = step, self._epochs.progress(step)

    # ---- what all members do together

    def _meet(self) -> None:
        """Agree with all members on the work that is done: all take the progress of the member that has done most."""
        mine = {"state": self.progress.state_dict(), "history": self.state.log_history}
        reported = self._together(lambda *_: mine)
        latest = max(reported, key=lambda each: (each["state"]["done"], len(each["history"])))  # new members have none
        self.progress.load_state_dict(latest["state"])
        self.state.log_history = latest["history"]
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._check_sees(self.state.best_model_checkpoint)

    def _check_sees(self, folder: str) -> None:
        """Check that this member sees a folder that another one sees.

        Raises:
            RuntimeError: it does not; the others continue without it.
        """
        is_seen = trainer_folders.is_folder(folder)
        if any(self._together(lambda *_: is_seen)) and not is_seen:
            raise RuntimeError(trainer_folders.not_shared(folder, [platform.node()]))

    def _share_runs(self) -> None:
        """Share with all members the trackers' runs that the main process has begun."""
        callbacks = self.callback_handler.callbacks
        reported = self._together(lambda *_: trackers.found(callbacks) if self.is_world_process_zero() else None)
        runs: dict[str, str] = next((each for each in reported if each is not None), {})
        self.progress.runs = self.progress.runs | runs
        trackers.resume(callbacks, self.progress.runs)

    def _agree(self) -> None:
        """Make a callback's decision on one member the decision of all. transformers' own decide the same on all."""
        if not any(_is_foreign(callback) for callback in self.callback_handler.callbacks):
            return
        reported = self._together(lambda *_: [getattr(self.control, flag) for flag in FLAGS])
        for flag, values in zip(FLAGS, zip(*reported, strict=True), strict=True):
            setattr(self.control, flag, any(values))

    def _together(self, work: Callable[[int, int], Any]) -> list[Any]:
        """Return what `work` returns on each member, as JSON carries it. Collective; it is repeated after a death.

        Args:
            work: gets the number of this member among those that work, and how many these are.

        Raises:
            StepUndone: a recovery has led back to a step before the one whose work is under way. After `train` that
                step is taken again instead.
        """
        assert self.session is not None
        session, step = self.session, self.session.step

        def part(place: int, places: int) -> dict[str, Any]:
            if session.step != step:
                return {"value": None}
            if self._best is not None and not self._is_looping:
                self._use_best(session)
            return {"value": work(place, places)}

        reported = session.gathered(part)
        self._note_main()
        if session.step == step:
            return [each["value"] for each in reported]
        if self._is_looping:
            raise StepUndone
        self.control.should_training_stop = False
        self._go_on(self.model_wrapped, step)
        return self._together(work)

    def _use_best(self, session: Session) -> None:
        assert self._best is not None
        substitute_of(session).use(self._best)

    def _note_main(self) -> None:
        """Note whether this process is the main one, which reports and writes."""
        assert self.session is not None
        is_main, was_main = self.session.is_main, self.state.is_world_process_zero
        self.args.set_member(0 if is_main else max(1, self.session.group.rank))
        self.state.is_world_process_zero = self.state.is_local_process_zero = is_main
        if self._has_begun and is_main != was_main:
            change = trackers.take_over if is_main else trackers.hand_over
            change(self.callback_handler.callbacks)

    def is_world_process_zero(self) -> bool:
        """Return whether this member reports and writes. When it dies, another one does."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Return whether `is_world_process_zero`."""
        return self.is_world_process_zero()


def _is_foreign(callback: TrainerCallback) -> bool:
    return not type(callback).__module__.startswith("transformers.")
