"""Listeners of a session's events: JSON lines, metrics for Prometheus, and curves for TensorBoard, W&B and MLflow.

session = evermoe.Session(..., on_event=[JsonLines("events.jsonl"), Metrics(port=9400), TensorBoard("curves")])
"""

from evermoe.observe.experiment_trackers import MLflow, Wandb
from evermoe.observe.json_lines import JsonLines
from evermoe.observe.metrics import Metrics
from evermoe.observe.tensorboard import TensorBoard

__all__ = ["JsonLines", "MLflow", "Metrics", "TensorBoard", "Wandb"]
