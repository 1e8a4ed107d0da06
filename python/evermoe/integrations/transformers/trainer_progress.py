"""The part of a Trainer's run that belongs to the job: best metric, patience, trackers' runs, losses not logged yet."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ExportableState

from evermoe.integrations.transformers import trackers

BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class TrainerProgress:
    """The state of a Trainer's loop, for `Session(stateful=…)`.

    A step's update stores the state before the work that follows the step: logs, evaluation, callbacks. A job that is
    started again repeats that work. While it is under way, others get the stored state, and this member keeps its own
    unless the step is undone.

    Args:
        trainer: owner of the state; has a `session` once that is made.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.done = 0
        """Steps after which logs, evaluation and callbacks are done."""
        self.counted = 0
        """Steps whose losses are part of the sums."""
        self.loss_sum = self.loss_total = 0.0
        """Losses since the latest log, and up to it."""
        self.logged = 0
        """Steps at the latest log."""
        self.learning_rate = 0.0
        self.grad_norm: float | None = None
        """Rate and norm of the latest step, for its log."""
        self.runs: dict[str, str] = {}
        """Runs of trackers, by the callback's name."""
        self._before: dict[str, Any] | None = None
        """The state before the work that is under way."""

    def begin_work(self) -> None:
        """Begin the work after a step."""
        self._before = None
        self._before = self.state_dict()

    def end_work(self, step: int) -> None:
        """End the work after a step."""
        self._before, self.done = None, step

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, the same on all members; with the loss of the step that was taken last."""
        if self._before is not None and self._before["counted"] == self._steps():
            return self._before
        self.count_step()
        state = self._trainer.state
        return {
            "done": self.done,
            "counted": self.counted,
            "losses": [self.loss_sum, self.loss_total, self.logged],
            "latest": [self.learning_rate, self.grad_norm],
            "best": {name: getattr(state, name) for name in BEST},
            "callbacks": [[type(each).__name__, each.state()["attributes"]] for each in self._exportable()],
            "runs": self.runs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken."""
        if self._before is not None and self._before["counted"] == state["counted"]:
            return
        self._before = None
        self.done, self.counted, self.runs = state["done"], state["counted"], state["runs"]
        self.loss_sum, self.loss_total, self.logged = state["losses"]
        self.learning_rate, self.grad_norm = state["latest"]
        trainer = self._trainer
        for name, value in state["best"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = [each for each in trainer.state.log_history if each["step"] <= self.done]
        waiting = self._exportable()
        for name, attributes in state["callbacks"]:
            callback = next((each for each in waiting if type(each).__name__ == name), None)
            if callback is not None:
                waiting.remove(callback)
                vars(callback).update(attributes)
        trackers.resume(trainer.callback_handler.callbacks, self.runs)

    def _exportable(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _steps(self) -> int:
        session = self._trainer.session
        return 0 if session is None else session.step

    def count_step(self) -> None:
        """Add the loss of the step that was taken last, unless it is counted."""
        session = self._trainer.session
        if session is None or self._steps() != self.counted + 1:
            return
        loss = session.loss
        if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = self.loss_sum / (1 + self.counted - self.logged)
        self.counted, self.grad_norm = session.step, session.grad_norm
        self.loss_sum += loss
