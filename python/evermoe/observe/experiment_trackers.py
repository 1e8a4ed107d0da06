"""Curves of a member in Weights & Biases and in MLflow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from evermoe.events import Event
from evermoe.observe.curves import Curves
from evermoe.process.warn import warn

if TYPE_CHECKING:
    import wandb

STEP_AXIS = "evermoe/step"
"""Axis of the curves in Weights & Biases."""


class Wandb:
    """Logs the curves of this member, those of [`TensorBoard`][evermoe.observe.TensorBoard], to a run of W&B.

        wandb.init(project="my-model", group="my-job")
        session = evermoe.Session(..., on_event=Wandb())

    The axis of the curves is `evermoe/step`, the number of steps taken. W&B's own step only grows, so W&B drops a
    value for a step that a failure has undone; on this axis such a step has two points. Each event is a row of the
    run: if the script logs to the same run, it must leave out `step=` and define its axis by `define_metric`, too.

    The run remains the script's: it ends it by `run.finish()`. If W&B refuses a value, a warning is issued once and
    training continues.

    Args:
        run: the run; None for the current one, `wandb.run`.

    Raises:
        ModuleNotFoundError: `wandb` is missing: `pip install wandb`.
        RuntimeError: `run` is None, and no run has begun.
    """

    def __init__(self, run: wandb.Run | None = None) -> None:
        import wandb

        run = wandb.run if run is None else run
        if run is None:
            raise RuntimeError(
                "evermoe.observe.Wandb: no run of W&B has begun in this process; call wandb.init() first"
            )
        self._run = run
        self._run.define_metric(STEP_AXIS)
        self._defined: set[str] = set()
        """Curves with this axis."""
        self._curves = Curves()
        self._refusal = wandb.Error
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        """Log the points that an event adds to the curves."""
        step, values = self._curves.points(event)
        if not values:
            return
        try:
            for name in values.keys() - self._defined:
                self._run.define_metric(name, step_metric=STEP_AXIS)
                self._defined.add(name)
            self._run.log(values | {STEP_AXIS: step})
        except (self._refusal, OSError) as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"curves cannot be logged to W&B's run {self._run.id}: {error}. Training continues")


class MLflow:
    """Logs the curves of this member, those of [`TensorBoard`][evermoe.observe.TensorBoard], to MLflow's active run.

        with mlflow.start_run():
            session = evermoe.Session(..., on_event=MLflow())

    Curves are metrics over the number of steps taken. A step that a failure undoes has two points. MLflow sends the
    values in threads of its own, and logs an error if its server does not take them; training continues. The run
    remains the script's: end it by `with` or `mlflow.end_run()`, which writes the last values.

    Raises:
        ModuleNotFoundError: `mlflow` is missing: `pip install mlflow` or, without its server, `mlflow-skinny`.
        RuntimeError: no run is active in this thread.
    """

    def __init__(self) -> None:
        import mlflow

        run = mlflow.active_run()
        if run is None:
            raise RuntimeError("evermoe.observe.MLflow: no run is active in this thread; call mlflow.start_run() first")
        self._id = run.info.run_id
        self._client = mlflow.MlflowClient()
        """Takes the run's ID: active runs belong to a thread, and some events come from others."""
        self._make = mlflow.entities.Metric
        self._curves = Curves()
        self._refusal = mlflow.MlflowException
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        """Log the points that an event adds to the curves."""
        step, values = self._curves.points(event)
        if not values:
            return
        now = int(1000 * time.time())
        try:
            points = [self._make(name, value, now, step) for name, value in values.items()]
            self._client.log_batch(self._id, points, synchronous=False)
        except self._refusal as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"curves cannot be logged to MLflow's run {self._id}: {error}. Training continues")
