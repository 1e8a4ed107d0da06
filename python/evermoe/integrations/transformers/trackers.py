"""Runs of trackers (TensorBoard, W&B, MLflow) that outlive the process that began them.

transformers' callbacks begin a run in the main process. Its id is part of the job's state, so that the next main
process, or a job that is started again, resumes the same run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

VARIABLES = {
    "WandbCallback": {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"},
    "MLflowCallback": {"MLFLOW_RUN_ID": "{}"},
}
"""Environment variables by which a callback resumes a run; `{}` stands for the run's id."""


def found(callbacks: Sequence[Any]) -> dict[str, str]:
    """Return the runs that this process has begun, by the callback's name."""
    runs: dict[str, str] = {}
    for each in callbacks:
        name = type(each).__name__
        if name == "TensorBoardCallback" and each.logging_dir is not None:
            runs[name] = each.logging_dir
        elif name == "WandbCallback" and each._wandb is not None and each._wandb.run is not None:
            runs[name] = each._wandb.run.id
        elif name == "MLflowCallback" and each._ml_flow is not None and each._ml_flow.active_run() is not None:
            runs[name] = each._ml_flow.active_run().info.run_id
    return runs


def resume(callbacks: Sequence[Any], runs: dict[str, str]) -> None:
    """Make callbacks resume runs once their process is the main one."""
    for each in callbacks:
        run = runs.get(type(each).__name__)
        if run is None:
            continue
        if hasattr(each, "logging_dir"):
            each.logging_dir = run
        for name, value in VARIABLES.get(type(each).__name__, {}).items():
            os.environ[name] = value.format(run)


def take_over(callbacks: Sequence[Any]) -> None:
    """Make callbacks open their runs when they log next, in a process that has become the main one."""
    for each in callbacks:
        if getattr(each, "_initialized", False) is True:
            each._initialized = False


def hand_over(callbacks: Sequence[Any]) -> None:
    """Close the runs here, in a process that is no longer the main one; the new main process resumes them."""
    for each in callbacks:
        name = type(each).__name__
        if name == "TensorBoardCallback" and each.tb_writer is not None:
            each.tb_writer.close()
            each.tb_writer = None
        elif name == "WandbCallback" and each._wandb is not None and each._wandb.run is not None:
            each._wandb.finish()
        elif name == "MLflowCallback" and each._ml_flow is not None and each._ml_flow.active_run() is not None:
            each._ml_flow.end_run()
